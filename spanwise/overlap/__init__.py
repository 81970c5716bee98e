"""Hide the communication of a whole step: schedules and buckets of collectives on ATen FX graphs.

    fx graph ─► graph ─► dag ─► schedule ─► bucket ─► emit ─► runnable graph
                          └──► simulate, bounds ─► report

`dag`, `simulate`, `bounds`, `memory`, `schedule` and `bucket` are plain numpy: what there is to run, how long an order
of it takes, how long any order must take, and a good one within a budget of memory. `operators`, `graph`, `costs`,
`measure` and `capture` know torch: what the nodes of a graph do, what they cost, what they really take, and graphs to
try it on. `emit` changes a graph, and `optimize` makes of all of them what users call; `backend` is that for
``torch.compile``, and `agree` sees to it that all ranks decided the same. `reasons`, `report` and `trace` say what came
of it.
"""

# All is imported at once: `backend`, `measure`, `optimize` and `simulate` are functions that hide modules of the same
# name, which would take their place again when imported later. What else these modules have is imported from them.
from spanwise.overlap.backend import backend
from spanwise.overlap.costs.measure import Measured, measure
from spanwise.overlap.costs.roofline import TENSOR_CORES, VECTOR_UNITS, CostModel, as_cost
from spanwise.overlap.fx.files import load_graphs, save_graphs
from spanwise.overlap.ir.bounds import Bounds
from spanwise.overlap.ir.dag import GraphError
from spanwise.overlap.ir.simulate import Timeline
from spanwise.overlap.optimize import Result, lower_bound, optimize, simulate

__all__ = [
    "TENSOR_CORES",
    "VECTOR_UNITS",
    "Bounds",
    "CostModel",
    "GraphError",
    "Measured",
    "Result",
    "Timeline",
    "as_cost",
    "backend",
    "load_graphs",
    "lower_bound",
    "measure",
    "optimize",
    "save_graphs",
    "simulate",
]

"""Hide the communication of a whole step: schedules and buckets of collectives on ATen FX graphs.

    fx graph ─► graph ─► dag ─► schedule ─► bucket ─► emit ─► runnable graph
                          └──► simulate, bounds ─► report

`dag`, `simulate`, `bounds`, `memory`, `schedule` and `bucket` are plain numpy: what there is to run, how long an order
of it takes, how long any order must take, and a good one within a budget of memory. `operators`, `graph`, `costs` and
`capture` know torch: what the nodes of a graph do, what they cost, and graphs to try it on. `emit` changes a graph, and
`optimize` makes of all of them what users call.
"""

# Functions that have the name of the module that they are in hide it: import from the module what else it has.
from spanwise.overlap.bounds import Bounds
from spanwise.overlap.costs import TENSOR_CORES, VECTOR_UNITS, CostModel, as_cost
from spanwise.overlap.dag import GraphError
from spanwise.overlap.optimize import Result, lower_bound, optimize, simulate
from spanwise.overlap.simulate import Timeline

__all__ = [
    "TENSOR_CORES",
    "VECTOR_UNITS",
    "Bounds",
    "CostModel",
    "GraphError",
    "Result",
    "Timeline",
    "as_cost",
    "lower_bound",
    "optimize",
    "simulate",
]

"""Hide the communication of a whole step: order and bucket the collectives of ATen FX graphs.

    fx graph ─► fx.graph ─► dag ─► quotient ─► search ─► buckets ─► fx.emit ─► new graph
                  costs ─────┘ └──► engine, bounds ─► explain

A file or folder imports only from those above it, except in `Timeline.save_chrome_trace`:

- `dag`: a step as plain data. `bounds` of every order of it.
- `loops`, `scheduler`, `engine`: the machine on which every order is made and timed, in compiled code.
- `quotient`: a dag with some nodes joined: views to what they follow, collectives to buckets.
- `search`: orders with a short makespan within a memory budget. `buckets`: collectives that become one launch.
- `fx`: fx graph to dag and back; captured and saved graphs.
- `costs`: milliseconds of nodes, by a roofline or measured.
- `split`: token-wise compute and its collectives in pieces.
- `offload`: activations in the memory of the host between forward and backward.
- `explain`: reasons for exposed time, reports, traces.
- `optimize`, `consensus` (ranks compare their schedules), `pytorch_pass` (PyTorch's pass for comparison); above them
  `graph_pass`, for pipelines of passes, and `backend`, for ``torch.compile``.
"""

# Import all names at once: the functions `backend`, `graph_pass`, `optimize` and `measure` hide modules of the same
# name, and a later import of such a module would replace the function.
from spanwise.overlap.backend import backend
from spanwise.overlap.bounds import Bounds
from spanwise.overlap.costs.measure import Measured, measure
from spanwise.overlap.costs.roofline import TENSOR_CORES, VECTOR_UNITS, CostModel, as_cost
from spanwise.overlap.dag import GraphError
from spanwise.overlap.engine import Timeline
from spanwise.overlap.explain.report import Result
from spanwise.overlap.fx.files import load_graphs, save_graphs
from spanwise.overlap.graph_pass import graph_pass
from spanwise.overlap.optimize import lower_bound, optimize, simulate
from spanwise.overlap.split.choose import Split

__all__ = [
    "TENSOR_CORES",
    "VECTOR_UNITS",
    "Bounds",
    "CostModel",
    "GraphError",
    "Measured",
    "Result",
    "Split",
    "Timeline",
    "as_cost",
    "backend",
    "graph_pass",
    "load_graphs",
    "lower_bound",
    "measure",
    "optimize",
    "save_graphs",
    "simulate",
]

"""Context parallelism for PyTorch, planned from the attention mask."""

from spanwise.attention import Aux, AuxRequest, context_parallel_attention
from spanwise.balancers import LayoutProblem, LoadBalancer
from spanwise.batch import cross_entropy, roll, shard, shard_batch, unshard
from spanwise.cost import B200, CPU_HOST, H100, H200, Hardware, Link
from spanwise.exchange.failure import ExchangeError
from spanwise.layout import Layout
from spanwise.mask import SpanMask
from spanwise.packed import packed_attention
from spanwise.packing import Packing
from spanwise.parallel import ContextParallel
from spanwise.plan import Plan
from spanwise.planner import make_plan
from spanwise.ptrr import ptrr_schedule
from spanwise.rank_plan import RankPlan
from spanwise.thd_order import contiguous_to_dualchunk_order_thd, dualchunk_to_contiguous_order_thd
from spanwise.verify import VerifyReport, verify

__all__ = [
    "Aux",
    "AuxRequest",
    "B200",
    "CPU_HOST",
    "ContextParallel",
    "ExchangeError",
    "H100",
    "H200",
    "Hardware",
    "Layout",
    "LayoutProblem",
    "Link",
    "LoadBalancer",
    "Packing",
    "Plan",
    "RankPlan",
    "SpanMask",
    "VerifyReport",
    "context_parallel_attention",
    "contiguous_to_dualchunk_order_thd",
    "cross_entropy",
    "dualchunk_to_contiguous_order_thd",
    "make_plan",
    "packed_attention",
    "ptrr_schedule",
    "roll",
    "shard",
    "shard_batch",
    "unshard",
    "verify",
]

"""Context parallelism for PyTorch, planned from the attention mask.

A name is imported when it is first used: `import spanwise` and `spanwise --help` import no torch.
"""

import importlib as _importlib
import importlib.util as _importlib_util
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

if _TYPE_CHECKING:
    from spanwise.advice.advise import Advice as Advice, Choice as Choice, advise as advise
    from spanwise.attention.attention import (
        Aux as Aux,
        AuxRequest as AuxRequest,
        context_parallel_attention as context_parallel_attention,
    )
    from spanwise.attention.call_log import ExchangeError as ExchangeError, MismatchError as MismatchError
    from spanwise.attention.compare import compare_calls as compare_calls
    from spanwise.attention.context_parallel import ContextParallel as ContextParallel
    from spanwise.attention.failure import exchange_errors as exchange_errors
    from spanwise.attention.packed import packed_attention as packed_attention
    from spanwise.attention.rank_plan import RankPlan as RankPlan
    from spanwise.attention.verify import VerifyReport as VerifyReport, verify as verify
    from spanwise.batch.datasets import GlobalBatchDataset as GlobalBatchDataset, GlobalBatchStream as GlobalBatchStream
    from spanwise.batch.global_batches import GlobalBatch as GlobalBatch, GlobalBatches as GlobalBatches
    from spanwise.batch.loss import cross_entropy as cross_entropy, linear_cross_entropy as linear_cross_entropy
    from spanwise.batch.sharding import roll as roll, shard as shard, shard_batch as shard_batch, unshard as unshard
    from spanwise.batch.token_scores import token_logprobs as token_logprobs
    from spanwise.batch.trees import TreeEdges as TreeEdges, shard_edges as shard_edges, unshard_edges as unshard_edges
    from spanwise.hardware import (
        B200 as B200,
        CPU_HOST as CPU_HOST,
        H100 as H100,
        H200 as H200,
        Hardware as Hardware,
        Link as Link,
    )
    from spanwise.layouts.balancers import ptrr_schedule as ptrr_schedule
    from spanwise.layouts.layout import Layout as Layout
    from spanwise.layouts.packing import Packing as Packing
    from spanwise.layouts.problem import LayoutProblem as LayoutProblem, LoadBalancer as LoadBalancer
    from spanwise.layouts.thd_order import (
        contiguous_to_dualchunk_order_thd as contiguous_to_dualchunk_order_thd,
        dualchunk_to_contiguous_order_thd as dualchunk_to_contiguous_order_thd,
    )
    from spanwise.layouts.token_tree import (
        SequenceTree as SequenceTree,
        TokenTree as TokenTree,
        tree_from_sequences as tree_from_sequences,
    )
    from spanwise.masks.span_mask import SpanMask as SpanMask
    from spanwise.planning.make_plan import make_plan as make_plan
    from spanwise.planning.plan import Plan as Plan
    from spanwise.planning.recurrence import Recurrence as Recurrence
    from spanwise.recurrence.relayout import (
        RelayoutRoute as RelayoutRoute,
        relayout as relayout,
        relayout_route as relayout_route,
    )

#: Modules of the public names.
_HOMES = {
    "advice.advise": "Advice Choice advise",
    "attention.attention": "Aux AuxRequest context_parallel_attention",
    "attention.context_parallel": "ContextParallel",
    "attention.call_log": "ExchangeError MismatchError",
    "attention.compare": "compare_calls",
    "attention.failure": "exchange_errors",
    "attention.packed": "packed_attention",
    "attention.rank_plan": "RankPlan",
    "attention.verify": "VerifyReport verify",
    "batch.datasets": "GlobalBatchDataset GlobalBatchStream",
    "batch.global_batches": "GlobalBatch GlobalBatches",
    "batch.loss": "cross_entropy linear_cross_entropy",
    "batch.sharding": "roll shard shard_batch unshard",
    "batch.token_scores": "token_logprobs",
    "batch.trees": "TreeEdges shard_edges unshard_edges",
    "hardware": "B200 CPU_HOST H100 H200 Hardware Link",
    "layouts.layout": "Layout",
    "layouts.packing": "Packing",
    "layouts.balancers": "ptrr_schedule",
    "layouts.problem": "LayoutProblem LoadBalancer",
    "layouts.thd_order": "contiguous_to_dualchunk_order_thd dualchunk_to_contiguous_order_thd",
    "layouts.token_tree": "SequenceTree TokenTree tree_from_sequences",
    "masks.span_mask": "SpanMask",
    "planning.make_plan": "make_plan",
    "planning.plan": "Plan",
    "planning.recurrence": "Recurrence",
    "recurrence.relayout": "RelayoutRoute relayout relayout_route",
    "integrations.transformers": "hf",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF.keys() - {"hf"})  # type checkers read the imports above


def __getattr__(name: str) -> _Any:
    if name in _MODULE_OF:
        module = _importlib.import_module(f"spanwise.{_MODULE_OF[name]}")
        value = globals()[name] = module if name == "hf" else getattr(module, name)
        return value
    if not name.startswith("_") and _importlib_util.find_spec(f"spanwise.{name}"):
        return _importlib.import_module(f"spanwise.{name}")  # a folder, such as spanwise.overlap
    raise AttributeError(f"module 'spanwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})

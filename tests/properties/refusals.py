"""Calls that must be refused: what is wrong with them, by name. Imports nothing of spanwise.

Each takes the arguments of a call that works, and spoils them. The call must raise ``ValueError`` on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

Arguments = dict[str, Any]


class Refusal(NamedTuple):
    """A way to spoil a call.

    Attributes:
        stage: whether it spoils the arguments of "make_plan" or those of the "call" on each rank.
        spoil: changes the arguments.
        fits: whether a case has what it spoils.
    """

    stage: str
    spoil: Callable[[Arguments], Arguments]
    fits: Callable[[Any], bool] = lambda case: True


def _plan(fits: Callable[[Any], bool] = lambda case: True, **changes: Any) -> Refusal:
    return Refusal("make_plan", lambda given: {**given, **changes}, fits)


def _call(fits: Callable[[Any], bool] = lambda case: True, **changes: Any) -> Refusal:
    return Refusal("call", lambda given: {**given, **changes}, fits)


def _tensors(change: Callable[..., Any], fits: Callable[[Any], bool] = lambda case: True) -> Refusal:
    """Changes q, k and v, ``[batch, heads, tokens, head dim]``."""
    return Refusal("call", lambda given: {**given, "qkv": change(*given["qkv"])}, fits)


def _whole(case: Any) -> bool:
    return not case.packed


def _nothing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


REFUSALS: dict[str, Refusal] = {
    "no ranks": _plan(num_ranks=0),
    "three levels": _plan(num_ranks=(2, 2, 2)),
    "unknown balancer": _plan(balancer="round_robin"),
    "unknown exchange": _plan(exchange="broadcast"),
    "block size 0": _plan(block_size=0),
    "stages 0": _plan(stages=0),
    "chunks of a ring": _plan(exchange="ring", stages=2, num_ranks=3),
    "unknown dtype": _plan(dtype="int8"),
    "uneven groups of heads": _plan(num_q_heads=6, num_kv_heads=4),
    "heads that Ulysses cannot share": _plan(exchange="ulysses", num_ranks=4, num_q_heads=6, num_kv_heads=6),
    "a dense mask": Refusal("make_plan", lambda given: {**given, "mask": [[True]]}),
    "no mask": _plan(mask={}),
    "documents of another length": Refusal(
        "make_plan", lambda given: {**given, "cu_seqlens": [0, 10**6]}, lambda case: case.q_len == case.kv_len
    ),
    "a budget without heads": _plan(memory_budget=2**40, num_q_heads=None, head_dim=None),
    "unknown mask": _call(mask_name="no such mask"),
    "unknown kernel": _call(kernel="cudnn"),
    "a kernel for CUDA": _call(kernel="varlen"),
    "softcap 0": _call(softcap=0.0, score_mod=None),
    "softcap nan": _call(softcap=math.nan, score_mod=None),
    "softcap and score_mod": _call(softcap=1.0, score_mod=_nothing, kernel="reference"),
    "score_mod with sdpa": _call(softcap=None, score_mod=_nothing, kernel="sdpa"),
    "no plan": _call(plan=None),
    "no mesh": _call(lambda case: case.num_ranks > 1 and not case.rank_plan, mesh=None),
    "one token too many": _tensors(lambda q, k, v: (_longer(q), k, v)),
    "one key too many": _tensors(lambda q, k, v: (q, _longer(k), _longer(v))),
    "keys of another dtype": _tensors(lambda q, k, v: (q, k.float() if k.itemsize == 2 else k.half(), v)),
    "integers": _tensors(lambda q, k, v: (q.int(), k.int(), v.int())),
    "no heads": _tensors(lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]), _whole),
    "other head dims": _tensors(lambda q, k, v: (q, k.repeat(1, 1, 1, 2), v), _whole),
    "fewer values than keys": _tensors(lambda q, k, v: (q, k.repeat(1, 2, 1, 1), v), _whole),
    "three dims": _tensors(lambda q, k, v: (q[0], k[0], v[0]), _whole),
    "sinks of another shape": Refusal("call", lambda given: {**given, "sinks": given["qkv"][0].new_zeros(99)}),
    "aux of another type": _call(return_aux={"lse": True}),
}


def _longer(x: Any) -> Any:
    """One more token: dim 2 of ``[batch, heads, tokens, dim]``, dim 0 of ``[tokens, heads, dim]``."""
    dim = 2 if x.dim() == 4 else 0
    shape = list(x.shape)
    shape[dim] += 1
    return x.new_zeros(shape)

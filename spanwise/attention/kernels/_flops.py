"""FLOPs of the attention operators for torch's counters: `torch.utils.flop_counter` and whatever looks in its registry.

Counted are the matrix products of exact attention, as torch counts its own: two forward, five backward, of every pair
of a query and a key that the spans show. Where the contents of the spans are not at hand (fake tensors, another
device, an operator that takes tables instead) every pair of the shapes is counted, which is more than is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from spanwise import _torch


def count_flops(forward: Any, backward: Any) -> None:
    """Let torch count these two operators, by their packets (``torch.ops.spanwise.…``).

    ``forward`` takes q, k, v first, ``backward`` grad_out, grad_lse, q, k, v; their ``start`` and ``end``, if they have
    them, are spans ``[B or 1, N, Q]``.
    """

    @register_flop_formula(forward, get_raw=True)
    def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, out_val: Any = None, **kwargs: Any) -> int:
        return _of_shown_pairs(sdpa_flop_count(q.shape, k.shape, v.shape), q, k, _spans(forward, 3, more, kwargs))

    @register_flop_formula(backward, get_raw=True)
    def _(
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *more: Any,
        out_val: Any = None,
        **kwargs: Any,
    ) -> int:
        shape = (*q.shape[:3], v.shape[3])
        flops = sdpa_backward_flop_count(shape, q.shape, k.shape, v.shape)
        return _of_shown_pairs(flops, q, k, _spans(backward, 5, more, kwargs))


def _spans(op: Any, first: int, more: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    names = [argument.name for argument in op.default._schema.arguments][first:]
    given = {**dict(zip(names, more, strict=False)), **kwargs}
    return [given[name] for name in ("start", "end") if name in given]


def _of_shown_pairs(flops: int, q: torch.Tensor, k: torch.Tensor, spans: list[torch.Tensor]) -> int:
    batch, _, q_len, _ = q.shape
    pairs = batch * q_len * k.shape[2]
    if not spans or not pairs or not all(x.device.type == "cpu" and not _torch.is_fake(x) for x in spans):
        return int(flops)
    start, end = spans
    shown = int((end - start).clamp_min(0).sum()) * (batch // start.shape[0])
    return int(flops) * shown // pairs

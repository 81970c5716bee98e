"""FLOPs of the attention operators, for torch's counter `torch.utils.flop_counter` and all readers of its registry.

Counts the matrix products of exact attention as torch does: two forward and five backward, for every visible pair of
a query and a key. Where the spans cannot be read, it counts every pair of the shapes, which is more than is computed:
for fake tensors, on another device, for an operator that takes tables instead of spans.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from spanwise import _torch


def count_flops(forward: Any, backward: Any) -> None:
    """Register FLOP formulas of two operators with torch.

    Args:
        forward: operator packet (``torch.ops.spanwise.…``) whose first arguments are q, k and v.
        backward: one whose first arguments are grad_out, grad_lse, q, k and v. Arguments ``start`` and ``end`` of
            either are spans ``[B or 1, N, Q]``.
    """

    @register_flop_formula(forward, get_raw=True)
    def _(q: Tensor, k: Tensor, v: Tensor, *more: Any, out_val: Any = None, **kwargs: Any) -> int:
        return _of_shown_pairs(sdpa_flop_count(q.shape, k.shape, v.shape), q, k, _spans(forward, 3, more, kwargs))

    @register_flop_formula(backward, get_raw=True)
    def _(
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *more: Any,
        out_val: Any = None,
        **kwargs: Any,
    ) -> int:
        shape = (*q.shape[:3], v.shape[3])
        flops = sdpa_backward_flop_count(shape, q.shape, k.shape, v.shape)
        return _of_shown_pairs(flops, q, k, _spans(backward, 5, more, kwargs))


def _spans(op: Any, first: int, more: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    names = [argument.name for argument in op.default._schema.arguments][first:]
    given = {**dict(zip(names, more, strict=False)), **kwargs}
    return [given[name] for name in ("start", "end") if name in given]


def _of_shown_pairs(flops: int, q: Tensor, k: Tensor, spans: list[Tensor]) -> int:
    batch, _, q_len, _ = q.shape
    pairs = batch * q_len * k.shape[2]
    if not spans or not pairs or not all(x.device.type == "cpu" and not _torch.is_fake(x) for x in spans):
        return int(flops)
    start, end = spans
    shown = int((end - start).clamp_min(0).sum()) * (batch // start.shape[0])
    return int(flops) * shown // pairs

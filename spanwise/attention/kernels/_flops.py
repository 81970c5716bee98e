"""FLOPs of the attention operators, for torch's counter `torch.utils.flop_counter` and all readers of its registry.

Counts the matrix products of exact attention as torch does: two forward and five backward, for every visible pair of
a query and a key. Where the spans cannot be read, it counts every pair of the shapes, which is more than is computed:
for fake tensors, on another device, for an operator that takes tables instead of spans.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from spanwise import _torch


def count_flops(forward: Any, backward: Any) -> None:
    """Register FLOP formulas of two operators with torch.

    Args:
        forward, backward: operator packets (``torch.ops.spanwise.…``) with arguments q, k and v. Arguments ``start``
            and ``end`` of either are spans ``[B or 1, N, Q]``.
    """
    for op, is_backward in ((forward, False), (backward, True)):
        register_flop_formula(op, get_raw=True)(functools.partial(_flops, op, is_backward))


def _flops(op: Any, is_backward: bool, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    names = [argument.name for argument in op.default._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k, v = (given[name].shape for name in "qkv")
    flops = sdpa_backward_flop_count((*q[:3], v[3]), q, k, v) if is_backward else sdpa_flop_count(q, k, v)
    spans, pairs = [given[name] for name in ("start", "end") if name in given], q[0] * q[2] * k[2]
    if not spans or not pairs or not all(x.device.type == "cpu" and not _torch.is_fake(x) for x in spans):
        return int(flops)
    start, end = spans
    shown = int((end - start).clamp_min(0).sum()) * (q[0] // start.shape[0])
    return int(flops) * shown // pairs

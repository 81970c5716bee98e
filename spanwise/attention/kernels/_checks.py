"""Shape checks of one local attention problem, shared by all kernels.

Letters in the shape comments of this folder:
B batch, H query heads, K key/value heads, G = H / K, Q query rows, T keys, N spans a row, D query/key head dim,
V value head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_problem(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, softcap: float | None = None) -> None:
    """Raise ``ValueError`` unless these, in the shapes of `Kernel.attend`, describe one attention problem."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k and v must be [batch, heads, tokens, head_dim], got {shapes}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and tokens, got {shapes}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch size, got {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dim, got {shapes}")
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key/value heads, got {q.shape[1]} query "
            f"heads and {k.shape[1]} key/value heads"
        )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _FLOATS:
        raise ValueError(
            f"q, k and v must share one dtype of float64, float32, bfloat16, float16, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}"
        )
    if start.dim() != 3 or start.shape != end.shape or start.is_floating_point() or end.is_floating_point():
        raise ValueError(
            "start and end must be integer tensors of one shape [batch or 1, num_spans, q_len], got "
            f"start {tuple(start.shape)} {start.dtype}, end {tuple(end.shape)} {end.dtype}"
        )
    if start.shape[2] != q.shape[2]:
        raise ValueError(f"the spans describe {start.shape[2]} query rows, q has {q.shape[2]}")
    if start.shape[0] != 1 and start.shape[0] != q.shape[0]:
        raise ValueError(f"the spans have batch size {start.shape[0]}, q has {q.shape[0]}; it must be that or 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}; None turns it off")

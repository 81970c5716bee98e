"""Run the rounds of the varlen kernel, forward and backward, with a flash kernel given as an argument.

`varlen` makes operators of them with torch's kernel. The host reads only `calls`, which lies in its memory;
everything else stays on the device. Letters of shapes: see `varlen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spanwise.attention.kernels._segments import Window
from spanwise.attention.kernels.merge import lse_dtype, union, with_lse_gradient


class Flash(NamedTuple):
    """A variable-length attention kernel. Shapes as in `torch.nn.attention.varlen`: ``[tokens, heads, W]``.

    Attributes:
        forward: ``(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale, window) -> (out, lse [H, tokens])``. Its
            results for rows without keys are not used.
        backward: ``(grad_out, q, k, v, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, scale, window) -> (dq, dk, dv)``. It
            reads `out` only as ``(grad_out * out).sum(-1)``, and nothing of rows without keys. Its results for rows
            without keys and for keys without queries are not used.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class _Call(NamedTuple):
    """One round on flattened batch rows."""

    sequences: tuple[Tensor, Tensor, int, int]  # cu_seq_q, cu_seq_k, max_q, max_k
    window: Window
    rows: Tensor  # [B * Q, 1]
    keys: Tensor  # [B * T, 1, 1]


_MOST_SEQUENCES = 65535  # CUDA: they are the second axis of the launch grid

Tables = Sequence[Tensor]
"""The fields of `varlen.VarlenTables`: calls, cu_seq_q, cu_seq_k, rows, keys."""


def _calls(batch: int, tables: Tables) -> Iterator[_Call]:
    """The rounds of the tables; those of a single row are repeated for every batch row."""
    calls, cu_seq_q, cu_seq_k, rows, keys = tables
    repeats = batch // rows.shape[1]

    def offsets(cu_seq: Tensor, tokens: int) -> Tensor:
        if repeats == 1:
            return cu_seq
        shifts = tokens * torch.arange(repeats, dtype=cu_seq.dtype, device=cu_seq.device)
        return F.pad((cu_seq[1:] + shifts.unsqueeze(1)).flatten(), (1, 0))

    first = 0
    for i, (left, right, max_q, max_k, num_sequences) in enumerate(calls.tolist()):  # host memory
        if num_sequences * repeats > _MOST_SEQUENCES:
            raise ValueError(
                f"kernel 'varlen' takes {_MOST_SEQUENCES} sequences in a call, got {num_sequences * repeats}; use "
                f"kernel='flex'"
            )
        here = slice(first, first + num_sequences + 1)
        first += num_sequences + 1
        cu_q, cu_k = offsets(cu_seq_q[here], rows.shape[2]), offsets(cu_seq_k[here], keys.shape[2])
        row_mask, key_mask = (x[i].repeat(repeats, 1).view(-1, 1) for x in (rows, keys))
        yield _Call((cu_q, cu_k, max_q, max_k), (left, right), row_mask, key_mask.unsqueeze(2))


def _flat(x: Tensor, width: int) -> Tensor:
    """``[B, H, T, D]`` as ``[B * T, H, width]``, in strides that flash can read; a view where possible."""
    x = x.transpose(1, 2).flatten(0, 1)
    x = x if width == x.shape[2] else F.pad(x, (0, width - x.shape[2]))  # by nothing it would copy
    # The kernel loads 16 bytes at a time.
    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:2])
    return x if aligned and x.stride(2) == 1 else x.clone(memory_format=torch.contiguous_format)


def _by_head(x: Tensor, batch: int, dim: int) -> Tensor:
    """``[B * T, H, W]`` as ``[B, H, T, dim]``; token-major in memory."""
    return x[..., :dim].contiguous().unflatten(0, (batch, -1)).transpose(1, 2)


def empty_by_head(x: Tensor, dim: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], dim).transpose(1, 2)


def _width(q: Tensor, v: Tensor) -> int:
    return -(-max(q.shape[3], v.shape[3]) // 8) * 8


def forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, tables: Tables, scale: float) -> tuple[Tensor, Tensor]:
    """Out and lse of `varlen`, computed by ``flash``."""
    batch, heads, q_len, _ = q.shape
    width = _width(q, v)
    q_flat, k_flat, v_flat = (_flat(x, width) for x in (q, k, v))
    total: tuple[Tensor, Tensor] | None = None
    for call in _calls(batch, tables):
        out, lse = flash.forward(q_flat, k_flat, v_flat, *call.sequences, scale, call.window)
        out.masked_fill_(~call.rows.unsqueeze(2), 0)
        lse = lse.mT.masked_fill_(~call.rows, float("-inf"))
        total = (out, lse) if total is None else union(*total, out, lse)
    if total is None:
        lse = q.new_full((batch, heads, q_len), float("-inf"), dtype=lse_dtype(q))
        return empty_by_head(q, v.shape[3]).zero_(), lse
    out, lse = total
    return (_by_head(out.to(q.dtype), batch, v.shape[3]), lse.unflatten(0, (batch, q_len)).transpose(1, 2).contiguous())


def backward(
    flash: Flash, grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, tables: Tables, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, computed by ``flash``.

    Every round gets the lse and the out of all rounds together. So it recomputes the softmax over the whole row, as
    ring attention does (Liu et al., 2023), and the merge needs no gradient.
    """
    batch, width, only_lse = q.shape[0], _width(q, v), grad_out is None
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    is_empty = lse == float("-inf")
    grad_out = grad_out.masked_fill(is_empty.unsqueeze(3), 0)
    if grad_lse is not None:
        grad_out, out = with_lse_gradient(grad_out, out, grad_lse.masked_fill(is_empty, 0))
    q_flat, k_flat, v_flat, grad_flat, out_flat = (_flat(x, width) for x in (q, k, v, grad_out, out))
    lse_flat = lse.masked_fill(is_empty, 0).transpose(0, 1).flatten(1).contiguous()
    total: list[Tensor] | None = None
    for call in _calls(batch, tables):
        grads = flash.backward(
            grad_flat, q_flat, k_flat, v_flat, out_flat, lse_flat, *call.sequences, scale, call.window
        )
        read = (call.rows.unsqueeze(2), call.keys, call.keys)
        parts = [grad.masked_fill_(~where, 0) for grad, where in zip(grads, read, strict=True)]
        if len(tables[0]) > 1:
            parts = [part.to(lse_dtype(q)) for part in parts]
        total = parts if total is None else [a.add_(b) for a, b in zip(total, parts, strict=True)]
    if total is None:
        dq, dk, dv = (empty_by_head(x, x.shape[3]).zero_() for x in (q, k, v))
    else:
        dq, dk, dv = (_by_head(x.to(y.dtype), batch, y.shape[3]) for x, y in zip(total, (q, k, v), strict=True))
    return dq, dk, dv.zero_() if only_lse else dv  # with_lse_gradient changed grad_out: none of it belongs to v

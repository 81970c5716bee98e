"""Span-masked attention on torch's variable-length flash kernel, CUDA forward and backward.

`_segments` cuts the mask into rounds. Each is one call of the kernel under `torch.nn.attention.varlen`, on q, k and v
where they are: rows and keys outside a round are further sequences that compute nothing, so nothing is gathered. Two
custom ops, as in `sdpa`. The rounds are contents of tensors, so a new plan needs no compilation. Letters of shapes: see
`base`; R rounds, W head dim of the kernel's call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spanwise import _torch
from spanwise.attention.kernels._flops import count_flops
from spanwise.attention.kernels._segments import Window, cut_rounds
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel, ScoreMod
from spanwise.attention.kernels.merge import OperatorPart, Part, lse_dtype, merge, union, with_lse_gradient
from spanwise.masks.span_mask import SpanMask

_HALVES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class VarlenTables:
    """Rounds of a span mask as tensors; a pytree.

    Batch 1 serves every row of a batch.

    Attributes:
        calls: int64 ``[R, 5]`` in host memory, where each launch reads it: window left and right, bounds of the
            lengths of sequences of queries and of keys, number of sequences.
        cu_seq_q, cu_seq_k: int32, offsets of the sequences of all rounds, one round after the other.
        rows: bool ``[R, batch, Q]``, rows that read a key in the round.
        keys: bool ``[R, batch, T]``, keys that are read in the round.
    """

    calls: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    rows: Tensor
    keys: Tensor

    @classmethod
    def of(cls, mask: SpanMask, device: torch.device | str = "cpu") -> VarlenTables:
        """The rounds of a mask on ``device``, marked for torch.compile as varying wherever masks differ."""
        rounds = cut_rounds(mask)
        calls = [(*r.window, r.max_q, r.max_k, len(r.cu_seq_q) - 1) for r in rounds]

        def joined(name: str) -> Tensor:
            offsets = [torch.from_numpy(getattr(r, name)) for r in rounds]
            return torch.cat([torch.empty(0, dtype=torch.int32), *offsets])

        def stacked(name: str, length: int) -> Tensor:
            masks = [torch.from_numpy(getattr(r, name)).view(mask.batch_size, length) for r in rounds]
            return torch.stack(masks) if masks else torch.empty(0, mask.batch_size, length, dtype=torch.bool)

        made = cls(
            calls=torch.tensor(calls, dtype=torch.int64).view(-1, 5),
            cu_seq_q=joined("cu_seq_q").to(device),
            cu_seq_k=joined("cu_seq_k").to(device),
            rows=stacked("rows", mask.q_len).to(device),
            keys=stacked("keys", mask.kv_len).to(device),
        )
        for x in (made.calls, made.cu_seq_q, made.cu_seq_k, made.rows, made.keys):
            _torch.mark_unbacked(x, 0)
        for x in (made.rows, made.keys):
            _torch.mark_dynamic(x, 2)
        return made


_torch.register_pytree_dataclass(VarlenTables)


class Varlen(Kernel):
    """torch's variable-length flash kernel on CUDA, in bfloat16 or float16, with head dims up to 256.

    The calls run one after the other and are merged in float32. Where V differs from D, or D is no multiple of 8, zeros
    fill up both. ``torch.use_deterministic_algorithms(True)`` makes the backward deterministic, as in torch's kernel;
    with ``warn_only=True`` the kernel only warns.
    """

    name = "varlen"
    table_type = VarlenTables

    def check_device(self, device: torch.device, score_mod: ScoreMod | None) -> None:
        if device.type != "cuda":
            raise ValueError(f"kernel 'varlen' runs on CUDA, the tensors are on {device}; use kernel='sdpa' on the CPU")
        if score_mod is not None:
            raise ValueError("kernel 'varlen' cannot apply a score_mod; use kernel='flex'")

    def tables(self, mask: SpanMask, device: torch.device) -> VarlenTables:
        return VarlenTables.of(mask, device)

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, options: AttentionOptions, *, max_logit: bool = False
    ) -> None:
        super().check(q, k, v, chunk, options, max_logit=max_logit)
        if options.softcap is not None or options.score_mod is not None:
            option = "a softcap" if options.softcap is not None else "a score_mod"
            raise ValueError(f"kernel 'varlen' cannot apply {option}; use kernel='flex' on CUDA, or 'reference'")
        if q.dtype not in _HALVES:
            raise ValueError(f"kernel 'varlen' takes bfloat16 or float16, got {q.dtype}; use kernel='flex'")
        if max(q.shape[3], v.shape[3]) > _MAX_HEAD_DIM:
            raise ValueError(
                f"kernel 'varlen' takes head dims up to {_MAX_HEAD_DIM}, got {q.shape[3]} (q, k) and {v.shape[3]} (v); "
                f"use kernel='reference'"
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        return merge([self.attend_part(q, k, v, chunk, q_pos, options)], q.dtype)

    def attend_part(
        self, queries: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> Part:
        tables = [getattr(chunk.tables, f.name) for f in dataclasses.fields(chunk.tables)]
        return OperatorPart.apply(_OPERATORS, queries.detach(), queries, k, v, *tables, options.scale_for(queries))


# --- rounds -------------------------------------------------------------------------------------------------------


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    """torch's flash kernel as `varlen_attn` calls it; `call` is (cu_seq_q, cu_seq_k, max_q, max_k, scale, window)."""
    *sequences, scale, window = call
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, *sequences, 0.0, window == (-1, 0), False,
        scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return out, lse


def flash_backward(grad_out: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward, of (grad_out, q, k, v, out, lse, then as there); it reads out in ``(grad_out * out).sum(-1)``."""
    *given, scale, window = call
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_out.device), torch.empty(0, device=grad_out.device)
    dq, dk, dv = _aten._flash_attention_backward(
        grad_out, *given, 0.0, window == (-1, 0), *no_dropout,
        scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return dq, dk, dv


class _Call(NamedTuple):
    """One round on flattened batch rows."""

    sequences: tuple[Tensor, Tensor, int, int]  # cu_seq_q, cu_seq_k, max_q, max_k
    window: Window
    rows: Tensor  # [B * Q, 1]
    keys: Tensor  # [B * T, 1, 1]


_MOST_SEQUENCES = 65535  # CUDA: they are the second axis of the launch grid


def _calls(batch: int, tables: Sequence[Tensor]) -> Iterator[_Call]:
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


def forward(
    q: Tensor, k: Tensor, v: Tensor, calls: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, rows: Tensor, keys: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out and lse."""
    batch, heads, q_len, _ = q.shape
    width = _width(q, v)
    q_flat, k_flat, v_flat = (_flat(x, width) for x in (q, k, v))
    total: tuple[Tensor, Tensor] | None = None
    for call in _calls(batch, (calls, cu_seq_q, cu_seq_k, rows, keys)):
        out, lse = flash_forward(q_flat, k_flat, v_flat, *call.sequences, scale, call.window)
        out.masked_fill_(~call.rows.unsqueeze(2), 0)
        lse = lse.mT.masked_fill_(~call.rows, float("-inf"))
        total = (out, lse) if total is None else union(*total, out, lse)
    if total is None:
        lse = q.new_full((batch, heads, q_len), float("-inf"), dtype=lse_dtype(q))
        return empty_by_head(q, v.shape[3]).zero_(), lse
    out, lse = total
    return (_by_head(out.to(q.dtype), batch, v.shape[3]), lse.unflatten(0, (batch, q_len)).transpose(1, 2).contiguous())


def backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    calls: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, rows: Tensor, keys: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v.

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
    for call in _calls(batch, (calls, cu_seq_q, cu_seq_k, rows, keys)):
        grads = flash_backward(
            grad_flat, q_flat, k_flat, v_flat, out_flat, lse_flat, *call.sequences, scale, call.window
        )
        read = (call.rows.unsqueeze(2), call.keys, call.keys)
        parts = [grad.masked_fill_(~where, 0) for grad, where in zip(grads, read, strict=True)]
        if len(calls) > 1:
            parts = [part.to(lse_dtype(q)) for part in parts]
        total = parts if total is None else [a.add_(b) for a, b in zip(total, parts, strict=True)]
    if total is None:
        dq, dk, dv = (empty_by_head(x, x.shape[3]).zero_() for x in (q, k, v))
    else:
        dq, dk, dv = (_by_head(x.to(y.dtype), batch, y.shape[3]) for x, y in zip(total, (q, k, v), strict=True))
    return dq, dk, dv.zero_() if only_lse else dv  # with_lse_gradient changed grad_out: none of it belongs to v


# --- operators -----------------------------------------------------------------------------------------------------

_varlen = torch.library.custom_op("spanwise::varlen", mutates_args=(), device_types="cuda")(forward)
_varlen_backward = torch.library.custom_op("spanwise::varlen_backward", mutates_args=(), device_types="cuda")(backward)


@_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_by_head(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype(q))


@_varlen_backward.register_fake
def _(grad_out: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_head(q, q.shape[3]), empty_by_head(k, k.shape[3]), empty_by_head(v, v.shape[3])


count_flops(torch.ops.spanwise.varlen, torch.ops.spanwise.varlen_backward)
_OPERATORS = torch.ops.spanwise.varlen, torch.ops.spanwise.varlen_backward

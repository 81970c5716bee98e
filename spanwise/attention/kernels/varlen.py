"""Span-masked attention on torch's variable-length flash kernel, CUDA forward and backward.

`_segments` cuts the mask into rounds. Each is one call of the kernel under `torch.nn.attention.varlen`, on q, k and v
where they are: rows and keys outside a round are further sequences that compute nothing, so nothing is gathered. Two
custom ops, as in `sdpa`. The rounds are contents of tensors, so a new plan needs no compilation. Letters of shapes: see
`base`; R rounds, W head dim of the kernel's call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from spanwise import _torch
from spanwise.attention.kernels._flops import count_flops
from spanwise.attention.kernels._rounds import Flash, backward, empty_by_head, forward
from spanwise.attention.kernels._segments import cut_rounds
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel, ScoreMod
from spanwise.attention.kernels.merge import Part, lse_dtype, merge, tokens
from spanwise.masks.span_mask import SpanMask

_HALVES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
FLASH = Flash(_torch.flash_forward, _torch.flash_backward)


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
        return _Part.apply(queries, k, v, *tables, options.scale_for(queries))


class _Part(torch.autograd.Function):
    # Not named: with as many arguments as names, torch.compile without gradients passes no ctx.
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Part:
        *tensors, ctx.scale = args
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        out, lse = torch.ops.spanwise.varlen(*args)
        ctx.mark_non_differentiable(out, lse)
        return out, lse, *tokens(out, lse, out.dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, __: Any, grad_out: Any, out: Tensor, grad_lse: Any, lse: Tensor) -> tuple[Any, ...]:
        q, k, v, *tables = ctx.saved_tensors
        grads = torch.ops.spanwise.varlen_backward(grad_out, grad_lse, q, k, v, out, lse, *tables, ctx.scale)
        return *grads, *[None] * (len(tables) + 1)


# --- operators -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("spanwise::varlen", mutates_args=(), device_types="cuda")
def _varlen(
    q: Tensor, k: Tensor, v: Tensor, calls: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, rows: Tensor, keys: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return forward(FLASH, q, k, v, (calls, cu_seq_q, cu_seq_k, rows, keys), scale)


@_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_by_head(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype(q))


@torch.library.custom_op("spanwise::varlen_backward", mutates_args=(), device_types="cuda")
def _varlen_backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    calls: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, rows: Tensor, keys: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tables = (calls, cu_seq_q, cu_seq_k, rows, keys)
    return backward(FLASH, grad_out, grad_lse, q, k, v, out, lse, tables, scale)


@_varlen_backward.register_fake
def _(grad_out: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_head(q, q.shape[3]), empty_by_head(k, k.shape[3]), empty_by_head(v, v.shape[3])


count_flops(torch.ops.spanwise.varlen, torch.ops.spanwise.varlen_backward)

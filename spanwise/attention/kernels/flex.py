"""Span-masked attention on torch's FlexAttention, for CUDA.

The spans reach the kernel as tensors that its mask_mod reads, and the non-empty blocks as `FlexTables`. So one
compiled kernel serves every mask of the same shapes. Letters of shapes: see `base`; A is the number of query blocks, C
the number of key blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from spanwise import _torch
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel, ScoreMod
from spanwise.attention.kernels.merge import Part, not_saving, part_of
from spanwise.masks.blocks import block_tables
from spanwise.masks.span_mask import SpanMask

Mod = Callable[..., Tensor]
BLOCK_SIZE = 128  # tokens of a block, in both directions
_MIN_CUDA_HEAD_DIM = 16
_HALVES_AND_FLOAT = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class FlexTables:
    """Non-empty blocks of a span mask, as FlexAttention's ``BlockMask`` lists them; a pytree of int32 tensors.

    A *full* block is read in every cell that exists, so the kernel skips the mask there; *partial* blocks are the
    other non-empty ones. The mask must be over the whole K/V buffer (`Flex.capacity`): the last block of a shorter one
    may be full although its spare rows must not be read.

    Attributes:
        kv_num_blocks: ``[B or 1, 1, A]``, partial key blocks of each query block.
        kv_indices: ``[B or 1, 1, A, C]``, which ones; the first ``kv_num_blocks`` entries count.
        full_kv_num_blocks, full_kv_indices: the same for full blocks.
        q_num_blocks: ``[B or 1, 1, C]``, partial query blocks of each key block, for the backward.
        q_indices: ``[B or 1, 1, C, A]``.
        full_q_num_blocks, full_q_indices: the same for full blocks.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor

    @classmethod
    def of(cls, mask: SpanMask, device: torch.device | str = "cpu") -> FlexTables:
        """The blocks of a mask on ``device``, marked for torch.compile as varying in the number of key blocks."""
        blocks, made = block_tables(mask, BLOCK_SIZE), {}
        for name in (field.name for field in dataclasses.fields(cls)):
            made[name] = torch.tensor(blocks[name], dtype=torch.int32).to(device)
            if "kv_num" not in name:
                _torch.mark_dynamic(made[name], 3 if "kv" in name else 2)
        return cls(**made)


_torch.register_pytree_dataclass(FlexTables)


class Flex(Kernel):
    """FlexAttention.

    Its graphs need a constant number of queries and at least one token per rank. Spare keys and few numbers of spans
    let one graph serve many plans.
    """

    name = "flex"
    dynamic_queries = False
    needs_tokens = True
    table_type = FlexTables

    def tables(self, mask: SpanMask, device: torch.device) -> FlexTables:
        return FlexTables.of(mask, device)

    def capacity(self, num_keys: int) -> int:
        """Whole blocks, which spare the kernel its bounds checks; two at least, as sizes 0 and 1 make graphs."""
        return max(2, -(-num_keys // BLOCK_SIZE)) * BLOCK_SIZE

    def num_spans(self, num_spans: int) -> int:
        """1, 4, 8, 16, …: the kernel unrolls its loop over spans, so that each number is a graph. Most masks have 1."""
        return 1 if num_spans <= 1 else max(4, 1 << (num_spans - 1).bit_length())

    def check_device(self, device: torch.device, score_mod: ScoreMod | None) -> None:
        if device.type == "cpu":
            raise ValueError(
                "kernel 'flex' runs on CUDA, the tensors are on cpu: torch's FlexAttention has no backward there; use "
                "kernel='sdpa' on the CPU, or 'reference' with a score_mod"
            )

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, options: AttentionOptions, *, max_logit: bool = False
    ) -> None:
        super().check(q, k, v, chunk, options, max_logit=max_logit)
        if q.dtype not in _HALVES_AND_FLOAT:
            raise ValueError(f"kernel 'flex' takes float32, bfloat16 or float16, got {q.dtype}; use kernel='reference'")
        if q.device.type == "cuda" and min(q.shape[3], v.shape[3]) < _MIN_CUDA_HEAD_DIM:
            raise ValueError(
                f"kernel 'flex' on CUDA needs head dims of at least {_MIN_CUDA_HEAD_DIM}, got {q.shape[3]} (q, k) and "
                f"{v.shape[3]} (v); use kernel='reference' or pad"
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Inside ``torch.compile`` the operator joins the surrounding graph.

        There all T share a graph if the tensor that T comes from is marked as dynamic (`_torch.mark_dynamic`). An eager
        call runs a separate graph. It is compiled at the first call of a setting (shapes without T, dtypes, options)
        and serves every later mask and T. What is not contiguous is copied.
        """
        # Before the graph and not in it, so that strides do not tell graphs apart.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if torch.compiler.is_compiling():
            return _attend(q, k, v, chunk, q_pos, options)
        # Marks stick to tensor objects: views keep them off the caller's.
        k, v, kv_pos = k.view_as(k), v.view_as(v), chunk.kv_pos.view_as(chunk.kv_pos)
        for x, dim in ((k, 2), (v, 2), (kv_pos, 1)):
            _torch.mark_dynamic(x, dim)
        mod = options.score_mod
        setting = (
            q.device, q.dtype, q.shape, k.shape[1], v.shape[3], chunk.start.shape, chunk.tables.kv_indices.shape[0],
            q.requires_grad, options.scale, options.softcap, getattr(mod, "__code__", type(mod)),
        )  # fmt: skip
        return _compiled(setting)(q, k, v, dataclasses.replace(chunk, kv_pos=kv_pos), q_pos, options)

    def attend_part(
        self, queries: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> Part:
        """`attend`; eager code keeps no output of a chunk for the backward, but reads the union's there.

        torch's backward takes the output for its product with grad_out alone. A compiled graph keeps each output.
        """
        if torch.compiler.is_compiling():
            return super().attend_part(queries, k, v, chunk, q_pos, options)
        whole_out: list[Tensor] = []
        with not_saving() as forget:
            out, lse = self.attend(queries, k, v, chunk, q_pos, options)
            like = (out.shape, out.stride(), out.dtype, out.device)
            forget((out,), lambda: [_in_strides(whole_out[0], *like)])
        return part_of(out, lse, whole_out)

    def max_logit(self, q: Tensor, k: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions) -> Tensor:
        """Of scaled, modified, capped scores; float32 ``[H]``."""
        run = _largest if torch.compiler.is_compiling() else _compiled_largest()
        return run(q.detach().contiguous(), k.detach().contiguous(), chunk, q_pos, options)


def _in_strides(x: Tensor, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return x if x.stride() == stride else torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(x)


@functools.cache
def _compiled(setting: tuple[Any, ...]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`_attend` compiled for one setting, kept for the life of the process as Dynamo keeps its own caches.

    Dynamo allows eight graphs for a code object, over all settings of a process. A copy of the code for each setting
    gives each its own eight. `setting` is only the key.
    """
    copy = types.FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__, None, None)
    return torch.compile(copy, fullgraph=True, dynamic=False)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """The compiled part. Its backward takes cotangents of out and lse."""
    _torch.mark_static(q, 2)  # a dynamic number of queries fails to compile
    if k.shape[2] % 128 == 0:
        torch._check(k.shape[2] % 128 == 0)  # spares the kernel its bounds checks, for a dynamic size too
    out, aux = _flex(q, k, v, chunk, q_pos, options, AuxRequest(lse=True))
    # flex_attention returns the natural logarithm. Its kernels differ in the lse of an empty row.
    assert aux.lse is not None  # it was requested
    return out, aux.lse.masked_fill(_has_no_key(chunk), float("-inf"))


@functools.cache
def _compiled_largest() -> Callable[..., Tensor]:
    return torch.compile(_largest, fullgraph=True)


def _largest(q: Tensor, k: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions) -> Tensor:
    _torch.mark_static(q, 2)
    v = k[..., :_MIN_CUDA_HEAD_DIM].contiguous()  # values are not looked at; this is the narrowest kernel
    _, aux = _flex(q, k, v, chunk, q_pos, options, AuxRequest(max_scores=True))
    assert aux.max_scores is not None  # they were requested
    return aux.max_scores.masked_fill(_has_no_key(chunk), float("-inf")).amax((0, 2))


def _flex(
    q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions, request: AuxRequest
) -> tuple[Tensor, AuxOutput]:
    tables = {field.name: getattr(chunk.tables, field.name) for field in dataclasses.fields(chunk.tables)}
    return flex_attention(
        q, k, v,
        score_mod=_score_mod(options, q_pos, chunk.kv_pos),
        # The constructor, not from_kv_blocks, which derives the transposed tables, densely.
        block_mask=BlockMask(
            (q.shape[2], k.shape[2]), **tables, BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
            mask_mod=_mask_mod(chunk.start, chunk.end),
        ),
        scale=options.scale_for(q),
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=request,
    )  # fmt: skip


def _has_no_key(chunk: Chunk) -> Tensor:
    return ((chunk.end - chunk.start).sum(1) == 0)[:, None]


def _mask_mod(start: Tensor, end: Tensor) -> Mod:
    """FlexAttention's ``(b, h, q_idx, kv_idx) -> bool`` for spans ``[B or 1, N, Q]``."""
    batched = start.shape[0] > 1
    # A row 0 inside the function would be a constant, which torch copies to the device while it traces.
    pairs = tuple(zip(start.unbind(1), end.unbind(1), strict=True) if batched else zip(start[0], end[0], strict=True))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = (b, q_idx) if batched else (q_idx,)
        first, last = pairs[0]
        inside = (kv_idx >= first[row]) & (kv_idx < last[row])
        for first, last in pairs[1:]:
            inside = inside | ((kv_idx >= first[row]) & (kv_idx < last[row]))
        return inside

    return mask_mod


def _score_mod(options: AttentionOptions, q_pos: Tensor, kv_pos: Tensor) -> Mod | None:
    """The user's function on global positions, then softcap; None without both."""
    score_mod, softcap = options.score_mod, options.softcap
    if score_mod is None and softcap is None:
        return None

    q_pos, kv_pos = (x[0] if x.shape[0] == 1 else x for x in (q_pos, kv_pos))

    def position(table: Tensor, b: Tensor, index: Tensor) -> Tensor:
        return table[index] if table.dim() == 1 else table[b, index]

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if score_mod is not None:
            score = score_mod(score, b, h, position(q_pos, b, q_idx), position(kv_pos, b, kv_idx))
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score

    return mod

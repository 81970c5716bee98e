"""Span-masked attention on torch's FlexAttention, for CUDA.

The spans reach the kernel as tensors that its mask_mod reads, and the non-empty blocks as `FlexTables`. So one
compiled kernel serves every mask of the same shapes. Letters of shapes: see `_checks`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from spanwise import _torch
from spanwise.attention.kernels._checks import check_problem
from spanwise.attention.kernels._flex_tables import BLOCK_SIZE, FlexTables, Mod, block_mask, kv_capacity, pad_spans
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel, ScoreMod
from spanwise.attention.kernels.merge import Part, not_saving, part_of
from spanwise.masks.blocks import block_tables
from spanwise.masks.span_mask import SpanMask

_MIN_CUDA_HEAD_DIM = 16
_HALVES_AND_FLOAT = (torch.float32, torch.bfloat16, torch.float16)


class Flex(Kernel):
    """FlexAttention; see `flex`.

    Its graphs need a constant number of queries and at least one token per rank. Spare keys and few numbers of spans
    let one graph serve many plans.
    """

    name = "flex"
    dynamic_queries = False
    needs_tokens = True
    table_type = FlexTables

    def tables(self, mask: SpanMask, device: torch.device) -> FlexTables:
        return FlexTables.from_numpy(block_tables(mask, BLOCK_SIZE), device)

    def capacity(self, num_keys: int) -> int:
        return kv_capacity(num_keys)

    def num_spans(self, num_spans: int) -> int:
        return pad_spans(num_spans)

    def check_device(self, device: torch.device, score_mod: ScoreMod | None) -> None:
        if device.type == "cpu":
            raise ValueError(
                "kernel 'flex' runs on CUDA, the tensors are on cpu: torch's FlexAttention has no backward there; use "
                "kernel='sdpa' on the CPU, or 'reference' with a score_mod"
            )

    def check_max_logit(self, device: torch.device, score_mod: ScoreMod | None) -> None:
        """It always works."""

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, options: AttentionOptions, *, max_logit: bool = False
    ) -> None:
        super().check(q, k, v, chunk, options, max_logit=max_logit)
        _check(q, k, v, chunk.tables)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        return flex(
            q, k, v, chunk.start, chunk.end, chunk.tables,
            scale=options.scale_for(q), score_mod=options.score_mod, softcap=options.softcap,
            q_pos=q_pos, kv_pos=chunk.kv_pos,
        )  # fmt: skip

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
        return max_logit(
            q, k, chunk.start, chunk.end, chunk.tables,
            scale=options.scale_for(q), score_mod=options.score_mod, softcap=options.softcap,
            q_pos=q_pos, kv_pos=chunk.kv_pos,
        )  # fmt: skip


def _in_strides(x: Tensor, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return x if x.stride() == stride else torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(x)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    tables: FlexTables,
    *,
    scale: float,
    score_mod: Mod | None = None,
    softcap: float | None = None,
    q_pos: Tensor | None = None,
    kv_pos: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`Kernel.attend` by a compiled FlexAttention kernel; `tables` are those of the same mask, over all keys.

    Inside ``torch.compile`` the operator joins the surrounding graph. There all T share a graph if the tensor that T
    comes from is marked as dynamic (`_torch.mark_dynamic`). An eager call runs a separate graph. It is compiled at the
    first call of a setting (shapes without T, dtypes, options) and serves every later mask and T.

    Takes float32, bfloat16 and float16; copies what is not contiguous. Spans are padded to `pad_spans`; positions are
    ``0, 1, …`` if not given. NaN is not kept apart. ``ValueError`` for what the kernel lacks.
    """
    check_problem(q, k, v, start, end)
    _check(q, k, v, tables, q_pos, kv_pos)
    if score_mod is None:
        q_pos = kv_pos = None
    # Before the graph and not in it, so that strides do not tell graphs apart.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if torch.compiler.is_compiling():
        return _attend(q, k, v, start, end, tables, q_pos, kv_pos, scale, score_mod, softcap)

    # Marks stick to tensor objects: views keep them off the caller's.
    k, v = k.view_as(k), v.view_as(v)
    kv_pos = None if kv_pos is None else kv_pos.view_as(kv_pos)
    for x, dim in ((k, 2), (v, 2), (kv_pos, 1)):
        if x is not None:
            _torch.mark_dynamic(x, dim)
    setting = (
        q.device, q.dtype, q.shape, k.shape[1], v.shape[3], start.shape, tables.kv_indices.shape[0], q.requires_grad,
        scale, softcap, getattr(score_mod, "__code__", type(score_mod)),
    )  # fmt: skip
    return _compiled(setting)(q, k, v, start, end, tables, q_pos, kv_pos, scale, score_mod, softcap)


@functools.cache
def _compiled(setting: tuple[Any, ...]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`_attend` compiled for one setting, kept for the life of the process as Dynamo keeps its own caches.

    Dynamo allows eight graphs for a code object, over all settings of a process. A copy of the code for each setting
    gives each its own eight. `setting` is only the key.
    """
    copy = types.FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__, None, None)
    return torch.compile(copy, fullgraph=True, dynamic=False)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    tables: FlexTables,
    q_pos: Tensor | None,
    kv_pos: Tensor | None,
    scale: float,
    score_mod: Mod | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The compiled part. Its backward takes cotangents of out and lse."""
    _torch.mark_static(q, 2)  # a dynamic number of queries fails to compile
    if k.shape[2] % 128 == 0:
        torch._check(k.shape[2] % 128 == 0)  # spares the kernel its bounds checks, for a dynamic size too
    out, aux = flex_attention(
        q, k, v,
        score_mod=_score_mod(score_mod, softcap, q_pos, kv_pos),
        block_mask=block_mask(q.shape[2], k.shape[2], tables, _mask_mod(start, end)),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    # flex_attention returns the natural logarithm. Its kernels differ in the lse of an empty row.
    assert aux.lse is not None  # it was requested
    return out, aux.lse.masked_fill(((end - start).sum(1) == 0)[:, None], float("-inf"))


def max_logit(
    q: Tensor,
    k: Tensor,
    start: Tensor,
    end: Tensor,
    tables: FlexTables,
    *,
    scale: float,
    score_mod: Mod | None = None,
    softcap: float | None = None,
    q_pos: Tensor | None = None,
    kv_pos: Tensor | None = None,
) -> Tensor:
    """`Kernel.max_logit` on CUDA, with the arguments of `flex`: of scaled, modified, capped scores; float32 ``[H]``."""
    q, k = q.detach().contiguous(), k.detach().contiguous()
    check_problem(q, k, k, start, end)
    _check(q, k, k, tables, q_pos, kv_pos)
    if score_mod is None:
        q_pos = kv_pos = None
    run = _largest if torch.compiler.is_compiling() else _compiled_largest()
    return run(q, k, start, end, tables, q_pos, kv_pos, scale, score_mod, softcap)


@functools.cache
def _compiled_largest() -> Callable[..., Tensor]:
    return torch.compile(_largest, fullgraph=True)


def _largest(
    q: Tensor,
    k: Tensor,
    start: Tensor,
    end: Tensor,
    tables: FlexTables,
    q_pos: Tensor | None,
    kv_pos: Tensor | None,
    scale: float,
    score_mod: Mod | None,
    softcap: float | None,
) -> Tensor:
    _torch.mark_static(q, 2)
    _, aux = flex_attention(
        q, k, k[..., :_MIN_CUDA_HEAD_DIM].contiguous(),  # values are not looked at; this is the narrowest kernel
        score_mod=_score_mod(score_mod, softcap, q_pos, kv_pos),
        block_mask=block_mask(q.shape[2], k.shape[2], tables, _mask_mod(start, end)),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(max_scores=True),
    )  # fmt: skip
    assert aux.max_scores is not None  # they were requested
    empty = ((end - start).sum(1) == 0)[:, None]
    return aux.max_scores.masked_fill(empty, float("-inf")).amax((0, 2))


def _mask_mod(start: Tensor, end: Tensor) -> Mod:
    """FlexAttention's ``(b, h, q_idx, kv_idx) -> bool`` for spans ``[B or 1, N, Q]``."""
    pairs = tuple(zip(start.unbind(1), end.unbind(1), strict=True))
    batched = start.shape[0] > 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b if batched else 0
        first, last = pairs[0]
        inside = (kv_idx >= first[row, q_idx]) & (kv_idx < last[row, q_idx])
        for first, last in pairs[1:]:
            inside = inside | ((kv_idx >= first[row, q_idx]) & (kv_idx < last[row, q_idx]))
        return inside

    return mask_mod


def _score_mod(score_mod: Mod | None, softcap: float | None, q_pos: Tensor | None, kv_pos: Tensor | None) -> Mod | None:
    """The user's function on global positions, then softcap; None without both."""
    if score_mod is None and softcap is None:
        return None

    def position(table: Tensor | None, b: Tensor, index: Tensor) -> Tensor:
        if table is None:
            return index
        return table[b if table.shape[0] > 1 else 0, index]

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if score_mod is not None:
            score = score_mod(score, b, h, position(q_pos, b, q_idx), position(kv_pos, b, kv_idx))
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score

    return mod


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: FlexTables,
    q_pos: Tensor | None = None,
    kv_pos: Tensor | None = None,
) -> None:
    """Raise ``ValueError`` for a problem of sound shapes that this kernel cannot take, or tables of another one."""
    if q.dtype not in _HALVES_AND_FLOAT:
        raise ValueError(f"kernel 'flex' takes float32, bfloat16 or float16, got {q.dtype}; use kernel='reference'")
    if q.device.type == "cuda" and min(q.shape[3], v.shape[3]) < _MIN_CUDA_HEAD_DIM:
        raise ValueError(
            f"kernel 'flex' on CUDA needs head dims of at least {_MIN_CUDA_HEAD_DIM}, got {q.shape[3]} (q, k) and "
            f"{v.shape[3]} (v); use kernel='reference' or pad"
        )
    if torch.compiler.is_compiling():
        return  # the graph is traced once for many shapes: comparing them here would only add guards
    if q.shape[2] == 0 or k.shape[2] == 0:
        raise ValueError(f"kernel 'flex' needs at least one query and one key, got {q.shape[2]} and {k.shape[2]}")
    blocks = (-(-q.shape[2] // BLOCK_SIZE), -(-k.shape[2] // BLOCK_SIZE))
    listed = tuple(tables.kv_indices.shape)
    if listed[1:] != (1, *blocks) or listed[0] not in (1, q.shape[0]):
        raise ValueError(
            f"the tables list blocks {listed}, but {q.shape[2]} queries and {k.shape[2]} keys in blocks of "
            f"{BLOCK_SIZE} make {(q.shape[0], 1, *blocks)} (or batch 1); build them for the length of the K/V buffer"
        )
    for name, pos, length in (("q_pos", q_pos, q.shape[2]), ("kv_pos", kv_pos, k.shape[2])):
        if pos is not None and tuple(pos.shape) not in ((1, length), (q.shape[0], length)):
            raise ValueError(f"{name} must be [{q.shape[0]} or 1, {length}], got {tuple(pos.shape)}")

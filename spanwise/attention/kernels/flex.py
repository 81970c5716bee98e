"""Span-masked attention on torch's FlexAttention: CUDA forward and backward, CPU inference.

The spans reach the kernel as tensors that its mask_mod reads, and the non-empty blocks as `FlexTables`; so one
compiled kernel serves every mask of the same shapes. Takes one local problem (see `attend` in this package), knows
nothing of ranks. Letters of shapes: see `_checks`; A is the number of query blocks, C the number of key blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from spanwise import _torch
from spanwise.attention.kernels._checks import check_problem

if TYPE_CHECKING:
    from spanwise.masks.blocks import BlockTables

Mod = Callable[..., torch.Tensor]

_MIN_CUDA_HEAD_DIM = 16
_HALVES_AND_FLOAT = (torch.float32, torch.bfloat16, torch.float16)


def pad_spans(num_spans: int) -> int:
    """Number of spans a row to pad to with empty spans, so that few different numbers are compiled: 1, 4, 8, 16, …

    The kernel unrolls its loop over spans, so each number is a graph of its own. One span is by far the most frequent
    case (causal, documents, windows) and stays alone; up to four share a graph. Where one compiled region holds several
    problems (local and remote keys), pad them all to the number of the whole mask, or their combinations are graphs.
    """
    if num_spans <= 1:
        return 1
    return max(4, 1 << (num_spans - 1).bit_length())


def kv_capacity(num_keys: int, block_size: int = 128) -> int:
    """Rows of a K/V buffer for ``num_keys`` keys: whole blocks, at least two.

    Sizes 0 and 1 are constants to torch.compile, so that a buffer of a single block would be a graph of its own; whole
    blocks spare the CUDA kernel its bounds checks.
    """
    return max(2, -(-num_keys // block_size)) * block_size


@dataclasses.dataclass(frozen=True)
class FlexTables:
    """Non-empty blocks of a span mask, as FlexAttention's ``BlockMask`` lists them; a pytree of int32 tensors.

    A *full* block is read in every cell that exists, so the kernel skips the mask there; *partial* blocks are the
    other non-empty ones. Build them for the length of the K/V buffer (``kv_capacity``), not for a shorter mask:
    the last block of a shorter mask may be full although its spare rows must not be read.

    Attributes:
        kv_num_blocks: ``[B or 1, 1, A]``, partial key blocks of each query block.
        kv_indices: ``[B or 1, 1, A, C]``, which ones; the first ``kv_num_blocks`` entries count.
        full_kv_num_blocks, full_kv_indices: the same for full blocks.
        q_num_blocks: ``[B or 1, 1, C]``, partial query blocks of each key block, for the backward.
        q_indices: ``[B or 1, 1, C, A]``.
        full_q_num_blocks, full_q_indices: the same for full blocks.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor
    full_kv_indices: torch.Tensor
    q_num_blocks: torch.Tensor
    q_indices: torch.Tensor
    full_q_num_blocks: torch.Tensor
    full_q_indices: torch.Tensor

    @classmethod
    def from_numpy(cls, tables: BlockTables, device: torch.device | str = "cpu") -> FlexTables:
        """Copies of the arrays on ``device``, marked for torch.compile as varying in the number of key blocks."""
        copied = cls(
            **{f.name: torch.tensor(getattr(tables, f.name), dtype=torch.int32) for f in dataclasses.fields(cls)}
        )
        return copied.to(device)

    def to(self, device: torch.device | str) -> FlexTables:
        """Copies on ``device``, marked like those of :meth:`from_numpy`."""
        moved = FlexTables(*(getattr(self, f.name).to(device) for f in dataclasses.fields(self)))
        for x, dim in (
            (moved.kv_indices, 3),
            (moved.full_kv_indices, 3),
            (moved.q_num_blocks, 2),
            (moved.q_indices, 2),
            (moved.full_q_num_blocks, 2),
            (moved.full_q_indices, 2),
        ):
            _torch.mark_dynamic(x, dim)
        return moved


_torch.register_pytree_dataclass(FlexTables)


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    tables: FlexTables,
    *,
    scale: float,
    score_mod: Mod | None = None,
    softcap: float | None = None,
    q_pos: torch.Tensor | None = None,
    kv_pos: torch.Tensor | None = None,
    block_size: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one local problem by a compiled FlexAttention kernel.

    Inside ``torch.compile`` the operator joins the surrounding graph; there all T share a graph if the tensor that
    T comes from is marked as dynamic (`_torch.mark_dynamic`). Called eagerly it runs a graph of its own, compiled at
    the first call of its setting (shapes but for T, dtypes, options), that serves every later mask and T.

    On the CPU only inference is possible, and torch's kernel returns no lse there; it is found as `_flex_cpu` tells,
    at the price of a second pass. With a `score_mod` or a softcap that is exact while the modified scores of a row lie
    within ±600; a row beyond gets an infinite lse.

    Args:
        q: Queries ``[B, H, Q, D]``, float32, bfloat16 or float16. Any strides; what is not contiguous is copied.
        k: Keys ``[B, K, T, D]``, ``H % K == 0``. Rows that no span reads may hold any finite number.
        v: Values ``[B, K, T, V]``.
        start: First key of each span, int32 ``[B or 1, N, Q]``, padded with empty spans as `pad_spans` says.
        end: One past the last key of each span, same shape.
        tables: Non-empty blocks of the same mask over T keys.
        scale: Factor on ``q @ k^T``.
        score_mod: FlexAttention's ``(score, b, h, q_idx, kv_idx) -> score``; sees the scaled score, before softcap and
            mask, and global positions.
        softcap: ``softcap * tanh(score / softcap)`` is applied before the mask.
        q_pos: Global position of each query, integer ``[B or 1, Q]``; ``0, 1, …`` if not given.
        kv_pos: Global position of each key, integer ``[B or 1, T]``; ``0, 1, …`` if not given.
        block_size: Tokens of a block of `tables`, in both directions.

    Returns:
        ``out`` ``[B, H, Q, V]`` in ``q.dtype`` and natural-log ``lse`` ``[B, H, Q]`` float32, both differentiable on
        CUDA. A row without keys has out 0, lse -inf and no gradient.

    Raises:
        ValueError: Inputs that do not fit together, a dtype or head dim that the device's kernel lacks, or gradients on
            the CPU.
    """
    check(q, k, v, start, end, tables, q_pos, kv_pos, block_size)
    if not _wants_grad(q, k, v):
        q, k, v = q.detach(), k.detach(), v.detach()  # torch's CPU kernel refuses requires_grad even under no_grad
    if score_mod is None:
        q_pos = kv_pos = None
    dtype = q.dtype
    if q.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()
    # Before the graph and not in it, so that strides do not tell graphs apart.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if torch.compiler.is_compiling():
        out, lse = _attend(q, k, v, start, end, tables, q_pos, kv_pos, scale, score_mod, softcap, block_size)
        return out.to(dtype), lse

    # Marks stick to tensor objects: views keep them off the caller's.
    k, v = k.view_as(k), v.view_as(v)
    kv_pos = None if kv_pos is None else kv_pos.view_as(kv_pos)
    for x, dim in ((k, 2), (v, 2), (kv_pos, 1)):
        if x is not None:
            _torch.mark_dynamic(x, dim)
    setting = (
        q.device, q.dtype, q.shape, k.shape[1], v.shape[3], start.shape, tables.kv_indices.shape[0], q.requires_grad,
        scale, softcap, block_size, getattr(score_mod, "__code__", type(score_mod)),
    )  # fmt: skip
    attend = _compiled(setting)
    out, lse = attend(q, k, v, start, end, tables, q_pos, kv_pos, scale, score_mod, softcap, block_size)
    return out.to(dtype), lse


@functools.cache
def _compiled(setting: tuple[Any, ...]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`_attend` compiled for one setting, kept for the life of the process as Dynamo keeps its own caches.

    Dynamo allows eight graphs for a code object, over all settings a process uses; a copy of the code for each setting
    keeps them from using up each other's. `setting` is that key and nothing else.
    """
    copy = types.FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__, None, None)
    return torch.compile(copy, fullgraph=True, dynamic=False)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    tables: FlexTables,
    q_pos: torch.Tensor | None,
    kv_pos: torch.Tensor | None,
    scale: float,
    score_mod: Mod | None,
    softcap: float | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What gets compiled: options become FlexAttention's two functions, and the device's form is called."""
    _torch.mark_static(q, 2)  # a dynamic number of queries fails to compile
    mask_mod = _mask_mod(start, end)
    visible_BQ = (end - start).sum(1)
    if q.device.type == "cpu":
        from spanwise.attention.kernels._flex_cpu import flex_cpu, roomy

        kv_pos = None if kv_pos is None else roomy(kv_pos)
        mod = _score_mod(score_mod, softcap, q_pos, kv_pos)
        return flex_cpu(q, k, v, visible_BQ, tables, mask_mod, mod, scale=scale, block_size=block_size)
    block_mask = _block_mask(q, k, tables, mask_mod, block_size)
    return _with_lse(q, k, v, visible_BQ, block_mask, _score_mod(score_mod, softcap, q_pos, kv_pos), scale=scale)


def _with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible_BQ: torch.Tensor,
    block_mask: BlockMask,
    score_mod: Mod | None,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The form of devices whose kernel returns the lse. Its backward takes cotangents of out and lse both."""
    if k.shape[2] % 128 == 0:
        torch._check(k.shape[2] % 128 == 0)  # known of a dynamic size, it spares the kernel its bounds checks
    out, aux = flex_attention(
        q, k, v, score_mod, block_mask, scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True)
    )
    # flex_attention returns the natural logarithm. What it says of an empty row differs between its kernels.
    assert aux.lse is not None  # it was requested
    return out, aux.lse.masked_fill((visible_BQ == 0)[:, None], float("-inf"))


def max_logit(
    q: torch.Tensor,
    k: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    tables: FlexTables,
    *,
    scale: float,
    score_mod: Mod | None = None,
    softcap: float | None = None,
    q_pos: torch.Tensor | None = None,
    kv_pos: torch.Tensor | None = None,
    block_size: int = 128,
) -> torch.Tensor:
    """Largest visible score of each query head, float32 ``[H]``, -inf where there is none. CUDA only, no gradient.

    Arguments as for `flex`. Scores are those that enter the softmax: scaled, modified, capped.

    Raises:
        ValueError: Not on CUDA: torch's CPU kernel does not report it; use kernel="sdpa" or "reference" there.
    """
    if q.device.type == "cpu":
        raise ValueError("kernel 'flex' reports no max_logit on the CPU; use kernel='sdpa' or kernel='reference'")
    q, k = q.detach().contiguous(), k.detach().contiguous()
    check(q, k, k, start, end, tables, q_pos, kv_pos, block_size)
    if score_mod is None:
        q_pos = kv_pos = None
    run = _largest if torch.compiler.is_compiling() else _compiled_largest()
    return run(q, k, start, end, tables, q_pos, kv_pos, scale, score_mod, softcap, block_size)


@functools.cache
def _compiled_largest() -> Callable[..., torch.Tensor]:
    return torch.compile(_largest, fullgraph=True)


def _largest(
    q: torch.Tensor,
    k: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    tables: FlexTables,
    q_pos: torch.Tensor | None,
    kv_pos: torch.Tensor | None,
    scale: float,
    score_mod: Mod | None,
    softcap: float | None,
    block_size: int,
) -> torch.Tensor:
    _torch.mark_static(q, 2)
    _, aux = flex_attention(
        q, k, k[..., :_MIN_CUDA_HEAD_DIM].contiguous(),  # values are not looked at; this is the narrowest kernel
        score_mod=_score_mod(score_mod, softcap, q_pos, kv_pos),
        block_mask=_block_mask(q, k, tables, _mask_mod(start, end), block_size),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(max_scores=True),
    )  # fmt: skip
    assert aux.max_scores is not None  # they were requested
    empty = ((end - start).sum(1) == 0)[:, None]
    return aux.max_scores.masked_fill(empty, float("-inf")).amax((0, 2))


def _wants_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _mask_mod(start: torch.Tensor, end: torch.Tensor) -> Mod:
    """FlexAttention's ``(b, h, q_idx, kv_idx) -> bool`` for spans ``[B or 1, N, Q]``."""
    # Split outside of the function: a captured tensor with a size that torch.compile holds for dynamic (N, after it has
    # seen two) trips the CPU kernel's code generation.
    pairs = tuple(zip(start.unbind(1), end.unbind(1), strict=True))
    batched = start.shape[0] > 1

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        row = b if batched else 0
        first, last = pairs[0]
        inside = (kv_idx >= first[row, q_idx]) & (kv_idx < last[row, q_idx])
        for first, last in pairs[1:]:
            inside = inside | ((kv_idx >= first[row, q_idx]) & (kv_idx < last[row, q_idx]))
        return inside

    return mask_mod


def _score_mod(
    score_mod: Mod | None, softcap: float | None, q_pos: torch.Tensor | None, kv_pos: torch.Tensor | None
) -> Mod | None:
    """The user's function with global positions for local ones, then softcap; None if there is neither."""
    if score_mod is None and softcap is None:
        return None

    def position(table: torch.Tensor | None, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if table is None:
            return index
        return table[b if table.shape[0] > 1 else 0, index]

    def mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        if score_mod is not None:
            score = score_mod(score, b, h, position(q_pos, b, q_idx), position(kv_pos, b, kv_idx))
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score

    return mod


def _block_mask(q: torch.Tensor, k: torch.Tensor, tables: FlexTables, mask_mod: Mod, block_size: int) -> BlockMask:
    # The constructor, not from_kv_blocks: that derives the transposed tables, densely.
    return BlockMask(
        (q.shape[2], k.shape[2]),
        kv_num_blocks=tables.kv_num_blocks,
        kv_indices=tables.kv_indices,
        full_kv_num_blocks=tables.full_kv_num_blocks,
        full_kv_indices=tables.full_kv_indices,
        q_num_blocks=tables.q_num_blocks,
        q_indices=tables.q_indices,
        full_q_num_blocks=tables.full_q_num_blocks,
        full_q_indices=tables.full_q_indices,
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=mask_mod,
    )


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    tables: FlexTables,
    q_pos: torch.Tensor | None = None,
    kv_pos: torch.Tensor | None = None,
    block_size: int = 128,
) -> None:
    """Raises what `flex` raises of these arguments; ``ValueError``."""
    if q.device.type == "cpu" and _wants_grad(q, k, v):
        raise ValueError(
            "kernel 'flex' has no backward on the CPU, and q, k or v requires grad; use kernel='sdpa' for training on "
            "the CPU, or torch.no_grad() for inference"
        )
    check_problem(q, k, v, start, end)
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
    blocks = (-(-q.shape[2] // block_size), -(-k.shape[2] // block_size))
    listed = tuple(tables.kv_indices.shape)
    if listed[1:] != (1, *blocks) or listed[0] not in (1, q.shape[0]):
        raise ValueError(
            f"the tables list blocks {listed}, but {q.shape[2]} queries and {k.shape[2]} keys in blocks of "
            f"{block_size} make {(q.shape[0], 1, *blocks)} (or batch 1); build them for the length of the K/V buffer"
        )
    for name, pos, length in (("q_pos", q_pos, q.shape[2]), ("kv_pos", kv_pos, k.shape[2])):
        if pos is not None and tuple(pos.shape) not in ((1, length), (q.shape[0], length)):
            raise ValueError(f"{name} must be [{q.shape[0]} or 1, {length}], got {tuple(pos.shape)}")

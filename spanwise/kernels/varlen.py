"""Span-masked attention on torch's variable-length flash kernel, CUDA forward and backward.

`_segments` cuts the mask into rounds; each is one call of the kernel under `torch.nn.attention.varlen`, on q, k and v
as they lie: rows and keys outside a round are sequences of their own that compute nothing, so that nothing is gathered.
Two custom ops, as in `sdpa`: the rounds are contents of tensors, hence no plan costs a compilation. Takes one local
problem (see `attend` in this package), knows nothing of ranks. Letters of shapes: see `_checks`; R rounds, W head dim
of the kernel's call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from spanwise import _compat
from spanwise.kernels._checks import check_problem
from spanwise.kernels.merge import merge

if TYPE_CHECKING:
    from spanwise.kernels._segments import Segments, Window

_HALVES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MAX_SEQUENCES = 65535  # they are the second axis of the kernel's launch grid


@dataclasses.dataclass(frozen=True)
class VarlenTables:
    """Rounds of a span mask as tensors; a pytree.

    Batch 1 serves every row of a batch.

    Attributes:
        calls: int64 ``[R, 5]`` in host memory, for it is read before each launch: window left and right, bounds of the
            lengths of sequences of queries and of keys, number of sequences.
        cu_seq_q, cu_seq_k: int32, offsets of the sequences of all rounds, one round after the other.
        rows: bool ``[R, batch, Q]``, rows that read a key in the round.
        keys: bool ``[R, batch, T]``, keys that are read in the round.
    """

    calls: torch.Tensor
    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    rows: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def from_segments(cls, segments: Segments, device: torch.device | str = "cpu") -> VarlenTables:
        """Copies of the rounds on ``device``, marked for torch.compile as varying in all that differs between masks."""
        rounds, batch = segments.rounds, segments.batch
        calls = [(*r.window, r.max_q, r.max_k, len(r.cu_seq_q) - 1) for r in rounds]

        def joined(name: str) -> torch.Tensor:
            offsets = [torch.from_numpy(getattr(r, name)) for r in rounds]
            return torch.cat([torch.empty(0, dtype=torch.int32), *offsets])

        def stacked(name: str, length: int) -> torch.Tensor:
            masks = torch.empty(len(rounds), batch, length, dtype=torch.bool)
            for i, r in enumerate(rounds):
                masks[i] = torch.from_numpy(getattr(r, name)).view(batch, length)
            return masks

        return cls(
            calls=torch.tensor(calls, dtype=torch.int64).view(-1, 5),
            cu_seq_q=joined("cu_seq_q"),
            cu_seq_k=joined("cu_seq_k"),
            rows=stacked("rows", segments.q_len),
            keys=stacked("keys", segments.kv_len),
        ).to(device)

    def to(self, device: torch.device | str) -> VarlenTables:
        """Copies on ``device``, but for `calls`; marked like those of :meth:`from_segments`."""
        moved = VarlenTables(
            self.calls.clone(), *(x.to(device, copy=True) for x in (self.cu_seq_q, self.cu_seq_k, self.rows, self.keys))
        )
        for x in (moved.calls, moved.cu_seq_q, moved.cu_seq_k, moved.rows, moved.keys):
            _compat.mark_unbacked(x, 0)
        for x in (moved.rows, moved.keys):
            _compat.mark_dynamic(x, 2)
        return moved


_compat.register_pytree_dataclass(VarlenTables)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    tables: VarlenTables,
    *,
    scale: float,
    softcap: float | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one local problem by variable-length flash calls, one a round.

    The calls run one after the other and are merged in float32. Where V differs from D, or D is no multiple of 8, zeros
    fill up both. ``torch.use_deterministic_algorithms(True)`` makes the backward deterministic, as torch's kernel does
    it; with ``warn_only=True`` the kernel warns and stays as it is.

    Args:
        q: Queries ``[B, H, Q, D]`` on CUDA, bfloat16 or float16. Any strides.
        k: Keys ``[B, K, T, D]``, ``H % K == 0``. Rows that no span reads are not touched.
        v: Values ``[B, K, T, V]``.
        start: First key of each span, int32 ``[B or 1, N, Q]``.
        end: One past the last key of each span, same shape.
        tables: Rounds of the same mask over T keys.
        scale: Factor on ``q @ k^T``.
        softcap, score_mod: Not supported.

    Returns:
        ``out`` ``[B, H, Q, V]`` in ``q.dtype`` and natural-log ``lse`` ``[B, H, Q]`` float32, both differentiable
        (once). A row without keys has out 0, lse -inf and no gradient.

    Raises:
        ValueError: Inputs that do not fit together, or a device, dtype, head dim or option that the kernel lacks.
    """
    check(q, k, v, start, end, tables, softcap=softcap, score_mod=score_mod)
    return attend_rounds(q, k, v, tables, scale=scale)


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    tables: VarlenTables,
    *,
    softcap: float | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Raises what `varlen` raises of these arguments; ``ValueError``."""
    if softcap is not None or score_mod is not None:
        what = "a softcap" if softcap is not None else "a score_mod"
        raise ValueError(f"kernel 'varlen' cannot apply {what}; use kernel='flex' on CUDA, or 'reference'")
    check_problem(q, k, v, start, end)
    if q.device.type != "cuda":
        raise ValueError(
            f"kernel 'varlen' runs on CUDA, the tensors are on {q.device}; use kernel='sdpa' on the CPU, or 'reference'"
        )
    if q.dtype not in _HALVES:
        raise ValueError(f"kernel 'varlen' takes bfloat16 or float16, got {q.dtype}; use kernel='flex'")
    if max(q.shape[3], v.shape[3]) > _MAX_HEAD_DIM:
        raise ValueError(
            f"kernel 'varlen' takes head dims up to {_MAX_HEAD_DIM}, got {q.shape[3]} (q, k) and {v.shape[3]} (v); use "
            f"kernel='reference'"
        )
    if torch.compiler.is_compiling():
        return  # the graph is traced once for many shapes: comparing them here would only add guards
    check_tables(q, k, tables)


def check_tables(q: torch.Tensor, k: torch.Tensor, tables: VarlenTables) -> None:
    """Raises ``ValueError`` unless the tables are those of a mask of Q queries and T keys."""
    batch, q_len, kv_len = *tables.rows.shape[1:], tables.keys.shape[2]
    if batch not in (1, q.shape[0]) or q_len != q.shape[2] or kv_len != k.shape[2]:
        raise ValueError(
            f"the rounds are those of a mask of {batch} batch rows, {q_len} queries and {kv_len} keys; q and k have "
            f"{q.shape[0]}, {q.shape[2]} and {k.shape[2]}"
        )
    longest = max((call[-1] for call in tables.calls.tolist()), default=0) * (q.shape[0] // batch)  # host memory
    if longest > _MAX_SEQUENCES:
        raise ValueError(
            f"kernel 'varlen' takes up to {_MAX_SEQUENCES} sequences in a call, the mask makes {longest} of "
            f"{q.shape[0]} batch rows; use kernel='flex'"
        )


def attend_rounds(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: VarlenTables, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`varlen` without its checks: the custom op, on any device for which it has a kernel."""
    fields = (getattr(tables, f.name) for f in dataclasses.fields(tables))
    out, lse = torch.ops.spanwise.varlen(q, k, v, *fields, scale)
    return out, lse


# --- the kernel ----------------------------------------------------------------------------------------------------


class Flash(NamedTuple):
    """A variable-length attention kernel. Shapes as in `torch.nn.attention.varlen`: ``[tokens, heads, W]``.

    Attributes:
        forward: ``(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale, window) -> (out, lse [H, tokens])``. What it says
            of rows without keys does not matter.
        backward: ``(grad_out, q, k, v, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, scale, window) -> (dq, dk, dv)``. It
            reads `out` only as ``(grad_out * out).sum(-1)``, and nothing of rows without keys. What it says of rows
            without keys and of keys without queries does not matter.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


# >>> to be moved to _compat: the two functions that call torch's private operators
_aten = torch.ops.aten


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: Window,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash kernel as `varlen_attn` calls it; `Flash.forward`."""
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, window == (-1, 0), False,
        scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return out, lse


def flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: Window,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its backward; `Flash.backward`."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    dq, dk, dv = _aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, window == (-1, 0), *no_dropout,
        scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return dq, dk, dv


# <<< to be moved to _compat

FLASH = Flash(flash_forward, flash_backward)


# --- rounds --------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """One round on flattened batch rows."""

    sequences: tuple[torch.Tensor, torch.Tensor, int, int]  # cu_seq_q, cu_seq_k, max_q, max_k
    window: Window
    rows: torch.Tensor  # [B * Q, 1]
    keys: torch.Tensor  # [B * T, 1, 1]


def _calls(
    batch: int,
    calls: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
) -> Iterator[_Call]:
    """The rounds of `VarlenTables`, repeated for every batch row where they are one row's."""
    repeats = batch // rows.shape[1]

    def offsets(cu_seq: torch.Tensor, tokens: int) -> torch.Tensor:
        if repeats == 1:
            return cu_seq
        shifts = tokens * torch.arange(repeats, dtype=cu_seq.dtype, device=cu_seq.device)
        return F.pad((cu_seq[1:] + shifts.unsqueeze(1)).flatten(), (1, 0))

    first = 0
    for i, (left, right, max_q, max_k, num_sequences) in enumerate(calls.tolist()):  # host memory
        here = slice(first, first + num_sequences + 1)
        first += num_sequences + 1
        cu_q, cu_k = offsets(cu_seq_q[here], rows.shape[2]), offsets(cu_seq_k[here], keys.shape[2])
        row_mask, key_mask = (x[i].repeat(repeats, 1).view(-1, 1) for x in (rows, keys))
        yield _Call((cu_q, cu_k, max_q, max_k), (left, right), row_mask, key_mask.unsqueeze(2))


def _flat(x: torch.Tensor, width: int) -> torch.Tensor:
    """``[B, H, T, D]`` as ``[B * T, H, width]``, in strides that flash can read; a view where possible."""
    x = F.pad(x.transpose(1, 2).flatten(0, 1), (0, width - x.shape[3]))
    # The kernel loads 16 bytes at a time.
    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:2])
    return x if aligned and x.stride(2) == 1 else x.clone(memory_format=torch.contiguous_format)


def _by_head(x: torch.Tensor, batch: int, dim: int) -> torch.Tensor:
    """``[B * T, H, W]`` as ``[B, H, T, dim]``; token-major in memory."""
    return x[..., :dim].contiguous().unflatten(0, (batch, -1)).transpose(1, 2)


def _empty_by_head(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], dim).transpose(1, 2)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _width(q: torch.Tensor, v: torch.Tensor) -> int:
    return -(-max(q.shape[3], v.shape[3]) // 8) * 8


def forward(
    flash: Flash,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The custom op's forward by the given kernel: (out, lse) of `varlen`."""
    batch, heads, q_len, _ = q.shape
    width = _width(q, v)
    q_flat, k_flat, v_flat = (_flat(x, width) for x in (q, k, v))
    total: tuple[torch.Tensor, torch.Tensor] | None = None
    for call in _calls(batch, calls, cu_seq_q, cu_seq_k, rows, keys):
        out, lse = flash.forward(q_flat, k_flat, v_flat, *call.sequences, scale, call.window)
        out.masked_fill_(~call.rows.unsqueeze(2), 0)
        lse = lse.mT.masked_fill_(~call.rows, float("-inf"))
        if calls.shape[0] > 1:
            out = out.to(_lse_dtype(q))
        total = (out, lse) if total is None else merge([total, (out, lse)])
    if total is None:
        lse = q.new_full((batch, heads, q_len), float("-inf"), dtype=_lse_dtype(q))
        return _empty_by_head(q, v.shape[3]).zero_(), lse
    out, lse = total
    return (
        _by_head(out.to(q.dtype), batch, v.shape[3]),
        lse.unflatten(0, (batch, q_len)).transpose(1, 2).contiguous(),
    )


def backward(
    flash: Flash,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    calls: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v by the given kernel.

    Every round takes the lse and the out of all rounds together: then it recomputes the softmax over the whole row, as
    ring attention does (Liu et al., 2023), and the merge needs no gradient of its own.
    """
    batch, width, only_lse = q.shape[0], _width(q, v), grad_out is None
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    is_empty = lse == float("-inf")
    grad_out = grad_out.masked_fill(is_empty.unsqueeze(3), 0)
    if grad_lse is not None:
        grad_out, out = with_lse_gradient(grad_out, out, grad_lse.masked_fill(is_empty, 0))
    q_flat, k_flat, v_flat, grad_flat, out_flat = (_flat(x, width) for x in (q, k, v, grad_out, out))
    lse_flat = lse.masked_fill(is_empty, 0).transpose(0, 1).flatten(1).contiguous()
    total: list[torch.Tensor] | None = None
    for call in _calls(batch, calls, cu_seq_q, cu_seq_k, rows, keys):
        grads = flash.backward(
            grad_flat, q_flat, k_flat, v_flat, out_flat, lse_flat, *call.sequences, scale, call.window
        )
        read = (call.rows.unsqueeze(2), call.keys, call.keys)
        parts = [grad.masked_fill_(~where, 0) for grad, where in zip(grads, read, strict=True)]
        if calls.shape[0] > 1:
            parts = [part.to(_lse_dtype(q)) for part in parts]
        total = parts if total is None else [a.add_(b) for a, b in zip(total, parts, strict=True)]
    if total is None:
        dq, dk, dv = (_empty_by_head(x, x.shape[3]).zero_() for x in (q, k, v))
    else:
        dq, dk, dv = (_by_head(x.to(y.dtype), batch, y.shape[3]) for x, y in zip(total, (q, k, v), strict=True))
    return dq, dk, dv.zero_() if only_lse else dv  # what was added to grad_out is no gradient of v


def with_lse_gradient(
    grad_out: torch.Tensor, out: torch.Tensor, grad_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A grad_out and an out that make flash's backward account for a gradient of the lse.

    The backward is ``ds = p * (dp - delta)`` with ``delta = (grad_out * out).sum(-1)``, and a gradient of the lse
    enters as ``delta - grad_lse``. The kernel computes delta itself, and reads out for nothing else: so it gets, in the
    place of out, the multiple of grad_out whose product with grad_out is that difference. All its terms have one sign,
    so that rounding it costs the difference no more than its own relative precision.

    A row whose grad_out is zero, or very small beside the difference, has no such multiple within the dtype's range:
    its first element is raised, to 2**-56 of the difference (2**-14 in float16, whose range ends at 2**16). That adds
    to the row's gradient of v, by less than rounding changes its other gradients. Rows without a gradient stay as they
    are.

    Args:
        grad_out, out: ``[B, H, Q, V]``.
        grad_lse: ``[B, H, Q]``.
    """
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    exact = grad_out.to(wide, copy=True)
    delta = (torch.linalg.vecdot(exact, out.to(wide)) - grad_lse.to(wide)).unsqueeze(-1)
    # 2**-22 is below float16's normal numbers, and four times its least.
    share, floor = (2.0**-14, 2.0**-22) if out.dtype == torch.float16 else (2.0**-56, torch.finfo(out.dtype).tiny)
    least = torch.where(delta == 0, 0, (delta.abs() * share).clamp(min=floor)).to(out.dtype)
    is_small = exact.abs().amax(-1, keepdim=True) < least
    grad_out = grad_out.clone()
    grad_out[..., :1] = torch.where(is_small, least, grad_out[..., :1])
    exact[..., :1] = grad_out[..., :1]
    top = exact.abs().amax(-1, keepdim=True)
    is_zero = top == 0
    direction = exact.div_(top.masked_fill(is_zero, 1))  # or the square of a small number would be 0
    square = torch.linalg.vecdot(direction, direction).unsqueeze(-1)
    size = torch.where(is_zero, 0, delta / (top * square).masked_fill(is_zero, 1))
    return grad_out, direction.mul_(size).to(out.dtype)


# --- operators -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("spanwise::varlen", mutates_args=(), device_types="cuda")
def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(FLASH, q, k, v, calls, cu_seq_q, cu_seq_k, rows, keys, scale)


@_varlen.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_by_head(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


@torch.library.custom_op("spanwise::varlen_backward", mutates_args=(), device_types="cuda")
def _varlen_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    calls: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tables = (calls, cu_seq_q, cu_seq_k, rows, keys)
    return backward(FLASH, grad_out, grad_lse, q, k, v, out, lse, *tables, scale)


@_varlen_backward.register_fake
def _(
    grad_out: Any, grad_lse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_by_head(q, q.shape[3]), _empty_by_head(k, k.shape[3]), _empty_by_head(v, v.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *tables, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, *tables)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 9
    grads = torch.ops.spanwise.varlen_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None, None, None, None


_varlen.register_autograd(_backward, setup_context=_save)

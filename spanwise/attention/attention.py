"""Attention over a sharded sequence: exchange, local kernels, merge.

Every rank holds its shard of q, k and v. Under Ulysses the ranks of a group first trade heads for tokens. Then the
exchange of K/V starts. Meanwhile the local queries attend to the local keys, then to each chunk of K/V as it arrives.
The partial results merge exactly. Each step is a differentiable function, so autograd, checkpointing and
`torch.compile` see all steps, the collectives included.
"""

# B batch, Hq heads of q, Hkv of K/V, T tokens of this rank, Dk head dim of q and K, Dv of V

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from spanwise import _torch
from spanwise.attention import executor, ulysses
from spanwise.attention.compact import Compact, check_rows
from spanwise.attention.compare import Compare, compare_backward, compare_call, eager, plain, tells_refusals
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel
from spanwise.attention.kernels.merge import Merging, Part, with_sinks
from spanwise.attention.kernels.table import resolve
from spanwise.attention.kv import ChunkKV, kv_chunks
from spanwise.attention.rank_plan import RankPlan, check_plan, local_of
from spanwise.masks.checks import check_finite
from spanwise.planning.memory import check_heads
from spanwise.planning.plan import Plan

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, slots=True)
class AuxRequest:
    """Results of `context_parallel_attention` to return in addition to the output, in an `Aux`.

    >>> AuxRequest(lse=True)
    AuxRequest(lse=True, max_logit=False)
    """

    lse: bool = False
    max_logit: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Aux:
    """Results that an `AuxRequest` asked for; None for the others.

    Attributes:
        lse: ``[B, Hq, T]``, natural logarithm of the softmax denominator of this rank's queries, sinks included;
            float32 (float64 for float64). Differentiable.
        max_logit: ``[Hq]``, largest visible score of each head over all ranks and batch rows; −inf without a score.

    >>> import torch, spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(6), num_ranks=1)
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    >>> request = spanwise.AuxRequest(lse=True)
    >>> out, aux = spanwise.context_parallel_attention(q, k, v, plan, mesh=None, return_aux=request)
    >>> aux.lse.shape, aux.max_logit
    (torch.Size([1, 2, 6]), None)
    """

    lse: torch.Tensor | None = None
    max_logit: torch.Tensor | None = None


@tells_refusals
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None = None,
    *,
    mask_name: str = "default",
    scale: float | None = None,
    kernel: str | Kernel = "auto",
    score_mod: Callable[..., Any] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    expand: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Scaled dot-product attention of this rank's queries over the keys of all ranks that the mask lets them read.

    Args:
        q: ``[B, Hq, T, Dk]``, this rank's shard, as `spanwise.shard` cuts it. A DTensor sharded over the heads (or
            replicated) on the axes of another mesh, such as "tp", is taken and returned.
        k: ``[B, Hkv, T, Dk]``, ``Hq % Hkv == 0``.
        v: ``[B, Hkv, T, Dv]``.
        plan: the `RankPlan` that `plan.local` made, or a `Plan`, which each call then compares across the ranks.
            Compiled code takes a `RankPlan` only.
        mesh: of a `Plan`: the 1-D cp mesh, or both cp axes for a plan of two levels; None if it has one rank. A
            `RankPlan` has its mesh.
        mask_name: which of the plan's masks.
        scale: factor on ``q @ kᵀ``; default ``1 / sqrt(Dk)``.
        kernel: "auto", "reference", "sdpa" (CPU), "flex", "varlen" (CUDA), or a `Kernel` of your own; see
            `spanwise.attention.kernels.table.resolve`.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` as in FlexAttention; it sees global positions. Kernels
            "reference" and "flex". The gradient of a tensor that it reads, such as a bias, comes from the scores that
            the rank computes: sum it over the cp ranks, like that of `sinks`.
        softcap: scaled scores become ``softcap * tanh(score / softcap)`` (Gemma 2) before masking. Not together with
            `score_mod`.
        sinks: ``[Hq]`` or ``[Hq, n]``, one or n logits a head that join each row's softmax denominator without a value
            (gpt-oss). The gradient on a rank comes from the rows and heads that the rank computes: sum it over the cp
            ranks, like the gradient of any parameter.
        expand: ``expand(k, v)`` gives K ``[B, Hkv, n, Dk]`` and V of the n tokens that it gets; k and v are then rows
            ``[B, h, T, d]``, such as latents and rotary keys, that travel in place of K and V. Expanded K/V are not
            saved: a backward expands again.
        return_aux: ask for lse or max_logit.

    Returns:
        out ``[B, Hq, T, Dv]`` in the dtype of q, or ``(out, Aux)`` if `return_aux` is given. A row without a key gives
        0, lse −inf (the logsumexp of the sinks if there are any) and gradient 0.

    A collective call: every rank of `mesh` makes it, with the same `mask_name`, batch size, heads, head dims and dtype.
    All ranks run it in eager code, or all compiled. Inputs require gradients on all ranks or on none, and every rank's
    loss must depend on the output. Second derivatives (``create_graph=True``), forward-mode derivatives and transforms
    of `torch.func` (vmap, grad, …) raise ``NotImplementedError``.

    Raises:
        ValueError: shapes that are not this plan's shard, a mesh of another size or other than the rank plan's, plans
            that differ between the ranks, a kernel or option that does not go with the device or with another option.
        spanwise.MismatchError: ranks make different calls, here or in the backward; lists what each rank has.
        spanwise.ExchangeError: a rank is gone or too late, here or in the backward; names the collective and the lost
            ranks. Compiled code raises torch's own error; see `spanwise.exchange_errors`.

    >>> import torch, spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(6), num_ranks=1)
    >>> q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    >>> spanwise.context_parallel_attention(q, k, v, plan.local(mesh=None)).shape
    torch.Size([1, 4, 6, 8])
    """
    request = AuxRequest() if return_aux is None else return_aux
    options = AttentionOptions(_torch.constant(scale), score_mod, _torch.constant(softcap))
    out, aux = _attend(q, k, v, _Call(plan, mesh, mask_name, kernel, options, sinks, request, expand))
    return out if return_aux is None else (out, aux)


class _Call(NamedTuple):
    """The arguments of `context_parallel_attention` after q, k and v."""

    plan: Plan | RankPlan
    mesh: DeviceMesh | None
    mask_name: str
    kernel: str | Kernel
    options: AttentionOptions
    sinks: Any
    request: AuxRequest
    expand: Callable[..., Any] | None


@_torch.eager_with_torch_2_11
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> tuple[torch.Tensor, Aux]:
    """`context_parallel_attention` with a result of one type; unwraps DTensors first."""
    if isinstance(q, DTensor) or isinstance(k, DTensor) or isinstance(v, DTensor):
        return _with_dtensors(q, k, v, call)
    _torch.check_transforms(q, k, v)
    local, mesh, kernel = _resolved(q, call)
    rows, compact = (k, v), None
    if call.expand is not None:
        check_rows(k, v, call.expand, local.key_tokens.shape[1])
        rows = zero_in_padding(k, local.kv_valid), zero_in_padding(v, local.kv_valid)
        compact = Compact(call.expand, rows)
        k, v = compact.expanded()
    _check(q, k, v, local, kernel, call)
    compared = None if mesh is None or local.num_ranks == 1 else _compare(q, k, v, rows, local, mesh, kernel.name, call)
    compare = eager(compared)
    mask, sinks, request, score_mod = call.mask_name, call.sinks, call.request, call.options.score_mod
    chunks, batch, flat = local.chunks[mask], q.shape[0], local.chunks[mask][0].flat
    q, k, v = (zero_in_padding(x, at) for x, at in ((q, local.valid), (k, local.kv_valid), (v, local.kv_valid)))

    num_heads, first, tokens, trade = q.shape[1], 0, local.query_tokens, local.trade
    if trade is not None:
        assert mesh is not None
        group = mesh.get_group(mesh.ndim - 1).group_name
        q, k, v = ulysses.to_heads(q, k, v, trade, group, f"mask {mask!r}", kv_trade=local.kv_trade, compare=compare)
        first, compact = trade.rank * q.shape[1], None
        sinks = None if sinks is None else sinks[first : first + q.shape[1]]
        score_mod = None if score_mod is None else _for_later_heads(score_mod, first)

    if flat:
        q, k, v = (_flatten_rows(x) for x in (q, k, v))
        if compact is not None:
            k, v = k.contiguous(), v.contiguous()  # as they are expanded again; `flatten` leaves strides where T is 1
            compact = dataclasses.replace(compact, rows=tuple([_flatten_rows(x) for x in compact.rows]))
        if score_mod is not None:
            # The kernel sees one row: each query's position carries which row it really is.
            tokens = tokens + local.seq_len * torch.arange(batch, device=tokens.device).unsqueeze(1)
            score_mod = _for_flat_rows(score_mod, local.seq_len)
        tokens = tokens.expand(batch, -1).reshape(1, -1)

    # Without a name for the K/V: a name would keep the last chunk's alive while the output travels.
    out, lse, max_logit = merged(
        kernel, q, kv_chunks(k, v, chunks, local, mesh, mask, compare, compact), chunks, tokens,
        AttentionOptions(call.options.scale, score_mod, call.options.softcap), max_logit=request.max_logit,
    )  # fmt: skip
    if flat:
        out, lse = (x.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1) for x in (out, lse))
    out, lse = (out, lse) if sinks is None else with_sinks(out, lse, sinks)
    if max_logit is not None and mesh is not None and local.num_ranks > 1:
        # The heads of this rank, among those of its group.
        max_logit = torch.nn.functional.pad(max_logit, (first, num_heads - first - q.shape[1]), value=-math.inf)
        max_logit = executor.all_reduce(max_logit, "max", mesh, "max_logit")

    if trade is not None:
        out = ulysses.to_tokens(out, trade, group, f"output, mask {mask!r}", compare=compare)
        if request.lse:
            lse = ulysses.to_tokens(lse, trade, group, f"lse, mask {mask!r}", compare=compare)
    out = zero_in_padding(out, local.valid)
    if request.lse and local.valid is not None:  # with sinks, a cotangent of padding would enter
        lse = lse.masked_fill(~local.valid, -math.inf)
    travels = len(chunks) > 1 or trade is not None
    out, *returned = compare_backward((out, lse) if request.lse else (out,), compared, travels=travels)
    return out, Aux(lse=returned[0] if request.lse else None, max_logit=max_logit)


def _compare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    local: RankPlan,
    mesh: DeviceMesh,
    kernel: str,
    call: _Call,
) -> Compare | None:
    """Compare the call across the ranks; returns when its collectives may start."""
    options, mod = call.options, call.options.score_mod
    facts = {
        "mask": call.mask_name, "kernel": kernel, "dtype": q.dtype, "scale": plain(options.scale),
        "softcap": plain(options.softcap), "returns": (call.request.lse, call.request.max_logit),
        "score_mod": None if mod is None else getattr(mod, "__qualname__", type(mod).__name__),
        "expand": None if call.expand is None else getattr(call.expand, "__qualname__", type(call.expand).__name__),
    }  # fmt: skip
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], *getattr(call.sinks, "shape", ()))
    if call.expand is not None:
        sizes = (*sizes, *(size for x in rows for size in (x.shape[1], x.shape[3])))
    named = "[batch, heads of q and k, head dims of q and v, sinks, heads and dims of rows]", sizes
    return compare_call("context_parallel_attention", facts, mesh, (q, *rows), sizes=named, plan=local.digest)


def _resolved(q: torch.Tensor, call: _Call) -> tuple[RankPlan, DeviceMesh | None, Kernel]:
    """The rank plan, its mesh and the kernel."""
    plan, options, request = call.plan, call.options, call.request
    check_plan(plan, "context_parallel_attention")
    if not isinstance(request, AuxRequest):
        raise ValueError(f"return_aux must be spanwise.AuxRequest(lse=…, max_logit=…) or None, got {request!r}")
    kernel = resolve(call.kernel, q.device, options.score_mod)
    if options.scale is not None:
        check_finite(options.scale, "scale", like="; None is 1 / sqrt(head_dim)")
    if options.softcap is not None and options.score_mod is not None:
        raise ValueError("softcap and score_mod cannot be combined; apply the cap inside the score_mod")
    if options.softcap is not None:
        check_finite(options.softcap, "softcap", positive=True)
    local, mesh = local_of(plan, call.mesh, q.device, kernel)
    if call.mask_name not in local.chunks:
        raise ValueError(f"the plan has no mask named {call.mask_name!r}; it has {sorted(local.chunks)}")
    return local, mesh, kernel


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan, kernel: Kernel, call: _Call) -> None:
    """``ValueError`` unless q, k and v are this rank's shard, and fit each other, the plan and the kernel.

    Before the exchange: an error on one rank after it has started would leave the others waiting.
    """
    own, sinks, shapes = local.chunks[call.mask_name][0], call.sinks, [tuple(x.shape) for x in (q, k, v)]
    if any(len(shape) != 4 or shape[3] == 0 for shape in shapes):
        raise ValueError(
            f"q, k, v must be [batch, heads, tokens, head_dim], head dims must be at least 1, got {shapes}"
        )
    num_tokens, num_keys = local.tokens.shape[1], local.key_tokens.shape[1]
    if q.shape[2] != num_tokens or not k.shape[2] == v.shape[2] == num_keys:
        raise ValueError(
            f"q, k and v must be rank {local.rank}'s shard of the sequence, {num_tokens} of {local.seq_len} tokens in "
            f"dim 2, with {num_keys} of {local.kv_len} keys, got {shapes}; cut them with spanwise.shard(plan, mesh, x, "
            f"dim=2), packed ones with dim=0, the keys of cross attention with side='kv'"
        )
    if own.rows > 1 and q.shape[0] != own.rows:
        raise ValueError(f"the plan has masks for {own.rows} batch rows, got {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k and v must agree in batch size, k and v in heads, q and k in head dim; got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        check_heads(q.shape[1], k.shape[1], 1)
    kinds = [(x.dtype, x.device) for x in (q, k, v)]
    if kinds[1:] != kinds[:-1] or q.dtype not in _FLOATS:
        raise ValueError(f"q, k and v must share device and dtype, one of {_FLOATS}, got {kinds}")
    given = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    if any(n is not None and n != got for n, got in zip(local.attention_shape, given, strict=True)):
        raise ValueError(
            f"the plan was made for (num_q_heads, num_kv_heads, head_dim, v_head_dim) = {local.attention_shape}, got "
            f"{given}. make_plan takes those of one rank's tensors, under tensor parallelism its share of the heads"
        )
    if q.shape[1] % local.inner:
        check_heads(q.shape[1], k.shape[1], local.inner)
    if local.tokens.device != q.device:
        raise ValueError(f"the rank plan is on {local.tokens.device}, q on {q.device}; use plan.local(mesh, q.device)")
    if sinks is not None and (sinks.dim() not in (1, 2) or sinks.shape[0] != q.shape[1]):
        raise ValueError(f"sinks must be [{q.shape[1]}], or several, [{q.shape[1]}, n], got {tuple(sinks.shape)}")
    _torch.fix_sizes(*given, *([] if sinks is None else sinks.shape))
    kernel.check(q, k, v, own, call.options, max_logit=call.request.max_logit)


def merged(
    kernel: Kernel,
    q: torch.Tensor,
    arriving: Iterator[ChunkKV],
    chunks: tuple[Chunk, ...],
    tokens: torch.Tensor,
    options: AttentionOptions,
    *,
    max_logit: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Out, lse and, if asked for, the largest score of each head, over all chunks as they arrive.

    This is all the compute between the collectives of a call. Benchmarks call it with K/V that have arrived. q is ``[B,
    Hq, T, Dk]``; `arriving` gives K/V of each of the `chunks`, in order.
    """
    queries, merging = kernel.queries(q), Merging(q.dtype)
    top = None
    for chunk in chunks:
        kv = next(arriving)

        def attend(k: torch.Tensor, v: torch.Tensor, chunk: Chunk = chunk) -> Part:
            return kernel.attend_part(queries, k, v, chunk, tokens, options)

        merging.add(kv.attended(attend))
        if max_logit:
            largest = kernel.max_logit(q.detach(), kv.k.detach(), chunk, tokens, options)
            top = largest if top is None else torch.maximum(top, largest)
        del kv  # otherwise this chunk lives until the one after next has arrived
    return *merging.result(), top


def zero_in_padding(x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """`x` ``[B, H, T, D]`` with zeros in padding, also where it holds NaN; no gradient passes there."""
    return x if valid is None else torch.where(valid.view(1, 1, -1, 1), x, x.new_zeros(()))


def _for_later_heads(score_mod: Callable[..., Any], first: int) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b, h + first, q_idx, kv_idx)


def _for_flat_rows(score_mod: Callable[..., Any], length: int) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, q_idx // length, h, q_idx % length, kv_idx)


def _flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """``[B, H, T, D]`` as ``[1, H, B * T, D]``."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _with_dtensors(q: Any, k: Any, v: Any, call: _Call) -> tuple[torch.Tensor, Aux]:
    """Attention is independent per head: unwrap DTensors that are sharded over heads, compute, wrap again."""
    if call.expand is not None:
        raise ValueError("expand takes plain tensors; pass q.to_local(), with the rank's heads from expand")
    placements: Any = getattr(q, "placements", ())
    # This rank's slice of the heads: mesh axes count like digits, the first one highest.
    num_slices, head_slice = 1, 0
    for axis, placement in enumerate(placements):
        if placement == Shard(1):
            num_slices *= q.device_mesh.size(axis)
            head_slice = head_slice * q.device_mesh.size(axis) + q.device_mesh.get_local_rank(axis)
    for name, x in (("q", q), ("k", k), ("v", v)):
        alike = isinstance(x, DTensor) and isinstance(q, DTensor) and x.device_mesh == q.device_mesh
        heads = alike and x.placements == placements and all(p in (Shard(1), Replicate()) for p in placements)
        if not heads or x.shape[1] % num_slices:
            raise ValueError(
                f"q, k and v must be plain tensors, or DTensors alike on one mesh, sharded over heads that divide, "
                f"Shard(1), or replicated; each cp rank holds its own shard of the sequence. {name} is a "
                f"{type(x).__name__} of shape {tuple(x.shape)} with placements {getattr(x, 'placements', None)}"
            )
    per_head = [Shard(0) if p == Shard(1) else p for p in placements]
    sinks, options = call.sinks, call.options
    if isinstance(sinks, DTensor):
        sinks = sinks.redistribute(placements=per_head).to_local(grad_placements=per_head)
    if options.score_mod is not None and num_slices > 1:
        later = _for_later_heads(options.score_mod, head_slice * (q.shape[1] // num_slices))
        options = AttentionOptions(options.scale, later, options.softcap)
    q_local, k_local, v_local = (x.to_local(grad_placements=x.placements) for x in (q, k, v))
    out, extra = _attend(q_local, k_local, v_local, call._replace(options=options, sinks=sinks))

    def wrap(x: torch.Tensor, to: Any) -> DTensor:
        return DTensor.from_local(x, q.device_mesh, to, run_check=False)

    return wrap(out, placements), Aux(
        lse=None if extra.lse is None else wrap(extra.lse, placements),
        max_logit=None if extra.max_logit is None else wrap(extra.max_logit, per_head),
    )

"""gated_linear and gated_delta: linear attention whose state passes through the runs of all ranks.

    runs that open documents, maps of middle runs -> | whole documents | -> compose -> middle and last runs

Maps travel between the arrows. A run acts on the state as S -> A S + B. Ranks send B of runs that open documents, and
both of middle runs, which are computed once for their map and again from the state that enters them. Everything is
differentiable, so the backward is the mirror image: gradients of maps travel the other way beside whole documents.
"""

# R rows of a shard, H heads, K key dim, V value dim, d dims of a decay, P runs, F features of a map

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from spanwise import _torch
from spanwise.attention.compare import Compared, compare_backward, compare_call, eager, plain, tells_refusals
from spanwise.attention.executor import Link, bring
from spanwise.masks.checks import check_finite
from spanwise.recurrence import _ops
from spanwise.recurrence.chunkwise import Inputs
from spanwise.recurrence.route import ChunkTable, RecurrenceRoute, check_route, from_rows, to_rows

Tensor = torch.Tensor


@tells_refusals
def gated_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    route: RecurrenceRoute,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Linear attention with decay, on this rank's shard, inside documents. Differentiable; collective.

    Along each document, for each head: ``S = exp(log_decay) * S + k ⊗ v`` and ``out = scale * q @ S``, with S of zeros
    before the first token. Mamba-2: q = C, k = B, v = dt * x, log_decay = dt * A, ``scale=1``.

    Args:
        q, k: ``[B, T, Hk, K]`` or ``[T, Hk, K]``, this rank's shard. Their heads divide those of `v`; each serves
            consecutive heads of `v`. `q` may have other heads than `k`.
        v: ``[B, T, H, V]`` or ``[T, H, V]``.
        log_decay: not above 0, −inf forgets everything. ``[…, T, H]`` (Mamba-2, GDN), ``[…, T, H, K]`` (GLA, KDA), or
            ``[H]`` (lightning attention).
        route: of the plan, by `recurrence_route`.
        scale: of the output; default ``K ** -0.5``.

    Returns:
        As `v`; 0 in padding.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.

    >>> import torch, spanwise
    >>> from spanwise import recurrence
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 2, 4]), num_ranks=1)
    >>> ones = torch.ones(4, 1, 1)
    >>> recurrence.gated_linear(ones, ones, ones, torch.zeros(4, 1), recurrence.recurrence_route(plan)).flatten()
    tensor([1., 2., 1., 2.])
    """
    return _layer("gated_linear", q, k, v, log_decay, None, route, scale)


@tells_refusals
def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    route: RecurrenceRoute,
    *,
    scale: float | None = None,
    normalize: bool = False,
) -> torch.Tensor:
    """Gated delta rule on this rank's shard, inside documents. Differentiable; collective.

    Along each document, for each head: ``S = exp(log_decay) * S``, then ``S = S + k ⊗ beta (v - k @ S)`` and
    ``out = scale * q @ S``. Gated DeltaNet (Qwen3-Next) has a decay for each head, Kimi Delta Attention one for each
    key dim.

    Args:
        q, k, v, log_decay, route, scale: as in `gated_linear`.
        beta: ``[…, T, H]``, how much of the error is written.
        normalize: divide q and k by their norms first (``x * rsqrt(sum(x²) + 1e-6)``).

    Returns:
        As `gated_linear`.

    Raises:
        As `gated_linear`.

    >>> import torch, spanwise
    >>> from spanwise import recurrence
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 2, 4]), num_ranks=1)
    >>> ones, half = torch.ones(4, 1, 1), torch.full((4, 1), 0.5)
    >>> recurrence.gated_delta(ones, ones, ones, 0 * half, half, recurrence.recurrence_route(plan)).flatten()
    tensor([0.5000, 0.7500, 0.5000, 0.7500])
    """
    if beta is None:
        raise ValueError("gated_delta needs beta; without an error to correct the layer is gated_linear")
    name = "gated_delta(normalize=True)" if normalize else "gated_delta"
    if normalize:
        wide = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
        unit = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in wide)
        q, k = (x.to(dtype) for x, dtype in zip(unit, (q.dtype, k.dtype), strict=True))
    return _layer(name, q, k, v, log_decay, beta, route, scale)


def _layer(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor | None,
    route: RecurrenceRoute, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    scale = _torch.constant(scale)
    _torch.check_transforms(q, k, v, log_decay)
    check_route(route, {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta})
    _check(q, k, v, log_decay, beta, route, scale)
    flat, heads = v.dim() == 3, v.shape[-2]
    log_decay = log_decay.expand(v.shape[:-1]) if log_decay.dim() == 1 else log_decay
    named = {"q": q, "k": k, "v": v, "log_decay": log_decay if log_decay.dim() == v.dim() else log_decay.unsqueeze(-1)}
    rows = [to_rows(name, x, route, 2) for name, x in named.items()]
    rows += [] if beta is None else [to_rows("beta", beta, route, 1)]
    batch, given = rows[0].shape[1], [x.flatten(1, 2) for x in rows]  # batch rows that share a layout are more heads
    call = None
    if route.apart:
        assert route.mesh is not None
        facts = {"dtypes": tuple([x.dtype for x in given]), "options": plain(scale)}
        sizes = "shapes of a token", [size for x in given for size in x.shape[1:]]
        call = compare_call(name, facts, route.mesh, given, sizes=sizes, plan=route.digest)
    factor, dtype = q.shape[-1] ** -0.5 if scale is None else scale, torch.promote_types(v.dtype, torch.float32)
    q_RHK, k_RHK, v_RHV, decay_RHd, *beta_RH = (x.to(dtype) for x in given)
    inputs = Inputs(q_RHK, k_RHK, v_RHV, decay_RHd, *beta_RH)
    out_RHV = _passed(inputs, route, float(factor), f"states ({name})", eager(call))
    (out_RHV,) = compare_backward((out_RHV,), call, travels=True)
    return from_rows(out_RHV.to(v.dtype).unflatten(1, (batch, heads)), route, flat)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor | None,
    route: RecurrenceRoute, scale: Any,
) -> None:  # fmt: skip
    """``ValueError`` for what one rank can see to be wrong."""
    if v.dim() not in (3, 4) or q.dim() != v.dim() or k.dim() != v.dim():
        shapes = [tuple(x.shape) for x in (q, k, v)]
        raise ValueError(f"q, k and v must be [B, T, heads, dim] or [T, heads, dim] alike, got {shapes}")
    heads, keys = v.shape[-2], k.shape[-1]
    if q.shape[-1] != keys or any(x.shape[-2] < 1 or heads % x.shape[-2] for x in (q, k)):
        shapes = [tuple(x.shape) for x in (q, k)]
        raise ValueError(f"q and k need one head dim, and their heads must divide the {heads} of v; got {shapes}")
    tokens = tuple(v.shape[:-1])
    if tuple(log_decay.shape) not in ((heads,), tokens, (*tokens, keys)):
        shapes = [(heads,), tokens, (*tokens, keys)]
        raise ValueError(f"log_decay must have shape of one of {shapes}, got {tuple(log_decay.shape)}")
    if beta is not None and tuple(beta.shape) != tokens:
        raise ValueError(f"beta must have shape {tokens}, got {tuple(beta.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v), ("log_decay", log_decay), ("beta", beta)):
        if x is None:
            continue
        if x.device != v.device or x.device != route.tokens.device:
            raise ValueError(f"{name} is on {x.device}, v on {v.device}, the route on {route.tokens.device}")
        if not x.is_floating_point() or (x.dtype == torch.float64) != (v.dtype == torch.float64):
            raise ValueError(f"tensors must be floating point, float64 all or none; {name} is {x.dtype}, v {v.dtype}")
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise ValueError("scale is a number and gets no gradient; multiply q by a scale that is learned")
    if scale is not None:
        check_finite(scale, "scale", like=f"; None is 1 / sqrt({keys})")


def _passed(of: Inputs, route: RecurrenceRoute, scale: float, label: str, compare: Compared | None) -> Tensor:
    """Outputs ``[R, H, V]`` of a gated recurrence, float32 at least; `label` names the transfer in errors."""
    state, dense = (of.heads, of.k.shape[2], of.v.shape[2]), of.beta is not None

    def run(table: ChunkTable, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        before = of.v.new_zeros(table.order.shape[0], *state) if before is None else before
        return _ops.run(*of, before, table.tokens, table.order, table.counts, scale)

    if not route.apart:
        return run(route.whole)[0]
    assert route.mesh is not None
    out, opened = run(route.first)
    factors = state[0] * state[1] ** 2 if dense else of.log_decay.shape[1:].numel()
    own = F.pad(opened.flatten(1), (factors, 0))  # of the first map of a document A is not read
    if not _is_empty(route.middle):
        own = own + _maps(of, route)
    link = Link(_torch.group_name(route.mesh.get_group()), route.mesh.size(), label, compare)
    arriving = bring(own, [route.step], link)
    if not _is_empty(route.whole):
        out = out + run(route.whole)[0]
    rows = torch.cat([own, *arriving])
    read = route.chain, route.counts, route.reads, route.read_from, route.read_counts
    return out + run(route.rest, _ops.compose(rows, *read, *state, dense))[0]


def _is_empty(table: ChunkTable) -> bool:
    """Whether there is nothing to compute; compiled code does not know."""
    return not torch.compiler.is_compiling() and table.tokens.shape[0] == 0


def _maps(of: Inputs, route: RecurrenceRoute) -> Tensor:
    """Maps ``[P, F]`` of runs in the middle of documents; B of others is 0."""
    table, number, v = route.middle, route.first.order.shape[0], of.v
    keys, values = of.k.shape[2], v.shape[2]
    cut, before = (table.tokens, table.order, table.counts, 1.0), v.new_zeros(number, of.heads, keys, values)
    if of.beta is None:
        b = _ops.run(*of, before, *cut)[1]
        decay = of.log_decay.double()  # a run has 100,000s of tokens, and float32 would lose 5 digits of their sum
        sums = decay.new_zeros(number + 1, *decay.shape[1:]).index_add(0, route.through, decay)
        return torch.cat([sums[:-1].exp().to(b.dtype).flatten(1), b.flatten(1)], dim=1)
    # The columns of A are states that begin as the identity and get no values.
    columns = torch.eye(keys, dtype=v.dtype, device=v.device).expand(*before.shape[:2], -1, -1)
    after = _ops.run(*of._replace(v=F.pad(v, (0, keys))), torch.cat([before, columns], dim=-1), *cut)[1]
    return torch.cat([after[..., values:].flatten(1), after[..., :values].flatten(1)], dim=1)

"""gated_linear and gated_delta: linear attention whose state passes from rank to rank."""

from __future__ import annotations

import torch

from spanwise.recurrence.route import RecurrenceRoute


def gated_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    route: RecurrenceRoute,
    *,
    scale: float | None = None,
    initial: torch.Tensor | None = None,
    return_final: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Linear attention with decay, on this rank's shard, inside documents. Differentiable; collective.

    Along each document, for each head: ``S = exp(log_decay) * S + k ⊗ v`` and ``out = scale * q @ S``, with S of zeros
    (or `initial`) before the first token. Mamba-2: q = C, k = B, v = dt * x, log_decay = dt * A, ``scale=1``.

    Args:
        q, k: ``[B, T, Hk, K]`` or ``[T, Hk, K]``, this rank's shard. Their heads divide those of `v`; each serves
            consecutive heads of `v`. `q` may have other heads than `k`.
        v: ``[B, T, H, V]`` or ``[T, H, V]``.
        log_decay: not above 0, −inf forgets everything. ``[…, T, H]`` (Mamba-2, GDN), ``[…, T, H, K]`` (GLA, KDA), or
            ``[H]`` (lightning attention).
        route: of the plan, by `recurrence_route`.
        scale: of the output; default ``K ** -0.5``.
        initial: ``[B, n, H, K, V]`` (``[n, H, K, V]`` without B), states before the documents ``route.starts``.
            Where documents differ by batch row (``route.rows > 1``) there is no B.
        return_final: also return the states after the documents ``route.ends``, ``[B, m, H, K, V]``, in float32 at
            least.

    Returns:
        out as `v`; 0 in padding. With `return_final` a pair ``(out, states)``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        spanwise.MismatchError: ranks make different calls.
        spanwise.ExchangeError: a rank is gone or too late, here or in the backward.
    """
    return _run(q, k, v, log_decay, None, route, scale, initial, return_final)


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
    initial: torch.Tensor | None = None,
    return_final: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule on this rank's shard, inside documents. Differentiable; collective.

    Along each document, for each head: ``S = exp(log_decay) * S``, then ``S = S + k ⊗ beta (v - k @ S)`` and
    ``out = scale * q @ S``. Gated DeltaNet (Qwen3-Next) has a decay for each head, Kimi Delta Attention one for each
    key dim.

    Args:
        q, k, v, log_decay, route, scale, initial, return_final: as in `gated_linear`.
        beta: ``[…, T, H]``, how much of the error is written.
        normalize: divide q and k by their norms first (``x * rsqrt(sum(x²) + 1e-6)``).

    Returns:
        As `gated_linear`.

    Raises:
        As `gated_linear`.
    """
    if normalize:
        q, k = (_normalized(x) for x in (q, k))
    return _run(q, k, v, log_decay, beta, route, scale, initial, return_final)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _run(q, k, v, log_decay, beta, route, scale, initial, return_final):  # type: ignore[no-untyped-def]
    from spanwise.batch.sharding import shard, unshard

    flat = v.dim() == 3
    dtype = torch.promote_types(v.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = v.shape[-2]
    if log_decay.dim() == 1:
        log_decay = log_decay.expand(*v.shape[:-1])
    if log_decay.dim() == v.dim() - 1:
        log_decay = log_decay.unsqueeze(-1)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return unshard(route.local, None, x.unsqueeze(0) if flat else x).to(dtype)

    q, k, v_, g = whole(q), whole(k), whole(v), whole(log_decay)
    q, k = (x.repeat_interleave(heads // x.shape[-2], -2) for x in (q, k))
    b = None if beta is None else whole(beta)
    if initial is not None or return_final:
        raise NotImplementedError("initial and final states come soon")
    ids = route.ids.expand(v_.shape[0], -1)
    state = q.new_zeros(v_.shape[0], heads, q.shape[-1], v_.shape[-1])
    outs = []
    for t in range(v_.shape[1]):
        fresh = (ids[:, t] != ids[:, t - 1]) if t else torch.ones(len(ids), dtype=torch.bool)
        state = torch.where(fresh[:, None, None, None], 0.0, state) * g[:, t].exp().unsqueeze(-1)
        new = v_[:, t]
        if b is not None:
            new = b[:, t].unsqueeze(-1) * (new - (k[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + k[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        outs.append(scale * (q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    out = torch.where((ids >= 0)[:, :, None, None], torch.stack(outs, 1), 0.0).to(v.dtype)
    out = shard(route.local, None, out)
    return out.squeeze(0) if flat else out

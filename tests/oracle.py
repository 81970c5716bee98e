"""What tests compare with: dense float64 attention of the whole sequence, free of spanwise code."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch


class Problem(NamedTuple):
    """One attention problem over the whole sequence, and what dense float64 attention makes of it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    bias: str | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, lse, weights and scores under ``visible``, bool ``[1 or B, T, K]``. Rows without a key: 0 and −inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * torch.einsum("bhtd,bhkd->bhtk", q, k)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    b, h, t, n = scores.shape
    seen = visible[:, None].expand(b, h, t, n)
    scores = torch.where(seen, scores + score_bias(bias, (b, h, t, n)), -math.inf)
    columns = scores
    if sinks is not None:
        columns = torch.cat([scores, sinks.reshape(1, len(sinks), 1, -1).expand(b, h, t, -1)], -1)
    some = (columns > -math.inf).any(-1)
    lse = torch.where(some, torch.logsumexp(torch.where(some[..., None], columns, 0.0), -1), -math.inf)
    weights = torch.exp(scores - torch.where(some, lse, 0.0)[..., None])  # -inf where nothing is seen
    return torch.einsum("bhtk,bhkd->bhtd", weights, v), lse, weights, scores


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention under a bool mask ``[B, Tq, Tk]``; out and lse. Rows without a key: 0 and −inf."""
    return _attention(q, k, v, visible, scale)[:2]


class Inputs(NamedTuple):
    """Whole tensors of one attention problem, in the dtype of the call.

    Attributes:
        q, k, v: ``[B, H, T, D]``, ``[B, Hkv, K, D]``, ``[B, Hkv, K, Dv]``.
        grad_out: cotangent of the output, ``[B, H, T, Dv]``.
        grad_lse: cotangent of the lse, ``[B, H, T]``.
        sinks: ``[H]``, ``[H, n]`` or None.
        up: ``[Hkv, L, 2 * Dv]`` if rows travel: k are latents ``[B, 1, K, L]``, v rotary keys ``[B, 1, K, R]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    sinks: torch.Tensor | None
    up: torch.Tensor | None = None


def expanded(latents: torch.Tensor, rope: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of multi-head latent attention; the rotary part of K is shared by all heads."""
    k, v = (latents @ up.to(latents.dtype)).chunk(2, -1)
    return torch.cat([k, rope.expand(-1, len(up), -1, -1)], -1), v


class Expected(NamedTuple):
    """Results in float64 by name: out, lse, dq, dk, dv, dsinks, dup, max_logit; and the largest sum of the absolute
    values of the terms that each of them is made of: a rounding error is relative to that."""

    values: dict[str, torch.Tensor]
    sizes: dict[str, float]


def score_bias(kind: str | None, shape: tuple[int, int, int, int]) -> torch.Tensor | float:
    """What the score_mod of that kind adds to the scores of ``(batch, heads, queries, keys)``."""
    if kind is None:
        return 0.0
    b, h, i, j = (torch.arange(n, dtype=torch.float64) for n in shape)
    slopes = 0.3 / (h + 1)
    if kind == "batch":
        slopes = slopes * (1 + b[:, None])
    return slopes[..., None, None] * (j - i[:, None]) / 8 + 0.01 * i[:, None]


def expected(inputs: Inputs, visible: torch.Tensor, options: dict[str, Any]) -> Expected:
    """Attention under ``visible``, bool ``[1 or B, T, K]``; options: scale, softcap, bias.

    A row without a key has output 0, no gradient, and an lse of −inf or of its sink.
    """
    leaves = [x.double().clone().requires_grad_() for x in inputs[:3]]
    others = {"sinks": inputs.sinks, "up": inputs.up}
    others = {name: x.double().clone().requires_grad_() for name, x in others.items() if x is not None}
    q, k, v = leaves if inputs.up is None else (leaves[0], *expanded(*leaves[1:], others["up"]))
    out, lse, weights, scores = _attention(q, k, v, visible, sinks=others.get("sinks"), **options)
    some = lse > -math.inf
    grad_lse = torch.where(some, inputs.grad_lse.double(), 0.0)
    torch.autograd.backward([out, torch.where(some, lse, 0.0)], [inputs.grad_out.double(), grad_lse])
    values = {"out": out, "lse": lse, "dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad}
    values |= {f"d{name}": x.grad for name, x in others.items()}
    heads = q.shape[1]
    values["max_logit"] = scores.amax(dim=(0, 2, 3)) if scores.shape[3] else torch.full((heads,), -math.inf)
    with torch.no_grad():
        found = {name: torch.zeros_like(inputs.q) if x is None else x.detach() for name, x in values.items()}
        scale = 1 / math.sqrt(q.shape[-1]) if options["scale"] is None else options["scale"]
        whole = inputs._replace(k=k, v=v)
        sums = _sums(whole, weights, scores, lse, grad_lse, abs(scale), heads // k.shape[1])
    if inputs.up is not None:
        rows = [x.detach().abs().requires_grad_() for x in (*leaves[1:], others["up"])]
        grads = torch.autograd.grad(expanded(*rows), rows, [sums["dk"], sums["dv"]])
        sums |= dict(zip(("dk", "dv", "dup"), grads, strict=True))
    return Expected(found, {name: float(x.max()) if x.numel() else 0.0 for name, x in sums.items()})


def _sums(
    inputs: Inputs,
    weights: torch.Tensor,
    scores: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor,
    scale: float,
    group: int,
) -> dict[str, torch.Tensor]:
    """Each formula of the forward and the backward with absolute values of all its terms."""
    q, k, v, grad_out = (x.double().abs() for x in inputs[:4])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    grad_weights = torch.einsum("bhtd,bhkd->bhtk", grad_out, v)
    delta = (weights * grad_weights).sum(-1) + grad_lse.abs()
    grad_scores = weights * (grad_weights + delta[..., None])

    def shared(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, group)).sum(2)

    sums = {
        "out": torch.einsum("bhtk,bhkd->bhtd", weights, v),
        "lse": 1 + torch.where(lse > -math.inf, lse.abs(), 0.0),
        "dq": scale * torch.einsum("bhtk,bhkd->bhtd", grad_scores, k),
        "dk": scale * shared(torch.einsum("bhtk,bhtd->bhkd", grad_scores, q)),
        "dv": shared(torch.einsum("bhtk,bhtd->bhkd", weights, grad_out)),
        "max_logit": 1 + torch.where(scores > -math.inf, scores.abs(), 0.0),
    }
    if inputs.sinks is not None:
        sinks = inputs.sinks.double().reshape(1, len(inputs.sinks), 1, -1)
        sums["dsinks"] = (torch.exp(sinks - lse[..., None]) * delta[..., None]).sum((0, 2))
    return sums


def make_problem(
    visible: np.ndarray,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Problem:
    """Random q, k, v and cotangent in `dtype`, with float64 results of exactly those numbers.

    Args:
        visible: bool ``[1 or batch, S, S]``.
        heads: query heads, key/value heads.
        dims: query/key head dim, value head dim.
    """
    generator = torch.Generator().manual_seed(seed)
    length = visible.shape[-1]

    def draw(num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, num_heads, length, dim, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = draw(heads[0], dims[0]), draw(heads[1], dims[0]), draw(heads[1], dims[1])
    grad_out = draw(heads[0], dims[1])
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, torch.from_numpy(visible).expand(batch, length, length))
    out.backward(grad_out.double())
    dq, dk, dv = (x.grad for x in leaves)
    return Problem(q, k, v, grad_out, out.detach(), lse.detach(), dq, dk, dv)


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """``max |x - reference| / max |reference|``; 0 for two empty tensors."""
    if reference.numel() == 0:
        assert x.shape == reference.shape
        return 0.0
    return float((x.double() - reference).abs().max() / reference.abs().max().clamp(min=1e-300))

"""Dense float64 attention and its gradients, and the size of rounding errors to expect. Imports nothing of spanwise."""

# B batch, H query heads, T queries, K keys, D head dim

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Whole tensors of one attention problem, in the dtype of the call.

    Attributes:
        q, k, v: ``[B, H, T, D]``, ``[B, Hkv, K, D]``, ``[B, Hkv, K, Dv]``.
        grad_out: cotangent of the output, ``[B, H, T, Dv]``.
        grad_lse: cotangent of the lse, ``[B, H, T]``.
        sinks: ``[H]``, ``[H, n]`` or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    sinks: Tensor | None


class Expected(NamedTuple):
    """Results in float64 by name: out, lse, dq, dk, dv, dsinks, max_logit; and the largest sum of the absolute values
    of the terms that each of them is made of: a rounding error is relative to that."""

    values: dict[str, Tensor]
    sizes: dict[str, float]


def bias(kind: str | None, shape: tuple[int, int, int, int]) -> Tensor | float:
    """What the score_mod of that kind adds to the scores of ``(batch, heads, queries, keys)``."""
    if kind is None:
        return 0.0
    b, h, i, j = (torch.arange(n, dtype=torch.float64) for n in shape)
    slopes = 0.3 / (h + 1)
    if kind == "batch":
        slopes = slopes * (1 + b[:, None])
    return slopes[..., None, None] * (j - i[:, None]) / 8 + 0.01 * i[:, None]


def expected(inputs: Inputs, visible: Tensor, options: dict[str, Any]) -> Expected:
    """Attention under ``visible``, bool ``[1 or B, T, K]``; options: scale, softcap, bias.

    A row without a key has output 0, no gradient, and an lse of −inf or of its sink.
    """
    leaves = [x.double().clone().requires_grad_() for x in inputs[:3]]
    sinks = None if inputs.sinks is None else inputs.sinks.double().clone().requires_grad_()
    q, k, v = leaves
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = 1 / math.sqrt(q.shape[-1]) if options["scale"] is None else options["scale"]
    scores = scale * torch.einsum("bhtd,bhkd->bhtk", q, k)
    if options["softcap"] is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = scores + bias(options["bias"], tuple(scores.shape))
    seen = visible[:, None].expand(scores.shape)
    scores = torch.where(seen, scores, -math.inf)
    columns = scores
    if sinks is not None:
        columns = torch.cat([scores, sinks.reshape(1, len(sinks), 1, -1).expand(*scores.shape[:3], -1)], -1)
    some = (columns > -math.inf).any(-1)
    lse = torch.where(some, torch.logsumexp(torch.where(some[..., None], columns, 0.0), -1), -math.inf)
    weights = torch.where(seen, torch.exp(torch.where(seen, scores, 0.0) - torch.where(some, lse, 0.0)[..., None]), 0.0)
    out = torch.einsum("bhtk,bhkd->bhtd", weights, v)
    grad_lse = torch.where(some, inputs.grad_lse.double(), 0.0)
    torch.autograd.backward([out, torch.where(some, lse, 0.0)], [inputs.grad_out.double(), grad_lse])
    values = {"out": out, "lse": lse, "dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad}
    values["max_logit"] = scores.amax(dim=(0, 2, 3)) if scores.shape[3] else torch.full((q.shape[1],), -math.inf)
    if sinks is not None:
        values["dsinks"] = sinks.grad
    with torch.no_grad():
        found = {name: torch.zeros_like(inputs.q) if x is None else x.detach() for name, x in values.items()}
        sizes = _sizes(inputs, weights, scores, lse, grad_lse, abs(scale), group)
    return Expected(found, sizes)


def _sizes(
    inputs: Inputs, weights: Tensor, scores: Tensor, lse: Tensor, grad_lse: Tensor, scale: float, group: int
) -> dict[str, float]:
    """Each formula of the forward and the backward with absolute values of all its terms; the largest entry."""
    q, k, v, grad_out = (x.double().abs() for x in inputs[:4])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    grad_weights = torch.einsum("bhtd,bhkd->bhtk", grad_out, v)
    delta = (weights * grad_weights).sum(-1) + grad_lse.abs()
    grad_scores = weights * (grad_weights + delta[..., None])

    def shared(x: Tensor) -> Tensor:
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
    return {name: float(x.max()) if x.numel() else 0.0 for name, x in sums.items()}

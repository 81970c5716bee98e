"""Problems with dense float64 attention on the same device: what the cells of parity compare with."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from spanwise import SpanMask

# The tolerances of `spanwise.verify`: largest error relative to the largest number.
TOLERANCES = {"float32": 2e-5, "bfloat16": 3.5e-2, "float16": 1e-2}
MASKS = ("documents", "causal", "window", "prefix", "empty rows")
HEADS, KV_HEADS, DIM = 8, 4, 64


def mask_of(name: str, length: int) -> SpanMask:
    cuts = [0, 1, length // 3, length // 3, length // 2 + 1, length]
    if name == "empty rows":
        rows = np.arange(length)
        end = np.where(rows % 7 == 3, 0, rows + 1)
        start = np.where(rows % 7 == 3, 0, np.maximum(rows - length // 4, 0))
        return SpanMask(start[None], end[None], length)
    made = {
        "documents": lambda: SpanMask.documents(cuts),
        "causal": lambda: SpanMask.causal(length),
        "window": lambda: SpanMask.sliding_window(length, length // 5, 3),
        "prefix": lambda: SpanMask.prefix_lm(cuts, [1, 5, 0, length // 9, length // 8]),
    }
    return made[name]()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """float64 attention under a bool mask ``[Q, K]``; rows without a key give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~visible, -math.inf)
    some = visible.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~some, 0.0), -1).masked_fill(~some, 0.0) @ v


@functools.lru_cache(maxsize=8)
def problem(mask: str, length: int, dtype: str, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v and the output's gradient in `dtype`, alike on all ranks; out, dq, dk and dv of exactly these."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((n, length, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    given = [torch.randn(1, *shape, generator=draw).to(getattr(torch, dtype)).to(device) for shape in shapes]
    leaves = [x.double().requires_grad_() for x in given[:3]]
    out = dense(*leaves, torch.from_numpy(mask_of(mask, length).dense()[0]).to(device))
    return given, [out.detach(), *torch.autograd.grad(out, leaves, given[3].double())]


def differences(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], tolerance: float) -> dict[str, float]:
    """Largest error of each tensor, relative to the largest number of the wanted one.

    Raises:
        AssertionError: an error above the tolerance, or NaN.
    """
    errors = {}
    for name, (got, wanted) in pairs.items():
        finite = wanted.isfinite()  # the lse of a row without a key is not
        if not torch.equal(got.isfinite(), finite):
            raise AssertionError(f"{name} is not finite where it should be, or the other way round")
        largest = wanted.detach()[finite].abs().max().clamp(min=1e-300) if finite.any() else 1.0
        differ = (got.detach().double()[finite] - wanted.detach().double()[finite]).abs()
        errors[name] = float(differ.max() / largest) if differ.numel() else 0.0
        if not errors[name] <= tolerance:
            raise AssertionError(f"{name} differs by {errors[name]:.2e}, more than {tolerance:.1e}")
    return errors

"""Kernel "sdpa" against torch's flash kernel at any size of scores: as exact, and finite wherever torch is."""

from __future__ import annotations

import math

import pytest
import torch

from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import KERNELS
from spanwise.masks.span_mask import SpanMask
from tests.attention.stand_ins import attend
from tests.oracle import dense_attention
from tests.pairs import covering


def results(length: int, dim: int, size: float, scale: float, cuts: object, seed: int) -> list[list[torch.Tensor]]:
    """Out, dq, dk and dv of causal attention, whose scores are about `size`: exactly, by "sdpa", and by torch."""
    generator, mask = torch.Generator().manual_seed(seed), SpanMask.causal(length)
    q, k, v, grad_out = (torch.randn(1, 2, length, dim, generator=generator) for _ in range(4))
    tensors, found = [q * (size / math.sqrt(dim) / scale), k, v], []
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for function in (
        lambda *x: dense_attention(*x, torch.from_numpy(mask.dense()), scale),
        lambda *x: attend(KERNELS["sdpa"], *x, mask, AttentionOptions(scale), cuts),
        lambda *x: flash(*x, 0.0, True, scale=scale),
    ):
        leaves = [(x.clone() if found else x.double()).requires_grad_() for x in tensors]
        out = function(*leaves)[0]
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))])
    return found


@pytest.mark.parametrize(
    ("size", "shape", "cuts"),
    covering(
        [1, 7e2, 7e3, 7e4, 1e10, 1e18, 1e30], [(193, 32, 0.2), (33, 128, 1.0), (7, 64, 0.125), (900, 32, 0.2)],
        [None, (0, 1 / 3, 1 / 2, 1)],
    ),
)  # fmt: skip
def test_error_is_that_of_torch(size: float, shape: tuple[int, int, float], cuts: object) -> None:
    """The geometric mean over seeds: a few rows whose two best scores nearly tie decide the error of one problem."""
    length, dim, scale = shape
    logs, seeds = torch.zeros(4), 12 if length < 900 and size < 1e10 else 1
    for seed in range(seeds):
        for i, (whole, x, y) in enumerate(zip(*results(length, dim, size, scale, cuts, seed), strict=True)):
            assert (x.isfinite() | ~y.isfinite()).all()
            # Where softmax picks one key, gradients of q and k are pure rounding: beside grad_out, not beside 0.
            least = 1e-9 * whole.norm() + 1e-12
            logs[i] += torch.log(((x - whole).norm() + least) / ((y - whole).norm() + least)) / seeds
    assert size >= 1e10 or (logs.exp() <= 2).all(), f"out, dq, dk, dv: {logs.exp().tolist()} of torch's error"

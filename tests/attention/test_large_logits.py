"""Kernel "sdpa" with large scores against torch's flash kernel: as exact, and finite wherever torch is."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from spanwise.attention.kernels.merge import merge
from spanwise.attention.kernels.table import KERNELS
from tests.kernel_calls import sdpa, sdpa_part
from tests.oracle import dense_attention
from tests.pairs import covering

Results = list[torch.Tensor]  # out, dq, dk, dv
SEEDS = 12


def draw(length: int, dim: int, size: float, scale: float, seed: int) -> list[torch.Tensor]:
    """q, k, v and grad_out; scores are about `size`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (torch.randn(1, 2, length, dim, generator=generator) for _ in range(4))
    return [q * (size / math.sqrt(dim) / scale), k, v, grad_out]


def run(tensors: list[torch.Tensor], scale: float, way: str) -> Results:
    """Causal attention and its gradients."""
    leaves = [(x.double() if way == "exact" else x.clone()).requires_grad_() for x in tensors[:3]]
    q, k, v = leaves
    length = q.shape[2]
    start, end = torch.zeros(1, 1, length, dtype=torch.int32), torch.arange(1, length + 1, dtype=torch.int32)
    end = end.view(1, 1, -1)
    if way == "exact":
        out, _ = dense_attention(q, k, v, torch.ones(1, length, length, dtype=torch.bool).tril(), scale)
    elif way == "torch":
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    elif way == "whole":
        out, _ = sdpa(q, k, v, start, end, scale=scale)
    else:
        cuts, shared = [0, length // 3, length // 2, length], KERNELS["sdpa"].queries(q)
        out, _ = merge(
            [
                sdpa_part(shared, k[:, :, a:b], v[:, :, a:b], start, end.clamp(a, b) - a, scale=scale)
                for a, b in pairwise(cuts)
            ]
        )
    out.backward(tensors[3].to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize(
    ("size", "shape", "way"),
    covering([1, 7e2, 7e3, 7e4], [(193, 32, 0.2), (130, 64, 1.0), (33, 128, 1.0), (7, 64, 0.125)], ["whole", "parts"]),
)
def test_error_is_that_of_torch(size: float, shape: tuple[int, int, float], way: str) -> None:
    """The geometric mean over seeds: a few rows whose two best scores nearly tie decide the error of one problem."""
    length, dim, scale = shape
    logs = torch.zeros(4)
    for seed in range(SEEDS):
        tensors = draw(length, dim, size, scale, seed)
        exact, ours, torchs = (run(tensors, scale, each) for each in ("exact", way, "torch"))
        for i, (whole, x, y) in enumerate(zip(exact, ours, torchs, strict=True)):
            # Where softmax picks one key, gradients of q and k are pure rounding: beside grad_out, not beside 0.
            least = 1e-9 * whole.norm() + 1e-12
            logs[i] += torch.log(((x - whole).norm() + least) / ((y - whole).norm() + least)) / SEEDS
    assert (logs.exp() <= 2).all(), f"out, dq, dk, dv: {logs.exp().tolist()} of torch's error"


@pytest.mark.parametrize("way", ["whole", "parts"])
@pytest.mark.parametrize(("length", "dim"), [(193, 32), (33, 128), (3, 8)])
@pytest.mark.parametrize("size", [1e10, 1e18, 1e30])
def test_finite_where_torch_is(size: float, length: int, dim: int, way: str) -> None:
    for scale in (1.0, 0.3):
        tensors = draw(length, dim, size, scale, seed=0)
        for x, y in zip(run(tensors, scale, way), run(tensors, scale, "torch"), strict=True):
            assert (x.isfinite() | ~y.isfinite()).all()

"""Losses whose calls differ between ranks: an error on every rank, where all-reduces would add up what differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from tests.ranks.gloo import GlooPool
from tests.ranks.test_mismatch import mismatch

LABELS = torch.tensor([[1, -100, 2, 0]])
# What rank 1 does otherwise, and what the error names.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a count of its own": ({"num_valid": 2}, "rank 1: amount 2.0"),
    "no count": ({"num_valid": None}, "num_valid None, weighted False"),
    "a count in a tensor": ({"num_valid": torch.tensor(6)}, "rank 1: num_valid a tensor"),
    "a wider dtype": ({"dtype": torch.float64}, "rank 1: dtype float64"),
    "weights": ({"weights": torch.ones(1, 4)}, "rank 1: weighted True"),
    "no gradient": ({"grad": False}, "rank 1: requires grad False"),
}


def of_logits(mesh: DeviceMesh, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return spanwise.cross_entropy(x, LABELS, mesh, **options)


def of_hidden(mesh: DeviceMesh, x: torch.Tensor, **options: Any) -> torch.Tensor:
    weight = torch.ones(5, x.shape[-1], dtype=x.dtype)
    return spanwise.linear_cross_entropy(x, weight, LABELS, loss_mesh=mesh, **options)


def call(
    loss: Callable[..., torch.Tensor], mesh: DeviceMesh, options: dict[str, Any], backend: str | None = None
) -> None:
    options = {"num_valid": 6, "dtype": torch.float32, "grad": True} | options
    x = torch.ones(1, 4, 5, dtype=options.pop("dtype"), requires_grad=options.pop("grad"))

    def run(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return loss(mesh, x, **options)

    out = (torch.compile(run, backend=backend, fullgraph=True) if backend else run)(x, **options)
    if out.requires_grad:
        out.backward()


def differ(rank: int, mesh: DeviceMesh, loss: Callable[..., torch.Tensor], steady: int) -> dict[str, str]:
    said = {}
    for name, (options, _) in CHANGES.items():
        for _ in range(steady):
            call(loss, mesh, {})
        own = options if rank == mesh.size() - 1 else {}
        said[name] = mismatch(lambda own=own: [call(loss, mesh, own), call(loss, mesh, {})])
        if steady:
            break  # the others had gone on, and the groups are closed
    return said


@pytest.mark.parametrize("loss", [of_logits, of_hidden])
@pytest.mark.parametrize("steady", [0, 8])
def test_raises_on_every_rank(gloo_pool: GlooPool, loss: Callable[..., torch.Tensor], steady: int) -> None:
    for said in gloo_pool.run(2, differ, loss, steady):
        for name, text in said.items():
            assert "ranks disagree on call" in text and CHANGES[name][1] in text, (name, text)


def differ_compiled(
    rank: int, mesh: DeviceMesh, loss: Callable[..., torch.Tensor], backend: str, names: list[str]
) -> dict[str, str]:
    torch._dynamo.reset()
    said = {}
    for name in names:
        own = CHANGES[name][0] if rank == 1 else {}
        said[name] = mismatch(lambda own=own: [call(loss, mesh, own, backend), call(loss, mesh, {}, backend)])
    call(loss, mesh, {}, backend if rank == 0 else None)  # only one rank has compiled it: the same call
    return said


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("loss", "backend", "names"),
    [
        (of_logits, "aot_eager", ["a count of its own", "no count"]),
        pytest.param(of_hidden, "aot_eager", list(CHANGES), marks=pytest.mark.slow),
        pytest.param(of_logits, "inductor", list(CHANGES), marks=pytest.mark.slow),
    ],
)
def test_raises_on_every_rank_in_compiled_code(
    gloo_pool: GlooPool, loss: Callable[..., torch.Tensor], backend: str, names: list[str]
) -> None:
    for said in gloo_pool.run(2, differ_compiled, loss, backend, names):
        for name, text in said.items():
            assert "ranks disagree on call" in text and CHANGES[name][1] in text, (name, text)


def counts_in_tensors(rank: int, mesh: DeviceMesh, backend: str | None) -> str:
    torch._dynamo.reset()
    call(of_logits, mesh, {"num_valid": torch.tensor(6)}, backend)
    return mismatch(lambda: call(of_logits, mesh, {"num_valid": torch.tensor([6, 3][rank])}, backend))


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=[pytest.mark.slow, pytest.mark.compiles])])
def test_counts_in_tensors_of_the_host_are_compared(gloo_pool: GlooPool, backend: str | None) -> None:
    for text in gloo_pool.run(2, counts_in_tensors, backend):
        assert "rank 0: cross_entropy(amount 6.0" in text and "rank 1: amount 3.0" in text, text


def over_two_axes(rank: int, mesh: DeviceMesh, compiled: bool) -> tuple[str, float]:
    both = mesh["dp", "cp"]
    if compiled:
        torch._dynamo.reset()
        call(of_logits, both, {"num_valid": 12}, "aot_eager")
        return mismatch(lambda: call(of_logits, both, {"num_valid": 3 + rank // 3}, "aot_eager")), math.log(5)
    loss = spanwise.cross_entropy(torch.zeros(1, 4, 5), LABELS, both, num_valid=12).item()
    return mismatch(lambda: call(of_logits, both, {"num_valid": 3 + rank // 3})), loss


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.compiles])])
def test_ranks_of_two_axes(gloo_pool: GlooPool, compiled: bool) -> None:
    axes: dict[str, Any] = {"mesh_shape": (2, 2), "mesh_dim_names": ("dp", "cp")}
    for text, loss in gloo_pool.run(4, over_two_axes, compiled, **axes):
        assert "rank 3: amount 4.0" in text and loss == pytest.approx(math.log(5))

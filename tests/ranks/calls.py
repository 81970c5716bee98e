"""What many tests of attention on ranks share: exchanges, the mesh of a plan, a step of one rank, and its errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from tests.oracle import Problem

CU_SEQLENS = [0, 1, 2, 19, 19, 40, 67]  # documents of length 1 and 0; the sum divides by nothing
LENGTH = CU_SEQLENS[-1]
HOSTS = dataclasses.replace(spanwise.H100.with_host_size(2), name="hosts of 2")
EXCHANGES: list[dict[str, Any]] = [
    {"exchange": "all_gather"},
    {"exchange": "all_gather", "keep_kv": False},
    {"exchange": "needed", "stages": 1},
    {"exchange": "needed", "stages": 3},
    {"exchange": "needed", "stages": 3, "keep_kv": False},
    {"exchange": "hierarchical", "hardware": HOSTS},
    {"exchange": "hierarchical", "hardware": HOSTS, "keep_kv": False},
    {"exchange": "ring"},
    {"exchange": "ring", "keep_kv": True},
    {"exchange": "ulysses"},
]


def heads_for(exchange: dict[str, Any]) -> tuple[int, int]:
    """24 and 6 heads go with 1, 2, 3, 4 and 8 ranks, where some share K/V heads unevenly."""
    return (24, 6) if exchange["exchange"] == "ulysses" else (4, 2)


def mesh_of(plan: spanwise.Plan) -> dict[str, Any]:
    """Arguments of a launcher for the mesh that the plan wants."""
    if plan.inner in (1, plan.num_ranks):
        return {}
    return {"mesh_shape": (plan.num_groups, plan.inner), "mesh_dim_names": ("outer", "inner")}


def leaves_of(plan: Any, mesh: DeviceMesh | None, problem: Problem) -> tuple[list[torch.Tensor], torch.Tensor]:
    """This rank's q, k and v, which need gradients, and its cotangent of the output."""
    q, k, v, grad = (spanwise.shard(plan, mesh, x, dim=2) for x in problem[:4])
    return [x.requires_grad_() for x in (q, k, v)], grad


def step(
    plan: Any,
    mesh: DeviceMesh | None,
    problem: Problem,
    attend: Callable[..., torch.Tensor] = spanwise.context_parallel_attention,
    **options: Any,
) -> list[torch.Tensor]:
    """out, dq, dk, dv of this rank."""
    leaves, grad = leaves_of(plan, mesh, problem)
    out = attend(*leaves, plan, mesh, **options)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def errors(plan: spanwise.Plan, rank: int, problem: Problem, got: Sequence[torch.Tensor | None]) -> list[float]:
    """Relative errors of a rank's out, dq, dk and dv, of those that are not None."""
    wanted = (problem.out, problem.dq, problem.dk, problem.dv)
    found = []
    for x, whole in zip(got, wanted, strict=True):
        if x is not None:
            want = plan.shard(whole, rank, dim=2)
            assert x.shape == want.shape
            size = whole.abs().amax().clamp(min=1e-3)
            found.append(float((x.detach().double() - want).abs().amax() / size) if x.numel() else 0.0)
    return found


def restored(plan: spanwise.Plan, shards: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors of the whole sequence out of those of each rank."""
    order = plan.layout.restore_indices()[0]
    return [torch.cat(parts, 2)[:, :, order] for parts in zip(*shards, strict=True)]


def mismatch(run: Callable[[], Any]) -> str:
    """The text of the `MismatchError` that `run` raises, empty if it raises none."""
    try:
        run()
    except spanwise.MismatchError as error:
        return str(error)
    return ""

"""One rank of `slow_link.py`: the timed calls, on its host."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hosts import serve, timed
from slow_link_cases import HEAD_DIM, HEADS, Results, Scenario, Variant, draw, make_plan
from slow_link_peers import PEERS, Refused
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise.attention import ulysses
from spanwise.attention.attention import merged
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.kv import ChunkKV, kv_chunks
from spanwise.attention.rank_plan import RankPlan, inner_group
from spanwise.calibrate.measure import measure as calibrate
from spanwise.hardware import Hardware

Call = Callable[[], Any]


def mesh_of(two_level: bool, per_host: int) -> DeviceMesh:
    ranks = dist.get_world_size()
    if not two_level:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    return init_device_mesh("cpu", (ranks // per_host, per_host), mesh_dim_names=("cp_outer", "cp_inner"))


def answer(job: dict[str, Any]) -> dict[str, Any]:
    if "calibrate" in job:  # all hosts have the machine's name, so it is said how many ranks a host has
        heads = {"num_q_heads": HEADS, "num_kv_heads": job["kv_heads"], "head_dim": HEAD_DIM}
        return {"hardware": calibrate(mesh_of(False, 1), **heads, host_size=job["per_host"]).hardware.to_dict()}
    scenario = Scenario(**job["scenario"])
    return measure_peer(scenario, job) if "peer" in job else measure(scenario, job)


def measure(scenario: Scenario, job: dict[str, Any]) -> dict[str, Any]:
    """Times of every variant: the step, and its kernels alone."""
    hardware = None if job["hardware"] is None else Hardware.from_dict(job["hardware"])
    whole = draw(scenario)
    calls: dict[str, Call] = {}
    outputs: dict[str, Results] = {}
    for variant in (Variant(**fields) for fields in job["variants"]):
        plan, mesh = make_plan(scenario, variant, hardware), mesh_of(variant.two_level, job["per_host"])
        *qkv, grad = (plan.shard(x, job["rank"], dim=2) for x in whole)
        local = plan.local(mesh, "cpu")
        step, compute = step_call(qkv, grad, spanwise_attend(local)), compute_call(*qkv, local, mesh)
        outputs[variant.name] = step()
        compute()  # what is timed has run before
        calls |= {f"step {variant.name}": step, f"compute {variant.name}": compute}
    return {"times": timed(calls, job["repeats"]), "outputs": outputs, "threads": torch.get_num_threads()}


def measure_peer(scenario: Scenario, job: dict[str, Any]) -> dict[str, Any]:
    """Times of another package's call beside ours. What it raises ends this process, and the others with the hosts."""
    sys.path.append(job["site"])
    # Dense kernels at these lengths may take more memory than there is; an error is better than a killed neighbour.
    resource.setrlimit(resource.RLIMIT_DATA, (job["memory"], job["memory"]))
    try:
        peer = PEERS[job["peer"]](scenario, job["rank"])
    except Refused as error:
        return {"refused": str(error)}
    whole = draw(scenario)
    plan = make_plan(scenario, Variant(**job["variants"][0]), None)
    *qkv, grad = (plan.shard(x, job["rank"], dim=2) for x in whole)
    *theirs, their_grad = (x[:, :, peer.tokens].contiguous() for x in whole)
    del whole
    step = step_call(qkv, grad, spanwise_attend(plan.local(mesh_of(False, 1), "cpu")))
    call = step_call(theirs, their_grad, peer.attend)
    step()
    outputs = call()
    return {"times": timed({"needed": step, "peer": call}, job["repeats"]), "outputs": outputs, "tokens": peer.tokens}


def spanwise_attend(local: RankPlan) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: spanwise.context_parallel_attention(q, k, v, local, kernel="sdpa")


def step_call(qkv: list[torch.Tensor], grad: torch.Tensor, attend: Callable[..., torch.Tensor]) -> Call:
    """Forward and backward of an attention call; returns out, dq, dk, dv."""

    def call() -> Results:
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return call


def compute_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan, mesh: DeviceMesh) -> Call:
    """Forward and backward of the kernels and merges of a step whose queries and K/V are already there."""
    if local.trade is not None:
        q, k, v = ulysses.to_heads(q, k, v, local.trade, inner_group(mesh), "measured", kv_trade=local.kv_trade)
    kvs = kv_chunks(k, v, local.chunks["default"], local, mesh, "default")
    inputs = [q, *(x.detach() for kv in kvs for x in (kv.k, kv.v))]
    chunks, kernel, options = local.chunks["default"], KERNELS["sdpa"], AttentionOptions()
    grad = torch.randn(q.shape[:3] + v.shape[3:])

    def call() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        there = map(ChunkKV, leaves[1::2], leaves[2::2])
        out, *_ = merged(kernel, leaves[0], there, chunks, local.query_tokens, options, max_logit=False)
        torch.autograd.grad(out, leaves, grad)

    return call


if __name__ == "__main__":
    serve(answer)

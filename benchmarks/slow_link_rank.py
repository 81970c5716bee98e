"""One rank of `slow_link.py`: the timed calls, on its host.

Reads jobs as JSON, one a line, from standard input and writes what it measured to the file that the job names. Times
are readings of the monotonic clock, which all processes of one machine share, so that the caller can take a step from
the first start to the last end.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from slow_link_cases import HEAD_DIM, HEADS, Scenario, Variant, draw, make_plan
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
Tensors = tuple[torch.Tensor, ...]


def main() -> None:
    say("ready")
    meshes: dict[bool, DeviceMesh] = {}  # whether it has two axes, hosts and the ranks of a host
    for line in sys.stdin:
        job = json.loads(line)
        torch.set_num_threads(job["threads"])
        if not meshes:
            num_ranks, per_host = job["num_ranks"], job["per_host"]
            store = dist.FileStore(job["store"], num_ranks)
            dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=num_ranks)
            meshes[False] = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))
            if per_host > 1:
                axes = ("cp_outer", "cp_inner")
                meshes[True] = init_device_mesh("cpu", (num_ranks // per_host, per_host), mesh_dim_names=axes)
        torch.save(answer(job, meshes), job["out"])
        say("done")
    if meshes:
        dist.destroy_process_group()


def answer(job: dict[str, Any], meshes: dict[bool, DeviceMesh]) -> dict[str, Any]:
    if "calibrate" in job:
        # All hosts have the machine's name: how many processes a host has must be said.
        heads = dict(num_q_heads=HEADS, num_kv_heads=job["kv_heads"], head_dim=HEAD_DIM)
        return {"hardware": calibrate(meshes[False], **heads, host_size=job["per_host"]).hardware.to_dict()}
    scenario = Scenario(**job["scenario"])
    return measure_peer(scenario, meshes[False], job) if "peer" in job else measure(scenario, meshes, job)


def say(event: str, **more: str) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def measure(scenario: Scenario, meshes: dict[bool, DeviceMesh], job: dict[str, Any]) -> dict[str, Any]:
    """Times and wire bytes of every variant: the step, its kernels alone, its exchange alone."""
    rank = job["rank"]
    variants = [Variant(**fields) for fields in job["variants"]]
    hardware = None if job["hardware"] is None else Hardware.from_dict(job["hardware"])
    plans = {variant.name: make_plan(scenario, variant, hardware) for variant in variants}
    layouts = {plan.layout.digest() for plan in plans.values() if plan.inner == 1}
    if len(layouts) > 1:
        raise ValueError(f"the variants of {scenario.name!r} have {len(layouts)} layouts; their steps do not compare")
    whole = draw(scenario)
    calls: dict[str, Call] = {}
    wire: dict[str, dict[str, list[int]]] = {}
    outputs: dict[str, Tensors] = {}
    for variant in variants:
        plan, mesh = plans[variant.name], meshes[variant.two_level]
        q, k, v, grad = (plan.shard(x, rank, dim=2) for x in whole)
        local = plan.local(mesh, "cpu")
        step = step_call(q, k, v, grad, local, mesh)
        outputs[variant.name] = step()
        exchange, wire[variant.name] = exchange_call(q, k, v, local, mesh)
        compute = compute_call(q, k, v, local, mesh)
        compute()  # as the others: what is timed has run before
        calls[f"step {variant.name}"] = step
        calls[f"compute {variant.name}"] = compute
        calls[f"exchange {variant.name}"] = exchange
        say_once(rank, f"{variant.name}: ran once")
    times = timed(calls, job["repeats"], rank)
    return {"times": times, "wire": wire, "outputs": outputs, "threads": torch.get_num_threads()}


def measure_peer(scenario: Scenario, mesh: DeviceMesh, job: dict[str, Any]) -> dict[str, Any]:
    """Times and wire bytes of another package's attention call, beside one variant of ours.

    Whatever the call raises ends this process: ranks that it leaves waiting end with the hosts.
    """
    rank = job["rank"]
    sys.path.append(job["site"])
    # Dense kernels at these lengths may take more memory than there is; an error is better than a killed neighbour.
    resource.setrlimit(resource.RLIMIT_DATA, (job["memory"], job["memory"]))
    try:
        peer = PEERS[job["peer"]](scenario, rank)
    except Refused as error:
        return {"refused": str(error)}
    whole = draw(scenario)
    variant = Variant(**job["variants"][0])
    plan = make_plan(scenario, variant, None)
    q, k, v, grad = (plan.shard(x, rank, dim=2) for x in whole)
    step = step_call(q, k, v, grad, plan.local(mesh, "cpu"), mesh)
    peer_q, peer_k, peer_v, peer_grad = (x[:, :, peer.tokens].contiguous() for x in whole)
    del whole

    def call() -> Tensors:
        leaf_q, leaf_k, leaf_v = leaves = [x.detach().requires_grad_() for x in (peer_q, peer_k, peer_v)]
        out = peer.attend(leaf_q, leaf_k, leaf_v)
        return out.detach(), *torch.autograd.grad(out, leaves, peer_grad)

    step()
    before = counters_at_rest()
    outputs = call()
    wire = (counters_at_rest() - before).tolist()
    say_once(rank, f"{job['peer']}: ran once")
    times = timed({variant.name: step, "peer": call}, job["repeats"], rank)
    return {"times": times, "wire": wire, "outputs": outputs, "tokens": peer.tokens}


def step_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, local: RankPlan, mesh: DeviceMesh
) -> Call:
    """Forward and backward of the public call; returns out, dq, dk, dv."""

    def call() -> Tensors:
        leaf_q, leaf_k, leaf_v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = spanwise.context_parallel_attention(leaf_q, leaf_k, leaf_v, local, mesh, kernel="sdpa")
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return call


def exchanged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan, mesh: DeviceMesh
) -> tuple[torch.Tensor, Iterator[ChunkKV]]:
    """The queries that a rank computes and the K/V of every chunk: the very exchange that a step runs."""
    if local.trade is not None:
        q, k, v = ulysses.to_heads(q, k, v, local.trade, inner_group(mesh), "measured", kv_trade=local.kv_trade)
    return q, kv_chunks(k, v, local.chunks["default"], local, mesh, "default")


def compute_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan, mesh: DeviceMesh) -> Call:
    """Forward and backward of the kernels and merges of a step whose queries and K/V are already there."""
    q, kvs = exchanged(q, k, v, local, mesh)
    inputs = [q, *(x.detach() for kv in kvs for x in (kv.k, kv.v))]
    chunks, kernel, options = local.chunks["default"], KERNELS["sdpa"], AttentionOptions()
    grad = torch.randn(q.shape[:3] + v.shape[3:])

    def call() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        there = map(ChunkKV, leaves[1::2], leaves[2::2])
        out, *_ = merged(kernel, leaves[0], there, chunks, local.query_tokens, options, max_logit=False)
        torch.autograd.grad(out, leaves, grad)

    return call


class _NoKernel(torch.autograd.Function):
    """Stands where a step computes: keeps its inputs for the backward as a kernel does; what comes out was given."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, grads: Tensors, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.grads = grads
        return result.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018 (kvs that were not kept are fetched again)
        return None, None, *ctx.grads


def exchange_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan, mesh: DeviceMesh
) -> tuple[Call, dict[str, list[int]]]:
    """The exchange of a step without its kernels, forward and backward, and the bytes [received, sent] of each."""
    made: dict[Any, torch.Tensor] = {}  # gradients and results, at the first call

    def ones(name: Any, like: torch.Tensor) -> torch.Tensor:
        if name not in made:
            made[name] = torch.ones_like(like)
        return made[name]

    def forward() -> tuple[list[torch.Tensor], torch.Tensor | None]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        computed, kvs = exchanged(leaves[0], leaves[1], leaves[2], local, mesh)
        alone = len(local.chunks["default"]) == 1
        parts: list[torch.Tensor] = []
        for kv in kvs:
            i = kv.index

            def attend(k: torch.Tensor, v: torch.Tensor, i: int = i) -> Tensors:
                grads = ones((i, "k"), k), ones((i, "v"), v)
                return (_NoKernel.apply(torch.zeros(()), grads, k, v),)

            if i >= 0 or (alone and local.trade is not None):  # else they are the rank's own
                parts += kv.attended(attend)
            del kv
        if local.trade is None:
            return leaves[1:], torch.stack(parts).sum() if parts else None
        out = ones("out", computed)  # the head dims of K and V are the same here
        grads = ones("q", computed), *(torch.zeros(()) for _ in parts)
        out = _NoKernel.apply(out, grads, computed, *parts)
        return leaves, ulysses.to_tokens(out, local.trade, inner_group(mesh), "measured")

    def backward(leaves: list[torch.Tensor], result: torch.Tensor | None) -> None:
        if result is not None:
            torch.autograd.grad(result, leaves, ones("grad", result))

    marks = [counters_at_rest()]
    leaves, result = forward()
    marks.append(counters_at_rest())
    backward(leaves, result)
    marks.append(counters_at_rest())
    sums = {"forward": (marks[1] - marks[0]).tolist(), "backward": (marks[2] - marks[1]).tolist()}
    return lambda: backward(*forward()), sums


def timed(calls: dict[str, Call], repeats: int, rank: int) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of every call, `repeats` rounds over all of them, from a common start."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names = list(calls)
    gc.collect()
    gc.disable()
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin = time.monotonic()
            calls[name]()
            end = time.monotonic()
            times[name].append((begin, end))
        gc.collect()
        say_once(rank, f"round {repeat + 1} of {repeats}")
    gc.enable()
    return times


def counters_at_rest() -> np.ndarray:
    """`counters` between what the ranks did before and what they do next; a few small messages of its own."""
    dist.barrier()
    read = counters()
    dist.barrier()  # the first to leave a barrier sends while others have not read yet
    return read


def counters() -> np.ndarray:
    """Bytes received and sent by the host's interface so far: int64 ``[2]``, frames with all their headers."""
    with open("/proc/self/net/dev") as file:  # of this network namespace, wherever /sys is mounted
        fields = next(line for line in file if line.strip().startswith(os.environ["GLOO_SOCKET_IFNAME"])).split()
    return np.array([int(fields[1]), int(fields[9])])


def say_once(rank: int, text: str) -> None:
    if rank == 0:
        say("progress", text=text)


if __name__ == "__main__":
    main()

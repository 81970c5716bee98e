"""One rank of `slow_link.py`: the timed calls, on one host.

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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from slow_link_cases import HEAD_DIM, HEADS, Scenario, Variant, draw, make_plan
from slow_link_peers import PEERS, Refused
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise import kernels
from spanwise.calibrate import calibrate
from spanwise.cost import Hardware
from spanwise.kernels.merge import merge
from spanwise.kv_pieces import kv_pieces
from spanwise.rank_plan import RankPlan

Call = Callable[[], Any]


def main() -> None:
    say("ready")
    mesh: DeviceMesh | None = None
    for line in sys.stdin:
        job = json.loads(line)
        torch.set_num_threads(job["threads"])
        if mesh is None:
            store = dist.FileStore(job["store"], job["num_ranks"])
            dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["num_ranks"])
            mesh = init_device_mesh("cpu", (job["num_ranks"],), mesh_dim_names=("cp",))
        torch.save(answer(job, mesh), job["out"])
        say("done")
    if mesh is not None:
        dist.destroy_process_group()


def answer(job: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    if "calibrate" in job:
        # All hosts have the machine's name: one process a host has to be said.
        hardware = calibrate(mesh, num_q_heads=HEADS, head_dim=HEAD_DIM, host_size=1)
        return {"hardware": hardware.to_dict()}
    scenario = Scenario(**job["scenario"])
    return measure_peer(scenario, mesh, job) if "peer" in job else measure(scenario, mesh, job)


def say(event: str, **more: str) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def measure(scenario: Scenario, mesh: DeviceMesh, job: dict[str, Any]) -> dict[str, Any]:
    """Times and wire bytes of every variant: the step, its kernels alone, its exchange alone."""
    rank = job["rank"]
    variants = [Variant(**fields) for fields in job["variants"]]
    hardware = None if job["hardware"] is None else Hardware.from_dict(job["hardware"])
    plans = {variant.name: make_plan(scenario, variant, hardware) for variant in variants}
    layouts = {plan.layout.digest() for plan in plans.values()}
    if len(layouts) > 1:
        raise ValueError(f"the variants of {scenario.name!r} have {len(layouts)} layouts; their steps do not compare")
    q, k, v, grad = (next(iter(plans.values())).shard(x, rank, dim=2) for x in draw(scenario))
    calls: dict[str, Call] = {}
    wire: dict[str, dict[str, list[int]]] = {}
    outputs: dict[str, tuple[torch.Tensor, ...]] = {}
    for variant in variants:
        local = plans[variant.name].local(mesh, "cpu")
        step = step_call(q, k, v, grad, local, mesh)
        outputs[variant.name] = step()
        exchange, wire[variant.name] = exchange_call(k, v, local, mesh)
        calls[f"step {variant.name}"] = step
        calls[f"compute {variant.name}"] = compute_call(q, k, v, grad, local, mesh)
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

    def call() -> tuple[torch.Tensor, ...]:
        leaf_q, leaf_k, leaf_v = leaves = [x.detach().requires_grad_() for x in (peer_q, peer_k, peer_v)]
        out = peer.attend(leaf_q, leaf_k, leaf_v)
        return out.detach(), *torch.autograd.grad(out, leaves, peer_grad)

    step()
    dist.barrier()
    before = counters()
    outputs = call()
    dist.barrier()
    wire = (counters() - before).tolist()
    say_once(rank, f"{job['peer']}: ran once")
    times = timed({variant.name: step, "peer": call}, job["repeats"], rank)
    return {"times": times, "wire": wire, "outputs": outputs, "tokens": peer.tokens}


def step_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, local: RankPlan, mesh: DeviceMesh
) -> Call:
    """Forward and backward of the public call; returns out, dq, dk, dv."""

    def call() -> tuple[torch.Tensor, ...]:
        leaf_q, leaf_k, leaf_v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = spanwise.context_parallel_attention(leaf_q, leaf_k, leaf_v, local, mesh, kernel="sdpa")
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return call


def exchanged(k: torch.Tensor, v: torch.Tensor, local: RankPlan, mesh: DeviceMesh) -> list[torch.Tensor]:
    """K and V of every stage, own tokens first: the very exchange that a step runs, with nothing computed between."""
    pieces = kv_pieces(k, v, local.stages["default"], local, mesh, "default")
    return [x for piece in pieces for x in (piece.k, piece.v)]


def compute_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, local: RankPlan, mesh: DeviceMesh
) -> Call:
    """Forward and backward of the kernels and merges of a step whose K/V pieces are already there."""
    pieces = [x.detach() for x in exchanged(k, v, local, mesh)]
    stages = local.stages["default"]

    def call() -> None:
        leaves = [x.detach().requires_grad_() for x in (q, *pieces)]
        parts = [
            kernels.attend("sdpa", leaves[0], k_piece, v_piece, stage, local.tokens, scale=scale)
            for k_piece, v_piece, stage in zip(leaves[1::2], leaves[2::2], stages, strict=True)
        ]
        out, _ = merge(parts)
        torch.autograd.grad(out, leaves, grad)

    scale = q.shape[-1] ** -0.5
    return call


def exchange_call(
    k: torch.Tensor, v: torch.Tensor, local: RankPlan, mesh: DeviceMesh
) -> tuple[Call, dict[str, list[int]]]:
    """The exchange of a step without its kernels, forward and backward, and the bytes [received, sent] of each."""
    grads: list[torch.Tensor] = []

    def forward() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [x.detach().requires_grad_() for x in (k, v)]
        return leaves, exchanged(leaves[0], leaves[1], local, mesh)[2:]

    def call() -> None:
        leaves, pieces = forward()
        if pieces:
            torch.autograd.grad(pieces, leaves, grads)

    dist.barrier()
    marks = [counters()]
    leaves, pieces = forward()
    dist.barrier()
    marks.append(counters())
    grads += [torch.ones_like(x) for x in pieces]
    if pieces:
        torch.autograd.grad(pieces, leaves, grads)
    dist.barrier()
    marks.append(counters())
    return call, {"forward": (marks[1] - marks[0]).tolist(), "backward": (marks[2] - marks[1]).tolist()}


def timed(calls: dict[str, Call], repeats: int, rank: int) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of every call, `repeats` rounds over all of them after one that warms up, from a common start."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names = list(calls)
    gc.collect()
    gc.disable()
    for repeat in range(repeats + 1):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin = time.monotonic()
            calls[name]()
            end = time.monotonic()
            if repeat:
                times[name].append((begin, end))
        gc.collect()
        say_once(rank, f"round {repeat} of {repeats}")
    gc.enable()
    return times


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

"""Attention over a slow link: needed exchanges against an all-gather, a ring, Ulysses, and other packages.

    sudo python -m benchmarks.slow_link --out benchmarks/results/slow-link-cpu.json
    sudo python -m benchmarks.slow_link --exchanges --seeds 0 --repeats 3 --out …    # ring, Ulysses
    sudo python -m benchmarks.slow_link --peers SITE                                 # other packages beside it

Hosts are network namespaces (`hosts`) of one process each. On one mask it times, in turns within one run, forward +
backward of `context_parallel_attention` by each way to bring K/V, and its kernels alone, on all hosts at once, K/V
already there. With `--exchanges` it compares needed, ring (one shard after the other, fetched again in the backward)
and Ulysses, 8 query heads and 2 of K/V; and on two hosts of two processes Ulysses inside the hosts with needed or a
ring between them. "reached" is the step of the first way over that of another; "step_ratio" is `plan.predict()` over
the step, from figures that were calibrated on these hosts on other shapes. Outputs and gradients are compared with
float64 attention on one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from benchmarks.hosts import check, machine, run, spans, timed
from benchmarks.plan import document_offsets
from benchmarks.publish import write
from benchmarks.slow_link_peers import INSTALL, PEERS, Refused
from spanwise import Hardware, SpanMask
from spanwise.attention import ulysses
from spanwise.attention.attention import merged
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.kv import ChunkKV, kv_chunks
from spanwise.attention.rank_plan import RankPlan, inner_group
from spanwise.calibrate.measure import measure as calibrate

HEADS, HEAD_DIM = 8, 64
RESULTS = ("out", "dq", "dk", "dv")
Results = tuple[torch.Tensor, ...]
PEER_TIMEOUT = 900.0  # seconds
# Of the largest entry of each result: float32 sums over thousands of keys, as one device has them too.
TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One mask over one slow network.

    Attributes:
        kind: "documents" (causal, lengths log-normal, median 1,024, sigma 1), "window" or "causal".
        rate: bits/s of each link.
        seed: of documents and data.
        window: keys to the left, of kind "window".
        per_host: ranks of a host.
    """

    name: str
    kind: str
    seq_len: int
    num_hosts: int
    rate: float
    balancer: str = "local"
    seed: int = 0
    window: int | None = None
    kv_heads: int = HEADS
    per_host: int = 1

    def offsets(self) -> np.ndarray:
        """Document offsets ``[num_docs + 1]``; one document unless the mask has several."""
        if self.kind == "documents":
            return document_offsets(self.seq_len, self.seed, median=1024)
        return np.array([0, self.seq_len])

    def mask(self) -> SpanMask:
        return SpanMask.documents(self.offsets(), window=None if self.window is None else (self.window, 0))

    def draw(self) -> Results:
        """q, k, v and the cotangent of the output of the whole sequence, float32 ``[1, heads, seq_len, head_dim]``."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = HEADS, self.kv_heads, self.kv_heads, HEADS
        return tuple(torch.randn((1, n, self.seq_len, HEAD_DIM), generator=generator) for n in heads)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to bring keys to queries, with the options of `make_plan`; `two_level`: Ulysses inside a host."""

    name: str
    exchange: str
    stages: int | None = None
    keep_kv: bool | None = None
    two_level: bool = False


NEEDED, GATHER = Variant("needed", "needed", 1), Variant("all_gather", "all_gather")
RING, ULYSSES = Variant("ring", "ring", keep_kv=False), Variant("ulysses", "ulysses")
TWO_LEVELS = [
    Variant("ulysses, needed", "needed", 1, two_level=True),
    Variant("ulysses, ring", "ring", keep_kv=False, two_level=True),
]


def make_plan(scenario: Scenario, variant: Variant, hardware: Hardware | None) -> spanwise.Plan:
    """The plan of one variant; the layout is the same for all of a scenario that do not trade heads for tokens."""
    hosts, inside = scenario.num_hosts, scenario.per_host
    return spanwise.make_plan(
        scenario.mask(), (hosts, inside) if variant.two_level else hosts * inside, balancer=scenario.balancer,
        exchange=variant.exchange, num_q_heads=HEADS, num_kv_heads=scenario.kv_heads, head_dim=HEAD_DIM,
        dtype=torch.float32, stages=variant.stages, keep_kv=variant.keep_kv, hardware=hardware,
        cu_seqlens=scenario.offsets(),
    )  # fmt: skip


@functools.cache
def reference(scenario: Scenario, rows: int = 512) -> Results:
    """out, dq, dk, dv of the whole sequence in float64 on one device: dense attention of a few rows at a time."""
    q, k, v, grad = (x.double() for x in scenario.draw())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask, outs = scenario.mask(), []
    start, end = (torch.from_numpy(x[0, 0].copy()) for x in (mask.start, mask.end))
    for part in torch.arange(scenario.seq_len).split(rows):
        low, high = int(start[part].min()), int(end[part].max())
        at = torch.arange(low, high)
        visible = (at >= start[part, None]) & (at < end[part, None])
        keys, values = (x[:, :, low:high].repeat_interleave(HEADS // scenario.kv_heads, dim=1) for x in (k, v))
        scores = (q[:, :, part] @ keys.mT / math.sqrt(HEAD_DIM)).masked_fill(~visible, -math.inf)
        out = torch.softmax(scores, -1) @ values
        out.backward(grad[:, :, part])
        outs.append(out.detach())
    return torch.cat(outs, dim=2), *(x.grad for x in leaves)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Of one rank: its figures of the hosts, or times and results of each variant or of another package."""
    if "calibrate" in job:  # all hosts have the machine's name, so it is said how many ranks a host has
        heads = {"num_q_heads": HEADS, "num_kv_heads": job["calibrate"], "head_dim": HEAD_DIM}
        return calibrate(_mesh(False, 1), **heads, host_size=job["per_host"]).hardware.to_dict()
    scenario, peer = Scenario(**job["scenario"]), None
    hardware = Hardware.from_dict(job["hardware"]) if job["hardware"] else None
    if "peer" in job:
        sys.path.append(job["site"])
        # Dense kernels at these lengths may take more memory than there is; an error is better than a killed neighbour.
        resource.setrlimit(resource.RLIMIT_DATA, (job["memory"], job["memory"]))
        try:
            peer = PEERS[job["peer"]](torch.from_numpy(scenario.offsets()), dist.get_world_size(), job["rank"])
        except Refused as error:
            return {"refused": str(error)}
    whole = scenario.draw()
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, Any] = {"outputs": {}, "threads": torch.get_num_threads()}
    for variant in (Variant(**fields) for fields in job["variants"]):
        plan, mesh = make_plan(scenario, variant, hardware), _mesh(variant.two_level, job["per_host"])
        *qkv, grad = (plan.shard(x, job["rank"], dim=2) for x in whole)
        local = plan.local(mesh, "cpu")

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan = local) -> torch.Tensor:
            return spanwise.context_parallel_attention(q, k, v, local, kernel="sdpa")

        calls[f"step {variant.name}"] = _step(qkv, grad, attend)
        if peer is None:
            calls[f"compute {variant.name}"] = _compute(*qkv, local, mesh)
    if peer is not None:
        found["tokens"], theirs = peer
        *qkv, grad = (x[:, :, found["tokens"]].contiguous() for x in whole)
        calls["step peer"] = _step(qkv, grad, theirs)
    del whole
    for name, call in calls.items():  # what is timed has run before
        found["outputs"][name] = call()
    return found | {"times": timed(calls, job["repeats"])}


def _mesh(two_level: bool, per_host: int) -> DeviceMesh:
    ranks = dist.get_world_size()
    if not two_level:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    return init_device_mesh("cpu", (ranks // per_host, per_host), mesh_dim_names=("cp_outer", "cp_inner"))


def _step(qkv: list[torch.Tensor], grad: torch.Tensor, attend: Callable[..., torch.Tensor]) -> Callable[[], Results]:
    """Forward and backward of an attention call; returns out, dq, dk, dv."""

    def call() -> Results:
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return call


def _compute(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan, mesh: DeviceMesh
) -> Callable[[], None]:
    """Forward and backward of the kernels and merges of a step whose queries and K/V are already there."""
    if local.trade is not None:
        q, k, v = ulysses.to_heads(q, k, v, local.trade, inner_group(mesh), "measured", kv_trade=local.kv_trade)
    kvs = kv_chunks(k, v, local.chunks["default"], local, mesh, "default")
    inputs = [q, *(x.detach() for kv in kvs for x in (kv.k, kv.v))]
    chunks, options = local.chunks["default"], AttentionOptions()
    grad = torch.randn(q.shape[:3] + v.shape[3:])

    def call() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        there = map(ChunkKV, leaves[1::2], leaves[2::2])
        out, *_ = merged(KERNELS["sdpa"], leaves[0], there, chunks, local.query_tokens, options, max_logit=False)
        torch.autograd.grad(out, leaves, grad)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s that each host sends, and receives")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the document masks")
    parser.add_argument("--exchanges", action="store_true", help="ring, Ulysses and two levels beside needed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", type=Path, metavar="SITE", help=f"folder with other packages, made by: {INSTALL}")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    check()
    result: dict[str, Any] = {"machine": machine(), "hardware": [], "rows": [], "peers": []}
    rate = args.rate * 1e6
    for hosts, inside in [*((n, 1) for n in args.hosts), *([(2, 2)] if args.exchanges else [])]:
        job = {"calibrate": 2 if args.exchanges else HEADS}
        hardware = Hardware.from_dict(run("benchmarks.slow_link", job, hosts, rate, per_host=inside)[0])
        result["hardware"].append(hardware.to_dict())
        variants = [GATHER, NEEDED, Variant("needed, 4 pieces", "needed", 4)]
        if args.exchanges:
            variants = [NEEDED, *([RING, ULYSSES] if inside == 1 else TWO_LEVELS)]
        for scenario in scenarios(hosts, inside, args):
            result["rows"].append(scenario_row(scenario, variants, args.repeats, hardware))
            write(result, args.out)
    for hosts in args.hosts if args.peers else ():
        # The causal mask is the one that every package takes; shorter, for on CPU all of them compute densely.
        documents = Scenario("documents, seed 0", "documents", args.seq_len // 2, hosts, rate)
        causal = Scenario("causal", "causal", args.seq_len // 4, hosts, rate, balancer="head_tail")
        for scenario in (documents, causal):
            result["peers"] += [peer_row(scenario, peer, args.peers) for peer in PEERS]
            write(result, args.out)
    wrong_ones = [row["scenario"]["name"] for row in result["rows"] if not row["correct"]]
    if wrong_ones:
        sys.exit(f"wrong results: {wrong_ones}")


def scenarios(num_hosts: int, per_host: int, args: argparse.Namespace) -> list[Scenario]:
    """Documents, and masks under which compute takes at least as long as the needed traffic (measured, two cores).

    At 200 Mbit/s that is a window of 2,048 keys, where `local` cuts contiguously, and causal attention under head_tail,
    where nearly all K/V are needed.
    """
    common: dict[str, Any] = {"num_hosts": num_hosts, "rate": args.rate * 1e6, "per_host": per_host}
    common |= {"kv_heads": 2} if args.exchanges else {}
    found = [Scenario(f"documents, seed {n}", "documents", args.seq_len, seed=n, **common) for n in args.seeds]
    if not args.exchanges:
        found.append(Scenario("window 2048", "window", args.seq_len, window=2047, **common))
        found.append(Scenario("causal", "causal", args.seq_len // 2, balancer="head_tail", **common))
    return found


def measured(
    scenario: Scenario, variants: list[Variant], repeats: int, hardware: Hardware | None, **more: Any
) -> list[dict[str, Any]]:
    """The answers of all ranks."""
    job = {
        "scenario": dataclasses.asdict(scenario), "variants": [dataclasses.asdict(variant) for variant in variants],
        "repeats": repeats, "hardware": hardware.to_dict() if hardware else None, **more,
    }  # fmt: skip
    timeout = PEER_TIMEOUT if more else 1800.0
    hosts = scenario.num_hosts, scenario.rate
    return run("benchmarks.slow_link", job, *hosts, per_host=scenario.per_host, timeout=timeout)


def scenario_row(scenario: Scenario, variants: list[Variant], repeats: int, hardware: Hardware) -> dict[str, Any]:
    """All variants of one scenario."""
    ranks = measured(scenario, variants, repeats, hardware)
    seconds = spans(ranks)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for variant in variants:
        plan, step = make_plan(scenario, variant, hardware), median[f"step {variant.name}"]
        tokens = [torch.from_numpy(plan.layout.indices(rank)) for rank in range(plan.num_ranks)]
        predicted = plan.predict()
        row = {
            **dataclasses.asdict(variant), "step_seconds": step, "compute_seconds": median[f"compute {variant.name}"],
            "reached": median[f"step {variants[0].name}"] / step,
            "relative_error": errors(tokens, [rank["outputs"][f"step {variant.name}"] for rank in ranks], scenario),
            "predicted": {**predicted, "step_ratio": predicted["total"] / step},
        }  # fmt: skip
        rows.append(row)
        print(
            f"{scenario.name}, {scenario.num_hosts} hosts of {scenario.per_host}, {variant.name}: step {step:.3f} s, "
            f"compute {row['compute_seconds']:.3f} s, {row['reached']:.2f} times as fast, "
            f"predicted / measured {row['predicted']['step_ratio']:.2f}",
            flush=True,
        )
    return {
        "scenario": dataclasses.asdict(scenario), "threads": ranks[0]["threads"],
        "documents": len(scenario.offsets()) - 1, "variants": rows, "seconds": seconds,
        "correct": not any(wrong(row["relative_error"]) for row in rows),
    }  # fmt: skip


def peer_row(scenario: Scenario, peer: str, site: Path) -> dict[str, Any]:
    """What another package's call takes, beside ours in the same run, on hosts of its own."""
    row: dict[str, Any] = {"scenario": dataclasses.asdict(scenario), "peer": peer}
    with open("/proc/meminfo") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    about = {"peer": peer, "site": str(site.resolve()), "memory": int(0.85 * free) // scenario.num_hosts}
    try:
        ranks = measured(scenario, [NEEDED], 3, None, **about)
    except (RuntimeError, TimeoutError) as error:
        row["failed"] = str(error)
    else:
        if "refused" in ranks[0]:
            row["refused"] = ranks[0]["refused"]
        else:
            seconds = spans(ranks)
            found = [rank["outputs"]["step peer"] for rank in ranks]
            error = errors([rank["tokens"] for rank in ranks], found, scenario)
            ratio = statistics.median(seconds["step peer"]) / statistics.median(seconds["step needed"])
            row |= {"ratio": ratio, "relative_error": error, "wrong": wrong(error), "seconds": seconds}
    shown = {key: str(row[key])[-200:] for key in ("ratio", "wrong", "refused", "failed") if key in row}
    print(f"{peer}, {scenario.name}, {scenario.num_hosts} hosts: {shown}", flush=True)
    return row


def errors(tokens: list[torch.Tensor], shards: list[Results], scenario: Scenario) -> dict[str, float]:
    """Largest difference of each result over its largest entry; `tokens` are the positions of each rank's rows."""
    expected, found = reference(dataclasses.replace(scenario, num_hosts=1, per_host=1)), {}
    for i, name in enumerate(RESULTS):
        pairs = zip(tokens, shards, strict=True)
        differences = [float((shard[i].double() - expected[i][:, :, at]).abs().max()) for at, shard in pairs]
        found[name] = max(differences) / float(expected[i].abs().max())
    return found


def wrong(error: dict[str, float]) -> list[str]:
    """Names of the results that are off; NaN is."""
    return [name for name, value in error.items() if not value <= TOLERANCE]


if __name__ == "__main__":
    main()

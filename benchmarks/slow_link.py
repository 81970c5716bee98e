"""Attention over a slow link: needed exchanges against an all-gather, a ring and Ulysses; latents against K and V.

    sudo python -m benchmarks.slow_link --out benchmarks/results/slow-link-cpu.json
    sudo python -m benchmarks.slow_link --exchanges --seeds 0 --repeats 3 --out …    # ring, Ulysses
    sudo python -m benchmarks.slow_link --latents --rate 50 --out …                  # multi-head latent attention

Hosts are network namespaces (`hosts`). On one mask it times, in turns within one run, forward +
backward of `context_parallel_attention` by each way to bring K/V, and its kernels alone, on all hosts at once, K/V
already there. With `--exchanges` it compares needed, ring (one shard after the other, fetched again in the backward)
and Ulysses, 8 query heads and 2 of K/V. "reached" is the step of the first way over that of another; "step_ratio" is
`plan.predict()` over the step, from figures that were calibrated on these hosts on other shapes. Outputs and gradients
are compared with float64 attention on one device.

With `--latents`, K and V of 8 heads come from 144 numbers a token, on two hosts: expanded before the exchange, or after
it (``expand=``). All gradients are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
from benchmarks.publish import publish, write
from spanwise import Hardware, SpanMask
from spanwise.attention import ulysses
from spanwise.attention.attention import merged
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.kv import ChunkKV, kv_chunks
from spanwise.attention.rank_plan import RankPlan
from spanwise.calibrate.measure import measure as calibrate

HEADS, HEAD_DIM = 8, 64
Results = tuple[torch.Tensor, ...]
# Of the largest entry of each result: float32 sums over thousands of keys, as one device has them too.
TOLERANCE = 2e-5
# Dims of keys without and with a rotary part, of values and of latents.
NOPE, ROPE, V_DIM, LATENT = 64, 16, 64, 128
LATENT_MASKS = {"causal": SpanMask.causal(4096), "documents": SpanMask.documents([0, 500, 2300, 2900, 4096])}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One mask over one slow network.

    Attributes:
        kind: "documents" (causal, lengths log-normal, median 1,024, sigma 1), "window" or "causal".
        rate: bits/s of each link.
        seed: of documents and data.
        window: keys to the left, of kind "window".
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

    @functools.cached_property
    def reference(self) -> Results:
        """out, dq, dk, dv of the whole sequence in float64 on one device."""
        *leaves, grad = (x.double().requires_grad_() for x in self.draw())
        local = spanwise.make_plan(self.mask(), 1).local(None)
        out = spanwise.context_parallel_attention(*leaves, local, None, kernel="sdpa")
        return out.detach(), *torch.autograd.grad(out, leaves, grad)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to bring keys to queries, with the options of `make_plan`."""

    name: str
    exchange: str
    stages: int | None = None
    keep_kv: bool | None = None


NEEDED = Variant("needed", "needed", 1)
GATHERS = [Variant("all_gather", "all_gather"), NEEDED, Variant("needed, 4 pieces", "needed", 4)]
OTHERS = [NEEDED, Variant("ring", "ring", keep_kv=False), Variant("ulysses", "ulysses")]


def make_plan(scenario: Scenario, variant: Variant, hardware: Hardware) -> spanwise.Plan:
    """The plan of one variant; the layout is the same for all of a scenario that do not trade heads for tokens."""
    return spanwise.make_plan(
        scenario.mask(), scenario.num_hosts, balancer=scenario.balancer, exchange=variant.exchange,
        stages=variant.stages, keep_kv=variant.keep_kv, num_q_heads=HEADS, num_kv_heads=scenario.kv_heads,
        head_dim=HEAD_DIM, dtype=torch.float32, hardware=hardware, cu_seqlens=scenario.offsets(),
    )  # fmt: skip


def rates(job: dict[str, Any]) -> dict[str, Any]:
    """Figures of these hosts. All have the machine's name, so it is given that a host has one rank."""
    heads = {"num_q_heads": HEADS, "num_kv_heads": job["kv_heads"], "head_dim": HEAD_DIM}
    return calibrate(_mesh(), **heads, host_size=1).hardware.to_dict()


def variants(job: dict[str, Any]) -> dict[str, Any]:
    """Of one rank: times and results of each variant."""
    scenario, hardware = Scenario(**job["scenario"]), Hardware.from_dict(job["hardware"])
    whole = scenario.draw()
    calls: dict[str, Callable[[], Any]] = {}
    for variant in (Variant(**fields) for fields in job["variants"]):
        plan, mesh = make_plan(scenario, variant, hardware), _mesh()
        *qkv, grad = (plan.shard(x, job["rank"], dim=2) for x in whole)
        local = plan.local(mesh, "cpu")
        attend = functools.partial(spanwise.context_parallel_attention, plan=local, kernel="sdpa")
        calls[f"step {variant.name}"] = functools.partial(_step, attend, qkv, grad)
        calls[f"compute {variant.name}"] = _compute(*qkv, local, mesh)
    del whole
    outputs = {name: call() for name, call in calls.items()}  # what is timed has run before
    return {"outputs": outputs, "threads": torch.get_num_threads(), "times": timed(calls, job["repeats"])}


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def _step(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor) -> Results:
    """Forward and backward of an attention call; returns the output and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def _compute(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan, mesh: DeviceMesh
) -> Callable[[], None]:
    """Forward and backward of the kernels and merges of a step whose queries and K/V are already there."""
    if local.trade is not None:
        name = mesh.get_group(mesh.ndim - 1).group_name
        q, k, v = ulysses.to_heads(q, k, v, local.trade, name, "measured", kv_trade=local.kv_trade)
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


def latents(job: dict[str, Any]) -> dict[str, Any]:
    """Of one rank: times of both ways to bring latents to queries, and the largest difference of their results."""
    mesh = _mesh()
    plan = latent_plan(job["mask"], None, None)
    local = plan.local(mesh)
    torch.manual_seed(0)
    up = torch.nn.Linear(LATENT, HEADS * (NOPE + V_DIM), bias=False)
    whole = [torch.randn(1, heads, plan.seq_len, dim) for heads, dim in ((HEADS, NOPE + ROPE), (1, LATENT), (1, ROPE))]
    own = spanwise.shard(plan, mesh, whole, dim=2)
    grad = spanwise.shard(plan, mesh, torch.randn(1, HEADS, plan.seq_len, V_DIM), dim=2)

    def expand(latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = up(latents).squeeze(1).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = both.split([NOPE, V_DIM], dim=-1)
        return torch.cat([k, rotary.expand(-1, HEADS, -1, -1)], dim=-1), v

    def keys(q: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, *expand(*shared), local)

    after = functools.partial(spanwise.context_parallel_attention, plan=local, expand=expand)
    calls = {name: functools.partial(_step, way, own, grad) for name, way in (("latents", after), ("keys", keys))}
    pairs = zip(calls["latents"](), calls["keys"](), strict=True)
    error = max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
    return {"times": timed(calls, job["repeats"]), "error": error}


def latent_plan(mask: str, hardware: Hardware | None, kv_row_dim: int | None) -> spanwise.Plan:
    return spanwise.make_plan(
        LATENT_MASKS[mask], 2, balancer="head_tail", exchange="needed", stages=2, hardware=hardware,
        kv_row_dim=kv_row_dim, dtype=torch.float32, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=NOPE + ROPE,
        v_head_dim=V_DIM,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s that each host sends, and receives")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the document masks")
    parser.add_argument("--exchanges", action="store_true", help="ring and Ulysses beside needed")
    parser.add_argument("--latents", action="store_true", help="latents against K and V, on two hosts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    check()
    result: dict[str, Any] = {"machine": machine(), "mbit_per_second": args.rate, "hardware": [], "rows": []}
    rate, kv_heads = args.rate * 1e6, 2 if args.exchanges else HEADS
    for hosts in [2] if args.latents else args.hosts:
        measured = run(rates, {"kv_heads": kv_heads}, hosts, rate)[0]
        hardware = Hardware.from_dict(measured)
        result["hardware"].append(measured)
        if args.latents:
            result["rows"] = [latent_row(mask, hardware, rate, args.repeats) for mask in LATENT_MASKS]
            continue
        for scenario in scenarios(args, {"num_hosts": hosts, "rate": rate, "kv_heads": kv_heads}):
            ways = OTHERS if args.exchanges else GATHERS
            result["rows"].append(scenario_row(scenario, ways, args.repeats, hardware))
            write(result, args.out)
    publish(result, args.out)
    if wrong := [row for row in result["rows"] if not row["error"] <= TOLERANCE]:
        sys.exit(f"wrong results: {wrong}")


def scenarios(args: argparse.Namespace, common: dict[str, Any]) -> list[Scenario]:
    """Documents, and masks under which compute takes at least as long as the needed traffic (measured, two cores).

    At 200 Mbit/s that is a window of 2,048 keys, where `local` cuts contiguously, and causal attention under head_tail,
    where nearly all K/V are needed.
    """
    found = [Scenario(f"documents, seed {n}", "documents", args.seq_len, seed=n, **common) for n in args.seeds]
    if not args.exchanges:
        found.append(Scenario("window 2048", "window", args.seq_len, window=2047, **common))
        found.append(Scenario("causal", "causal", args.seq_len // 2, balancer="head_tail", **common))
    return found


def scenario_row(scenario: Scenario, ways: list[Variant], repeats: int, hardware: Hardware) -> dict[str, Any]:
    """All variants of one scenario."""
    job = {
        "scenario": dataclasses.asdict(scenario), "variants": [dataclasses.asdict(variant) for variant in ways],
        "repeats": repeats, "hardware": hardware.to_dict(),
    }  # fmt: skip
    ranks = run(variants, job, scenario.num_hosts, scenario.rate)
    median = {name: statistics.median(seconds) for name, seconds in spans(ranks).items()}
    rows = []
    for variant in ways:
        plan, step = make_plan(scenario, variant, hardware), median[f"step {variant.name}"]
        predicted = plan.predict()
        row = {
            **dataclasses.asdict(variant), "step_seconds": step, "compute_seconds": median[f"compute {variant.name}"],
            "reached": median[f"step {ways[0].name}"] / step,
            "relative_error": errors(plan, [rank["outputs"][f"step {variant.name}"] for rank in ranks], scenario),
            "predicted": {**predicted, "step_ratio": predicted["total"] / step},
        }  # fmt: skip
        rows.append(row)
    return {
        "scenario": dataclasses.asdict(scenario), "threads": ranks[0]["threads"],
        "documents": len(scenario.offsets()) - 1, "variants": rows,
        "error": max(error for row in rows for error in row["relative_error"].values()),
    }  # fmt: skip


def errors(plan: spanwise.Plan, shards: list[Results], scenario: Scenario) -> dict[str, float]:
    """Largest difference of each result over its largest entry."""
    found = {}
    for name, whole, *results in zip(("out", "dq", "dk", "dv"), scenario.reference, *shards, strict=True):
        pairs = [(x.double(), plan.shard(whole, rank, dim=2)) for rank, x in enumerate(results)]
        found[name] = float(torch.stack([(x - exact).abs().max() for x, exact in pairs]).max() / whole.abs().max())
    return found


def latent_row(mask: str, hardware: Hardware, rate: float, repeats: int) -> dict[str, Any]:
    found = run(latents, {"mask": mask, "repeats": repeats}, 2, rate)
    row: dict[str, Any] = {"mask": mask, "error": max(rank["error"] for rank in found)}
    for name, dim in (("latents", LATENT + ROPE), ("keys", None)):
        plan = latent_plan(mask, hardware, dim)
        row[f"seconds_{name}"] = statistics.median(spans(found)[name])
        row[f"predicted_{name}"] = plan.predict()["total"]
        row[f"megabytes_{name}"] = float(plan.recv_bytes().max()) / 1e6
    row["ratio"] = row["seconds_keys"] / row["seconds_latents"]
    return row | {"predicted_ratio": row["predicted_keys"] / row["predicted_latents"]}


if __name__ == "__main__":
    main()

"""Attention over a slow link that sends latents, against one that sends K and V; Linux, root.

    sudo python -m benchmarks.latents --out benchmarks/results/latents-cpu.json

Two hosts (`hosts`) of one process each hold a sequence. Both ways compute the same: K and V of 8 heads from 144
numbers a token, attention, and all gradients. One expands before the exchange, the other after it (``expand=``). The
rates of the prediction are calibrated on these hosts, on other shapes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import spanwise
from benchmarks.hosts import check, machine, run, spans, timed
from benchmarks.publish import publish
from spanwise import Hardware, SpanMask
from spanwise.calibrate.measure import measure

HEADS, NOPE, ROPE, V_DIM, LATENT = 8, 64, 16, 64, 128
SHAPE = {"num_q_heads": HEADS, "num_kv_heads": HEADS, "head_dim": NOPE + ROPE, "v_head_dim": V_DIM}
MASKS = {
    "causal": SpanMask.causal(4096),
    "documents": SpanMask.documents([0, 500, 2300, 2900, 4096]),
}


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Of one rank: its figures of the hosts, or times of both ways and whether they agree."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    if "mask" not in job:
        return measure(mesh, num_q_heads=HEADS, head_dim=NOPE, host_size=1, largest=1 << 21).hardware.to_dict()
    plan = plan_of(job["mask"], None, None)
    local = plan.local(mesh)
    torch.manual_seed(0)
    up = torch.nn.Linear(LATENT, HEADS * (NOPE + V_DIM), bias=False)
    whole = [torch.randn(1, heads, plan.seq_len, dim) for heads, dim in ((HEADS, NOPE + ROPE), (1, LATENT), (1, ROPE))]
    own = [x.requires_grad_() for x in spanwise.shard(plan, mesh, whole, dim=2)]
    grad = spanwise.shard(plan, mesh, torch.randn(1, HEADS, plan.seq_len, V_DIM), dim=2)

    def expand(latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = up(latents).squeeze(1).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = both.split([NOPE, V_DIM], dim=-1)
        return torch.cat([k, rotary.expand(-1, HEADS, -1, -1)], dim=-1), v

    def step(before: bool) -> tuple[torch.Tensor, ...]:
        if before:
            out = spanwise.context_parallel_attention(own[0], *expand(*own[1:]), local)
        else:
            out = spanwise.context_parallel_attention(*own, local, expand=expand)
        return out.detach(), *torch.autograd.grad(out, own, grad)

    calls = {"latents": functools.partial(step, False), "keys": functools.partial(step, True)}
    error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(step(False), step(True), strict=True))
    return {"times": timed(calls, job["repeats"]), "error": error}


def plan_of(mask: str, hardware: Hardware | None, kv_row_dim: int | None) -> spanwise.Plan:
    return spanwise.make_plan(
        MASKS[mask], 2, balancer="head_tail", exchange="needed", stages=2, hardware=hardware, kv_row_dim=kv_row_dim,
        dtype=torch.float32, **SHAPE,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="Mbit/s that each host sends, and receives")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    check()
    on_hosts = functools.partial(run, "benchmarks.latents", num_hosts=2, rate=args.rate * 1e6)
    hardware, rows = Hardware.from_dict(on_hosts({})[0]), []
    for mask in MASKS:
        found = on_hosts({"mask": mask, "repeats": args.repeats})
        row: dict[str, Any] = {"mask": mask, "error": max(x["error"] for x in found)}
        for name, dim in (("latents", LATENT + ROPE), ("keys", None)):
            plan = plan_of(mask, hardware, dim)
            row[f"seconds_{name}"] = statistics.median(spans(found)[name])
            row[f"predicted_{name}"] = plan.predict()["total"]
            row[f"megabytes_{name}"] = float(plan.recv_bytes().max()) / 1e6
        row["ratio"] = row["seconds_keys"] / row["seconds_latents"]
        row["predicted_ratio"] = row["predicted_keys"] / row["predicted_latents"]
        rows.append(row)
    publish({"machine": machine(), "mbit_per_second": args.rate, "rows": rows}, args.out)


if __name__ == "__main__":
    main()

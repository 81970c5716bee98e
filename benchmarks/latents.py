"""Attention over a slow link that sends latents, against one that sends K and V; Linux, root.

    sudo python benchmarks/latents.py --out benchmarks/results/latents-cpu.json

Two hosts (`hosts.py`) of one process each hold a sequence. Both ways compute the same: K and V of 8 heads from 144
numbers a token, attention, and all gradients. One expands before the exchange, the other after it (``expand=``). The
rates of the prediction are calibrated on these hosts, on other shapes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from hosts import Hosts, machine, missing, run, serve, spans, timed
from torch.distributed.device_mesh import init_device_mesh

import spanwise
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
        return {
            "hardware": measure(mesh, num_q_heads=HEADS, head_dim=NOPE, host_size=1, largest=1 << 21).hardware.to_dict()
        }
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

    def latents() -> tuple[torch.Tensor, ...]:
        out = spanwise.context_parallel_attention(*own, local, expand=expand)
        return out.detach(), *torch.autograd.grad(out, own, grad)

    def keys() -> tuple[torch.Tensor, ...]:
        out = spanwise.context_parallel_attention(own[0], *expand(*own[1:]), local)
        return out.detach(), *torch.autograd.grad(out, own, grad)

    error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(latents(), keys(), strict=True))
    return {"times": timed({"latents": latents, "keys": keys}, job["repeats"]), "error": error}


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
    if lack := missing():
        parser.exit(2, f"{parser.prog}: {lack}\n")
    rows = []
    with Hosts(2, args.rate * 1e6, Path(__file__).name) as hosts:
        hardware = Hardware.from_dict(run(hosts, {})[0]["hardware"])
        for mask in MASKS:
            found = run(hosts, {"mask": mask, "repeats": args.repeats})
            seconds = {name: statistics.median(each) for name, each in spans([x["times"] for x in found]).items()}
            plans = {name: plan_of(mask, hardware, dim) for name, dim in (("latents", LATENT + ROPE), ("keys", None))}
            row: dict[str, Any] = {"mask": mask, "error": max(x["error"] for x in found)}
            for name, plan in plans.items():
                row |= {f"seconds_{name}": seconds[name], f"predicted_{name}": plan.predict()["total"]}
                row[f"megabytes_{name}"] = float(plan.recv_bytes().max()) / 1e6
            row["ratio"] = seconds["keys"] / seconds["latents"]
            row["predicted_ratio"] = row["predicted_keys"] / row["predicted_latents"]
            rows.append(row)
    publish({"machine": machine(), "mbit_per_second": args.rate, "rows": rows}, args.out)


if __name__ == "__main__":
    serve(answer) if not sys.stdin.isatty() and len(sys.argv) == 1 else main()

"""From what the ranks of `slow_link.py` measured to rows of its results, and their print."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import numpy as np
import torch
from slow_link_cases import HEADS, RESULTS, Results, Scenario, Variant, between_hosts, bytes_between, make_plan

from spanwise import Plan
from spanwise.hardware import Hardware

# Of the largest entry of each result: float32 sums over thousands of keys, as one device has them too.
TOLERANCE = 2e-5


def describe(scenario: Scenario) -> str:
    ranks = f" of {scenario.per_host} ranks" if scenario.per_host > 1 else ""
    return (
        f"{scenario.name}: {scenario.num_hosts} hosts{ranks}, {scenario.rate / 1e6:g} Mbit/s, "
        f"{scenario.seq_len:,} tokens, heads {HEADS}/{scenario.kv_heads}, balancer {scenario.balancer}"
    )


def step_seconds(times: list[dict[str, list[tuple[float, float]]]]) -> dict[str, list[float]]:
    """Seconds of each repeat, from the first rank's begin to the last one's end."""
    return {
        name: [
            max(end for _, end in repeat) - min(begin for begin, _ in repeat)
            for repeat in zip(*(rank[name] for rank in times), strict=True)
        ]
        for name in times[0]
    }


def scenario_row(
    scenario: Scenario,
    variants: list[Variant],
    ranks: list[dict[str, Any]],
    expected: Results,
    hardware: Hardware | None,
) -> dict[str, Any]:
    """All variants of one scenario; the first one is what the others are compared with.

    Args:
        ranks: what each rank measured.
        expected: out, dq, dk, dv of the whole sequence, float64.
        hardware: what the plans were made with and predictions come from.
    """
    plans = [make_plan(scenario, variant, hardware) for variant in variants]
    seconds = step_seconds([rank["times"] for rank in ranks])
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for variant, plan in zip(variants, plans, strict=True):
        step, compute, exchange = (median[f"{part} {variant.name}"] for part in ("step", "compute", "exchange"))
        wire = {
            part: np.array([rank["wire"][variant.name][part] for rank in ranks[:: scenario.per_host]])
            for part in ("forward", "backward")
        }
        tables = [between_hosts(table, scenario.per_host) for table in bytes_between(plan)]
        # A host receives a row of a table and sends a column.
        busiest = sum(float(max(table.sum(axis=1).max(), table.sum(axis=0).max())) for table in tables)
        row = {
            **dataclasses.asdict(variant),
            "pieces": plan.num_chunks(),
            "step_seconds": step,
            "compute_seconds": compute,
            "exchange_seconds": exchange,
            "exposed_seconds": step - compute,
            "exposed_share": (step - compute) / exchange,
            "compute_covers_exchange": compute >= exchange,
            "floor_seconds": busiest * 8 / scenario.rate,
            "planned_recv_bytes": tables[0].sum(axis=1).tolist(),
            "planned_send_bytes": tables[0].sum(axis=0).tolist(),
            "wire_recv_bytes": {part: counted[:, 0].tolist() for part, counted in wire.items()},
            "wire_send_bytes": {part: counted[:, 1].tolist() for part, counted in wire.items()},
            "relative_error": errors(
                [plan.layout.indices(rank) for rank in range(plan.num_ranks)],
                [rank["outputs"][variant.name] for rank in ranks],
                expected,
            ),
        }
        if hardware is not None:
            row["predicted"] = predicted(plan, row)
        rows.append(row)
    base = rows[0]
    for row in rows[1:]:
        compute = row["compute_seconds"]
        possible = (1 + base["exchange_seconds"] / compute) / (1 + row["exchange_seconds"] / compute)
        reached = base["step_seconds"] / row["step_seconds"]
        # Where removing the unneeded traffic gives nothing there is nothing to have a share of.
        share = (reached - 1) / (possible - 1) if possible > 1.01 else None
        row |= {"reached": reached, "possible": possible, "share": share}
    return {
        "scenario": dataclasses.asdict(scenario),
        "threads": ranks[0]["threads"],
        "balancer": plans[0].balancer,
        "imbalance": plans[0].imbalance(),
        "documents": len(scenario.offsets()) - 1,
        "plans_choice_of_pieces": None if hardware is None else _choice(scenario, hardware),
        "variants": rows,
        "seconds": seconds,
        "correct": not any(wrong(row["relative_error"]) for row in rows),
    }


def _choice(scenario: Scenario, hardware: Hardware) -> int:
    return make_plan(scenario, Variant("", "needed"), hardware).num_chunks()


def predicted(plan: Plan, row: dict[str, Any]) -> dict[str, float]:
    """Seconds that the plan predicts, and predicted over measured."""
    parts = plan.predict()
    compute = parts["compute_forward"] + parts["compute_backward"]
    exchange = parts["exchange_forward"] + parts["exchange_backward"]
    return {
        **parts,
        "step_ratio": parts["total"] / row["step_seconds"],
        "compute_ratio": compute / row["compute_seconds"],
        "exchange_ratio": exchange / row["exchange_seconds"],
    }


def peer_row(ranks: list[dict[str, Any]], expected: Results) -> dict[str, Any]:
    """What another package's call measured, beside ours in the same run."""
    if "refused" in ranks[0]:
        return {"refused": ranks[0]["refused"]}
    seconds = step_seconds([rank["times"] for rank in ranks])
    median = {name: statistics.median(values) for name, values in seconds.items()}
    error = errors([rank["tokens"].numpy() for rank in ranks], [rank["outputs"] for rank in ranks], expected)
    return {
        "step_seconds": median["peer"],
        "needed_step_seconds": median["needed"],
        "ratio": median["peer"] / median["needed"],
        "wire_recv_bytes": [rank["wire"][0] for rank in ranks],
        "relative_error": error,
        "wrong": wrong(error),
        "seconds": seconds,
    }


def errors(tokens: list[np.ndarray], shards: list[Results], expected: Results) -> dict[str, float]:
    """Largest difference of each result over its largest entry, all ranks together.

    Args:
        tokens: of each rank, the global positions of its rows.
    """
    return {
        name: max(
            float((shard[i].double() - expected[i][:, :, torch.from_numpy(at)]).abs().max())
            for at, shard in zip(tokens, shards, strict=True)
        )
        / float(expected[i].abs().max())
        for i, name in enumerate(RESULTS)
    }


def wrong(error: dict[str, float]) -> list[str]:
    """Names of the results that are off; NaN is."""
    return [name for name, value in error.items() if not value <= TOLERANCE]


def show(row: dict[str, Any]) -> None:
    first = row["variants"][0]
    print(f"  {row['threads']} threads a rank, imbalance {row['imbalance']:.3f}, seconds, millions of bytes")
    print(
        f"  {'':16}{'step':>8}{'compute':>9}{'exchange':>9}{'floor':>8}{'exposed':>9}{'planned':>9}{'wire':>8}"
        f"{'reached':>9}{'possible':>9}{'share':>7}{'predicted':>10}{'error':>9}"
    )
    for one in row["variants"]:
        gain = " " * 25
        if one is not first:
            share = "-" if one["share"] is None else f"{one['share']:.2f}"
            gain = f"{one['reached']:9.2f}{one['possible']:9.2f}{share:>7}"
        guess = f"{one['predicted']['step_ratio']:10.2f}" if "predicted" in one else " " * 10
        print(
            f"  {one['name']:16}{one['step_seconds']:8.3f}{one['compute_seconds']:9.3f}{one['exchange_seconds']:9.3f}"
            f"{one['floor_seconds']:8.3f}{one['exposed_share']:9.2f}{max(one['planned_recv_bytes']) / 1e6:9.2f}"
            f"{max(one['wire_recv_bytes']['forward']) / 1e6:8.2f}{gain}{guess}"
            f"{max(one['relative_error'].values()):9.1e}"
        )


def show_peer(row: dict[str, Any]) -> None:
    if "refused" in row:
        print(f"  refused: {row['refused']}")
    elif "failed" in row:
        print(f"  failed: {row['failed'].strip().splitlines()[-1]}")
    else:
        verdict = f"wrong {', '.join(row['wrong'])}" if row["wrong"] else "right"
        print(
            f"  step {row['step_seconds']:.3f} s, needed {row['needed_step_seconds']:.3f} s, {row['ratio']:.2f} times; "
            f"{verdict}, error {max(row['relative_error'].values()):.1e}; "
            f"received {max(row['wire_recv_bytes']) / 1e6:.1f} MB"
        )

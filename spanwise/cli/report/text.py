"""A plan's figures on a terminal: what was chosen and why, work and traffic of each rank, seconds, candidates."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spanwise.cli.report import terminal, units
from spanwise.cli.report.compare import Comparison
from spanwise.cli.report.figures import Figures, MaskFigures
from spanwise.planning.plan import Plan

#: Rows of a table of ranks; past it, ranks from the busiest to the idlest are sampled.
MOST_RANKS = 16
_BAR = 28


def show(result: Figures) -> None:
    """Print the summary."""
    console = terminal.console()
    for line in heading(result):
        console.print(line, highlight=False)
    if result.comparison:
        console.print()
        console.print(_comparison_table(result.comparison))
    for mask in result.masks:
        console.print()
        if mask.note:
            named = f"mask {mask.name!r}: " if len(result.masks) > 1 else ""
            console.print(f"{named}{mask.note}", highlight=False)
        console.print(_rank_table(result, mask))
    console.print()
    console.print(_seconds_table(result))
    if result.candidates:
        console.print()
        console.print(_candidate_table(result))
    console.print(f"\nfingerprint {result.plan.fingerprint}\n{result.command}", highlight=False)


def working(what: str) -> AbstractContextManager[Any]:
    """Shows on a terminal that ``what`` is under way."""
    return Console(stderr=True).status(what)


def wrote(path: str) -> None:
    terminal.console().print(f"wrote {path}", highlight=False)


def heading(result: Figures) -> list[str]:
    """What was planned, what was chosen, and why: lines that the HTML report opens with, too."""
    plan, source, lengths = result.plan, result.source, result.lengths
    documents = (
        f"{len(lengths):,} documents of {lengths.min():,} to {lengths.max():,} tokens, median {np.median(lengths):,.0f}"
        if len(lengths) > 1
        else "one document"
    )
    tokens = plan.layout.tokens_per_rank
    each = f"{tokens.min():,}" if tokens.min() == tokens.max() else f"{tokens.min():,} to {tokens.max():,}"
    return [
        f"{plan.seq_len:,} tokens, {documents}",
        f"from {source.describe()}",
        f"{plan.num_ranks} ranks with {each} tokens each, dealt out in blocks of {plan.block_size}",
        f"chosen: {chosen(plan)}",
        f"why: {plan.reason}",
        held(result),
        *([] if plan.inner == 1 else [traded(result)]),
    ]


def chosen(plan: Plan) -> str:
    """The plan's layout and exchange, in words."""
    pieces = max(plan.num_chunks(name) for name in plan.masks)
    return units.way(plan.balancer, plan.exchange, pieces, plan.inner)


def held(result: Figures) -> str:
    """What the exchanges hold in memory, in words."""
    most = max(int(mask.resident_bytes.max()) for mask in result.masks)
    kept = max(int(mask.saved_bytes.max()) for mask in result.masks)
    return (
        f"holds at most {units.num_bytes(most)} a rank for the exchange of a layer, beside the rank's own shards, and "
        f"keeps at most {units.num_bytes(kept)} of it for the backward"
    )


def traded(result: Figures) -> str:
    """What Ulysses does, in words."""
    plan = result.plan
    between = f", {plan.exchange} between {plan.num_groups} such groups" if plan.num_groups > 1 else ""
    return (
        f"{plan.inner} ranks trade heads for tokens (Ulysses{between}): each computes the rows of its group, for "
        f"{(plan.num_q_heads or 0) // plan.inner} of {plan.num_q_heads} heads; pairs are counted as a share of the rows"
    )


def _rank_table(result: Figures, mask: MaskFigures) -> Table:
    title = f"Mask {mask.name!r}, {units.times(mask.layers)} layers" if len(result.masks) > 1 else "Work and traffic"
    shown = units.sample(mask.work, MOST_RANKS)
    table = Table(
        title=f"{title}: {units.pairs(mask.pairs)} pairs, imbalance {mask.imbalance:.3f} (busiest over mean rank)",
        caption=f"{len(shown)} of {len(mask.work)} ranks, from the busiest to the idlest"
        if len(shown) < len(mask.work)
        else None,
        title_justify="left",
    )
    table.add_column("rank", justify="right")
    table.add_column("pairs: own keys █, received ▒", width=_BAR + 2, no_wrap=True)
    for column in ("pairs", "on own keys", "K/V tokens received", "bytes", "sent tokens"):
        table.add_column(column, justify="right")
    most = max(int(mask.work.max()), 1)
    for rank in shown:
        own, work = int(mask.local[rank]), int(mask.work[rank])
        full, part = round(_BAR * own / most), round(_BAR * work / most)
        table.add_row(
            str(rank),
            Text("█" * full + "▒" * (part - full)),
            units.pairs(work),
            f"{own / work:.0%}" if work else "–",
            f"{mask.recv_tokens[rank]:,}",
            units.num_bytes(mask.recv_bytes[rank]),
            f"{mask.traffic[:, rank].sum():,}",
        )
    table.add_section()
    mean_work, mean_local = float(mask.work.mean()), float(mask.local.mean())
    table.add_row(
        "mean",
        "",
        units.pairs(mean_work),
        f"{mean_local / mean_work:.0%}" if mean_work else "–",
        f"{mask.recv_tokens.mean():,.0f}",
        units.num_bytes(float(mask.recv_bytes.mean())),
        f"{mask.recv_tokens.mean():,.0f}",
    )
    return table


def _seconds_table(result: Figures) -> Table:
    plan, parts = result.plan, result.predict
    layers = units.times(sum(plan.weights.values()))
    table = Table(
        title=f"Predicted attention of a step, {layers} layers, {plan.num_q_heads} heads ({plan.num_kv_heads} K/V) of "
        f"{plan.head_dim}, {plan.dtype}, on {plan.hardware.name}",
        title_justify="left",
    )
    for column in ("", "compute, busiest rank", "exchange", "of it exposed"):
        table.add_column(column, justify="right")
    for key in ("forward", "backward"):
        table.add_row(key, *(units.seconds(parts[f"{part}_{key}"]) for part in ("compute", "exchange", "exposed")))
    table.add_section()
    table.add_row("total", units.seconds(parts["total"]), "", "")
    return table


def _candidate_table(result: Figures) -> Table:
    table = Table(title="Candidates, fastest first", title_justify="left")
    for column in (
        "layout",
        "exchange",
        "pieces",
        "imbalance",
        "received a layer, mean",
        "most",
        "forward",
        "backward",
        "total",
    ):
        table.add_column(column, justify="left" if column in ("layout", "exchange") else "right")
    layers = sum(result.plan.weights.values())
    for one in ranked(result):
        of = one["seconds"]
        table.add_row(
            one["balancer"],
            one["exchange"],
            str(one["stages"]),
            f"{one['imbalance']:.3f}",
            f"{one['recv_mean'] / layers:,.0f}",
            f"{one['recv_max'] / layers:,.0f}",
            *(units.seconds(of[f"compute_{key}"] + of[f"exposed_{key}"]) for key in ("forward", "backward")),
            units.seconds(of["total"]),
            style="bold" if is_chosen(result, one) else None,
        )
    return table


def ranked(result: Figures) -> list[dict]:
    """Candidates, the fastest first."""
    return sorted(result.candidates, key=lambda one: one["seconds"]["total"])


def is_chosen(result: Figures, candidate: dict) -> bool:
    plan = result.plan
    return (candidate["balancer"], candidate["exchange"], candidate["stages"]) == (
        plan.balancer,
        plan.exchange,
        plan.stages,
    )


def _comparison_table(comparison: Comparison) -> Table:
    table = Table(
        title="Ranks compared",
        caption=f"{comparison.best} ranks: {comparison.reason}",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("ranks", "chosen", "step", "exposed", "speed-up", "efficiency", "imbalance", "received", "K/V held"):
        table.add_column(column, justify="left" if column == "chosen" else "right")
    for one in comparison.degrees:
        table.add_row(
            str(one.ranks),
            one.way,
            units.seconds(one.total_seconds),
            units.seconds(one.exposed_seconds),
            f"{one.speedup:.2f} ×",
            f"{one.efficiency:.0%}",
            f"{one.imbalance:.3f}",
            units.num_bytes(one.recv_bytes),
            units.num_bytes(one.kv_bytes),
            style="bold" if one.ranks == comparison.best else None,
        )
    return table

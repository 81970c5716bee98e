"""A plan's figures on a terminal: what was chosen and why, work and traffic of each rank, seconds, candidates."""

from __future__ import annotations

import numpy as np
from rich.table import Table
from rich.text import Text

from spanwise.cli.report import grids, units, wording
from spanwise.cli.report.compare import Comparison
from spanwise.cli.report.plan_figures import Figures, MaskFigures, sample_ranks
from spanwise.cli.report.terminal import console, report_table
from spanwise.planning.explain import describe_hosts
from spanwise.planning.network import host_size
from spanwise.planning.plan import Plan

#: Most rows of a table of ranks; of more ranks a sample is shown, from the busiest to the idlest.
MOST_RANKS = 16

#: Width of the bars, and the column that holds them.
_BAR = 28
_BARS = "pairs: own keys █, received ▒"


def show(result: Figures) -> None:
    """Print the report."""
    out = console()
    for line in heading(result):
        out.print(line, highlight=False)
    if result.comparison:
        out.print()
        out.print(_comparison_table(result.comparison))
    if result.grids:
        out.print()
        out.print(grids.table(result.grids))
    for mask in result.masks:
        out.print()
        if mask.note:
            named = f"mask {mask.name!r}: " if len(result.masks) > 1 else ""
            out.print(f"{named}{mask.note}", highlight=False)
        out.print(_rank_table(result, mask))
    out.print()
    out.print(_seconds_table(result))
    if result.candidates:
        out.print()
        out.print(_candidate_table(result))
    out.print(f"\nfingerprint {result.plan.fingerprint}\n{result.command}", highlight=False)


def heading(result: Figures) -> list[str]:
    """The sequence, the choice and its reason. The HTML report opens with these lines, too."""
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
        f"{plan.num_ranks} ranks with {each} tokens each, assigned in blocks of {plan.block_size}",
        f"chosen: {wording.describe_way(plan)}",
        f"why: {plan.reason}",
        memory_line(result),
        *([] if plan.inner == 1 else [heads_line(plan)]),
        *([] if host_size(plan) is None else [describe_hosts(plan, name) for name in plan.masks]),
    ]


def memory_line(result: Figures) -> str:
    """Memory that the exchanges take, in words."""
    most = max(int(mask.resident_bytes.max()) for mask in result.masks)
    kept = max(int(mask.saved_bytes.max()) for mask in result.masks)
    return (
        f"holds at most {units.num_bytes(most)} a rank for the exchange of a layer, in addition to its own shards, and "
        f"keeps at most {units.num_bytes(kept)} of it for the backward"
    )


def heads_line(plan: Plan) -> str:
    """How ranks trade heads for tokens, in words."""
    between = f", {plan.exchange} between {plan.num_groups} such groups" if plan.num_groups > 1 else ""
    return (
        f"{plan.inner} ranks trade heads for tokens (Ulysses{between}): each computes the rows of its group, for "
        f"{(plan.num_q_heads or 0) // plan.inner} of {plan.num_q_heads} heads; pairs are counted as a share of the rows"
    )


def _rank_table(result: Figures, mask: MaskFigures) -> Table:
    title = f"Mask {mask.name!r}, {units.times(mask.layers)} layers" if len(result.masks) > 1 else "Work and traffic"
    shown = sample_ranks(mask.work, MOST_RANKS)
    table = report_table(
        f"{title}: {units.pairs(mask.pairs)} pairs, imbalance {mask.imbalance:.3f} (busiest over mean rank)",
        ("rank", _BARS, "pairs", "on own keys", "K/V tokens received", "bytes", "sent tokens"),
        (_BARS,),
        caption=f"{len(shown)} of {len(mask.work)} ranks, from the busiest to the idlest"
        if len(shown) < len(mask.work)
        else None,
    )
    table.columns[1].width, table.columns[1].no_wrap = _BAR + 2, True
    most = max(int(mask.work.max()), 1)
    for rank in shown:
        own, work = int(mask.local[rank]), int(mask.work[rank])
        full, part = round(_BAR * own / most), round(_BAR * work / most)
        table.add_row(
            str(rank),
            Text("█" * full + "▒" * (part - full)),
            units.pairs(work),
            units.percent(own / work) if work else "–",
            units.count(mask.recv_tokens[rank]),
            units.num_bytes(mask.recv_bytes[rank]),
            units.count(mask.traffic[:, rank].sum()),
        )
    table.add_section()
    mean_work, mean_local = float(mask.work.mean()), float(mask.local.mean())
    table.add_row(
        "mean",
        "",
        units.pairs(mean_work),
        units.percent(mean_local / mean_work) if mean_work else "–",
        units.count(mask.recv_tokens.mean()),
        units.num_bytes(float(mask.recv_bytes.mean())),
        units.count(mask.recv_tokens.mean()),
    )
    return table


def _seconds_table(result: Figures) -> Table:
    plan, parts = result.plan, result.predict
    layers = units.times(sum(plan.weights.values()))
    table = report_table(
        f"Predicted attention of a step, {layers} layers, {plan.num_q_heads} heads ({plan.num_kv_heads} K/V) of "
        f"{plan.head_dim}, {plan.dtype}, on {plan.hardware.name}",
        ("", "compute, busiest rank", "exchange", "of it exposed"),
    )
    for key in ("forward", "backward"):
        table.add_row(key, *(units.seconds(parts[f"{part}_{key}"]) for part in ("compute", "exchange", "exposed")))
    table.add_section()
    table.add_row("total", units.seconds(parts["total"]), "", "")
    return table


def _candidate_table(result: Figures) -> Table:
    columns = ("layout", "exchange", "chunks", "imbalance", "received a layer, mean", "most", "forward", "backward")
    table = report_table("Candidates, fastest first", (*columns, "total"), ("layout", "exchange"))
    layers = sum(result.plan.weights.values())
    for one in ranked(result):
        of = one["seconds"]
        table.add_row(
            one["balancer"],
            one["exchange"],
            str(one["stages"]),
            f"{one['imbalance']:.3f}",
            units.count(one["recv_mean"] / layers),
            units.count(one["recv_max"] / layers),
            *(units.seconds(of[f"compute_{key}"] + of[f"exposed_{key}"]) for key in ("forward", "backward")),
            units.seconds(of["total"]),
            style="bold" if is_chosen(result.plan, one) else None,
        )
    return table


def ranked(result: Figures) -> list[dict]:
    """Candidates, the fastest first."""
    return sorted(result.candidates, key=lambda one: one["seconds"]["total"])


def is_chosen(plan: Plan, candidate: dict) -> bool:
    """Whether the plan is made the way of the `candidate`."""
    return all(candidate[name] == getattr(plan, name) for name in ("balancer", "exchange", "stages"))


def _comparison_table(comparison: Comparison) -> Table:
    columns = ("ranks", "chosen", "step", "exposed", "speed-up", "efficiency", "imbalance", "received", "K/V held")
    caption = f"{comparison.best} ranks: {comparison.reason}"
    table = report_table("Ranks compared", columns, ("chosen",), caption=caption)
    for one in comparison.degrees:
        table.add_row(
            str(one.ranks),
            one.way,
            units.seconds(one.total_seconds),
            units.seconds(one.exposed_seconds),
            f"{one.speedup:.2f} ×",
            units.percent(one.efficiency),
            f"{one.imbalance:.3f}",
            units.num_bytes(one.recv_bytes),
            units.num_bytes(one.kv_bytes),
            style="bold" if one.ranks == comparison.best else None,
        )
    return table

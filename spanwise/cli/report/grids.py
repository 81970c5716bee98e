"""Fixed grids and one plan in a report: the sentence, the table of a terminal, and the drawing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from spanwise.cli.report import units
from spanwise.cli.report.plan_figures import sample_ranks
from spanwise.cli.report.svg import WIDTH, Drawing
from spanwise.cli.report.terminal import report_table
from spanwise.planning.grids import Grid

#: Most ranks of a grid that are drawn; of more, a sample from the busiest to the idlest.
_MOST = 128
_LEFT, _TOP, _BAR, _ROW = 168.0, 8.0, 40.0, 52.0
_COLUMNS = (
    "dp × cp", "documents", "step", "attention", "linear", "waits", "work", "tokens", "received", "off host", "held",
)  # fmt: skip


def summary(grids: Sequence[Grid]) -> str:
    """One plan against the fastest grid, in a sentence."""
    one, *others = grids
    if not others:
        return "one rank has no grids"
    best = min(others, key=lambda grid: grid.seconds)
    gain = best.seconds / one.seconds
    found = f"one plan {units.seconds(one.seconds)} a step, the fastest grid {name(best)} {units.seconds(best.seconds)}"
    return f"{found}: one plan is {gain:.2f} times as fast" if gain >= 1.005 else f"{found}: no gain from one plan"


def name(grid: Grid) -> str:
    """A grid in words: "4 × 8, longest first"."""
    return f"{grid.dp} × {grid.cp}, {grid.assignment}" if grid.dp > 1 else grid.assignment


def table(grids: Sequence[Grid]) -> Table:
    """The comparison as a table."""
    units_of = "seconds of the slowest rank; work, tokens: busiest over mean rank; bytes: most, all layers"
    caption = f"{summary(grids)}\n{units_of}"
    found = report_table("One plan and fixed dp × cp grids", _COLUMNS, ("documents",), caption=caption)
    for grid in grids:
        rank = int((grid.attention + grid.linear + grid.exposed).argmax())
        found.add_row(
            f"{grid.dp} × {grid.cp}",
            grid.assignment,
            *(units.seconds(x) for x in (grid.seconds, *(float(y[rank]) for y in _parts(grid).values()))),
            f"{grid.work_imbalance:.2f}",
            f"{grid.token_imbalance:.2f}",
            *(units.num_bytes(float(x)) for x in (grid.recv_bytes.max(), grid.host_bytes.max(), grid.held_bytes)),
            style="bold" if grid.dp == 1 else None,
        )
    return found


def _parts(grid: Grid) -> dict[str, np.ndarray]:
    """Seconds of each rank by class of the drawing."""
    return {"local": grid.attention, "remote": grid.linear, "exchange": grid.exposed}


def draw(grids: Sequence[Grid]) -> Drawing:
    """A row for each grid, a bar for each rank: the seconds that it computes and waits for its replica's exchange."""
    most = max(grid.seconds for grid in grids)
    each = "; ".join(f"{name(grid)} {units.seconds(grid.seconds)}" for grid in grids)
    drawing = Drawing("grids", "Seconds of each rank in a step", each, WIDTH, _TOP + _ROW * len(grids) + 8)
    span = WIDTH - _LEFT - 80
    for row, grid in enumerate(grids):
        base = _TOP + row * _ROW + _BAR
        drawing.text(_LEFT - 10, base - 14, name(grid), "small", "end")
        total = grid.attention + grid.linear + grid.exposed
        shown = sample_ranks(total, _MOST)
        step = span / len(shown)
        for place, rank in enumerate(shown):
            below = 0.0
            tip = ", ".join(
                f"{what} {units.seconds(float(seconds[rank]))}"
                for what, seconds in zip(("attention", "linear layers", "waits"), _parts(grid).values(), strict=True)
            )
            for kind, seconds in _parts(grid).items():
                tall = float(seconds[rank]) / most * _BAR
                if tall > 0:
                    x = _LEFT + place * step
                    drawing.rect(x, base - below - tall, step * 0.85, tall, kind, f"rank {rank}: {tip}")
                below += tall
        drawing.line(_LEFT, base, _LEFT + span, base, "grid")
        drawing.text(_LEFT + span + 8, base - 14, units.seconds(grid.seconds), "small")
    return drawing

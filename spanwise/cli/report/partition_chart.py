"""The drawing of a mask: a rank's colour where it computes, paler where it receives the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spanwise.cli.report import units
from spanwise.cli.report.partition import STEPS, Line, closer_look, lines
from spanwise.cli.report.svg import Drawing, number, rank_class, stretches, tick_step
from spanwise.layouts.layout import Layout
from spanwise.masks.span_mask import SpanMask

# CSS pixels of the drawing; a side of 720 px gives lines of one or two whole pixels.
_LEFT, _TOP, _SIDE = 64, 44.0, 720
#: Ranks above which the drawing has twice the lines.
_FINE = 16


def draw_partition(name: str, mask: SpanMask, layout: Layout, colors: Sequence[int]) -> tuple[Drawing, Drawing | None]:
    """Drawings of the whole mask and, if most of its square is blank, of a part of it."""
    count = min(mask.q_len, _SIDE // 2 if layout.num_ranks <= _FINE else _SIDE)
    drawn = lines(mask, layout, count)
    window = closer_look(mask, layout, drawn)
    whole = _draw(f"partition-{name}", drawn, (0, mask.q_len), colors)
    if window is None:
        return whole, None
    count = min(count, window[1] - window[0])
    return whole, _draw(f"closer-{name}", lines(mask, layout, count, window), window, colors)


def _draw(name: str, drawn: list[Line], window: tuple[int, int], colors: Sequence[int]) -> Drawing:
    """Query rows down, keys to the right."""
    first, last = window
    count = len(drawn)
    rows = (last - first) / count
    each = "one query row" if rows == 1 else f"{rows:,.0f} query rows"
    drawing = Drawing(
        name,
        "Who computes which part of the mask",
        f"Query rows {first:,} to {last:,} down, the same keys to the right, {len(colors)} ranks. Each of {count} "
        f"lines stands for {each}. A cell's colour is the rank that computes it; it is paler where the keys come from "
        f"another rank.",
        _LEFT + _SIDE + 16,
        44 + _SIDE + 40,
    )
    drawing.rect(_LEFT, _TOP, _SIDE, _SIDE, "plot")
    _pieces(drawing, drawn, colors)
    for rank, low, high in stretches(line.rank for line in drawn):
        tip = f"rank {rank}: tokens {first + int(low * rows):,} to {first + int(high * rows):,}"
        _owner(drawing, rank, low * _SIDE / count, (high - low) * _SIDE / count, tip, colors)
    drawing.text(_LEFT, 14, "held by rank", "small muted")
    step = max(1.0, tick_step(last - first, 8))
    for tick in range(math.ceil(first / step), math.floor(last / step) + 1):
        at_x = _LEFT + (tick * step - first) / (last - first) * _SIDE
        drawing.line(at_x, _TOP + _SIDE, at_x, _TOP + _SIDE + 4, "axis")
        drawing.text(at_x, _TOP + _SIDE + 17, units.count(tick * step), "small muted", "middle")
    drawing.text(_LEFT + _SIDE / 2, _TOP + _SIDE + 34, "keys (token position)", "small muted", "middle")
    drawing.text(14, _TOP + _SIDE / 2, "query rows, first at the top", "small muted", "middle", turned=True)
    return drawing


def _pieces(drawing: Drawing, drawn: list[Line], colors: Sequence[int]) -> None:
    """The cells of all lines: one path for each rank, kind and height."""
    scale = _SIDE / len(drawn)
    paths: dict[tuple[int, bool, int], list[str]] = {}
    for at, line in enumerate(drawn):
        for piece in line.pieces:
            off = (STEPS - piece.height) / STEPS / 2
            y = number(at + (off if piece.at_bottom else -off))
            parts = paths.setdefault((line.rank, piece.is_local, piece.height), [])
            parts.append(f"M{piece.start} {y}h{piece.stop - piece.start}")
    drawing.add(f'<g transform="translate({_LEFT} {number(_TOP + scale / 2)}) scale({scale:.9g})" fill="none">')
    for (rank, is_local, height), parts in sorted(paths.items()):
        kind = "own" if is_local else "received"
        width = f' stroke-width="{height / STEPS:g}"' if height < STEPS else ""
        drawing.add(f'<path class="stroke {rank_class(rank, colors)} {kind}"{width} d="{"".join(parts)}"/>')
    drawing.add("</g>")


def _owner(drawing: Drawing, rank: int, begin: float, length: float, tip: str, colors: Sequence[int]) -> None:
    """Marks tokens of `rank` at both edges, with its number where there is space."""
    drawing.rect(_LEFT - 12, _TOP + begin, 9, length, f"fill {rank_class(rank, colors)}", tip)
    drawing.rect(_LEFT + begin, _TOP - 12, length, 9, f"fill {rank_class(rank, colors)}", tip)
    if length >= 11:
        drawing.text(_LEFT - 16, _TOP + begin + length / 2 + 4, str(rank), "small", "end")
    if length >= 8 * len(str(rank)) + 4:
        drawing.text(_LEFT + begin + length / 2, _TOP - 16, str(rank), "small", "middle")

"""Drawings of a plan's ranks: bars of work and of received tokens, traffic, timeline.

Each function takes a name for the ids, and figures. Drawings are to scale; the description of a drawing says where a
sample of the ranks is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spanwise.cli.report import units
from spanwise.cli.report.plan_figures import MaskFigures, exposed_parts, sample_ranks
from spanwise.cli.report.svg import WIDTH, Drawing, choose_colors, number, rank_class, ticks
from spanwise.layouts.layout import Layout

#: Most ranks whose cells have tips and totals, and whose timelines have names.
_FEW = 16
#: Shades of the heat map.
_LEVELS = 12


def colors_of(layout: Layout) -> tuple[int, ...]:
    """A colour for each rank; neighbours along the sequence differ where possible."""
    pieces = layout.pieces()
    order = pieces[np.argsort(pieces[:, 1]), 0]
    adjacent = np.zeros((layout.num_ranks, layout.num_ranks), dtype=np.int64)
    for near in (1, 2):  # the next run, and the one after it
        np.add.at(adjacent, (order[:-near], order[near:]), 1)
    return choose_colors(adjacent + adjacent.T)


def work(name: str, mask: MaskFigures, colors: Sequence[int]) -> Drawing:
    """Pairs of each rank, those on own keys below those on received ones, and the mean."""
    mean = float(mask.work.mean())
    return _bars(
        f"work-{name}",
        "Work of each rank",
        f"Visible (query, key) pairs that each of {len(mask.work)} ranks computes: from {mask.work.min():,} to "
        f"{mask.work.max():,}, mean {mean:,.0f}.",
        "pairs",
        (mask.local, mask.work - mask.local),
        ("own", "received"),
        [
            f"rank {rank}: {work:,.0f} pairs, {local:,.0f} on its own keys, {work - local:,.0f} on received ones"
            for rank, (work, local) in enumerate(zip(mask.work.tolist(), mask.local.tolist(), strict=True))
        ],
        mean,
        colors,
    )


def received(name: str, mask: MaskFigures, colors: Sequence[int]) -> Drawing:
    """K/V tokens that each rank receives in a forward."""
    return _bars(
        f"received-{name}",
        "K/V tokens received by each rank in one forward",
        f"From {mask.recv_tokens.min():,} to {mask.recv_tokens.max():,} tokens, mean {mask.recv_tokens.mean():,.0f}.",
        "tokens",
        (mask.recv_tokens,),
        ("received",),
        [
            f"rank {rank}: receives {tokens:,} K/V tokens, {units.num_bytes(size)}; reads {needed:,} of them"
            for rank, (tokens, size, needed) in enumerate(
                zip(mask.recv_tokens.tolist(), mask.recv_bytes.tolist(), mask.needed_tokens.tolist(), strict=True)
            )
        ],
        float(mask.recv_tokens.mean()),
        colors,
    )


def _bars(
    name: str,
    title: str,
    description: str,
    unit: str,
    parts: tuple[np.ndarray, ...],
    kinds: tuple[str, ...],
    tips: list[str],
    mean: float,
    colors: Sequence[int],
) -> Drawing:
    left, top, height = 64.0, 18.0, 150.0
    drawing = Drawing(name, title, description, WIDTH, top + height + 42)
    count, most = len(tips), max(float(sum(parts).max()), 1e-9)  # type: ignore[union-attr]
    span = WIDTH - left - 96
    step = span / count
    gap = min(6.0, step * 0.2)
    for tick in ticks(most, 4):
        y = top + height - tick / most * height
        drawing.line(left, y, left + span, y, "grid")
        drawing.text(left - 8, y + 4, units.pairs(tick), "small muted", "end")
    for rank in range(count):
        base = 0.0
        for values, kind in zip(parts, kinds, strict=True):
            tall = float(values[rank]) / most * height
            y = top + height - base - tall
            drawing.rect(
                left + rank * step + gap / 2, y, step - gap, tall, f"fill {rank_class(rank, colors)} {kind}", tips[rank]
            )
            base += tall
    level = top + height - mean / most * height
    drawing.line(left, level, left + span, level, "mean")
    drawing.text(left + span + 6, level + 4, f"mean {units.pairs(mean)}", "small")
    _rank_ticks(drawing, left, step, count, top + height + 16)
    drawing.text(left + span / 2, top + height + 36, "rank", "small muted", "middle")
    drawing.text(14, top + height / 2, unit, "small muted", "middle", turned=True)
    return drawing


def _rank_ticks(drawing: Drawing, left: float, step: float, count: int, y: float) -> None:
    every = rank_step(step, 22)
    for rank in range(0, count, every):
        drawing.text(left + (rank + 0.5) * step, y, str(rank), "small", "middle")


def rank_step(pixels: float, space: float) -> int:
    """Distance of labelled ranks, a power of two: a rank has `pixels` and a label needs `space`."""
    return 1 << max(0, math.ceil(math.log2(space / pixels)))


def traffic(name: str, mask: MaskFigures, groups: Sequence[int] = ()) -> Drawing:
    """A heat map, receivers down, senders to the right; lines between groups of so many ranks."""
    count = len(mask.traffic)
    cell = min(40.0, 560 / count)
    side = cell * count
    left, top = 64.0, 44.0
    most = int(mask.traffic.max())
    idle = int((mask.traffic == 0).sum()) - count
    drawing = Drawing(
        f"traffic-{name}",
        "Traffic between ranks in one forward",
        f"K/V tokens that each of {count} ranks (down) receives from each other rank (to the right). The busiest "
        f"pair moves {most:,} tokens; {idle:,} of {count * (count - 1):,} pairs move none.",
        left + side + 190,
        top + side + 30,
    )
    drawing.rect(left, top, side, side, "plot")
    _heat_cells(drawing, mask.traffic, left, top, cell)
    for rank in range(count):
        drawing.rect(left + rank * cell, top + rank * cell, cell, cell, "self")
    for group in groups:
        for at in np.arange(group, count, group) * cell:
            drawing.line(left + at, top, left + at, top + side, "boundary")
            drawing.line(left, top + at, left + side, top + at, "boundary")
    if count <= 12:
        _heat_numbers(drawing, mask.traffic, left, top, cell)
    for rank in range(0, count, rank_step(cell, 22)):
        drawing.text(left - 6, top + (rank + 0.5) * cell + 4, str(rank), "small", "end")
        drawing.text(left + (rank + 0.5) * cell, top - 6, str(rank), "small", "middle")
    drawing.text(left + side / 2, 16, "sender", "small muted", "middle")
    drawing.text(14, top + side / 2, "receiver", "small muted", "middle", turned=True)
    if count <= _FEW:
        drawing.text(left + side + 84, top - 6, "in total", "small muted", "end")
        for rank in range(count):
            total = units.count(mask.recv_tokens[rank])
            drawing.text(left + side + 84, top + (rank + 0.5) * cell + 4, total, "small", "end")
    _heat_scale(drawing, left + side + 110, top, most)
    return drawing


def _shades(traffic: np.ndarray) -> np.ndarray:
    """The level of each cell, from 0 to `_LEVELS`."""
    return np.ceil(traffic / max(int(traffic.max()), 1) * _LEVELS).astype(int)


def _heat_cells(drawing: Drawing, traffic: np.ndarray, left: float, top: float, cell: float) -> None:
    """The cells of each level: rectangles with tips, or one path where there are many."""
    shade, size = _shades(traffic), number(cell)
    for level in range(1, _LEVELS + 1):
        cells = np.argwhere(shade == level).tolist()
        if not cells:
            continue
        drawing.add(f'<g class="heat" fill-opacity="{level / _LEVELS:.3f}">')
        if len(traffic) <= _FEW:
            for receiver, sender in cells:
                tip = f"rank {receiver} receives {traffic[receiver, sender]:,} tokens from rank {sender}"
                drawing.rect(left + sender * cell, top + receiver * cell, cell, cell, "", tip)
        else:
            corners = (f"M{number(left + s * cell)} {number(top + r * cell)}" for r, s in cells)
            drawing.add(f'<path d="{"".join(f"{corner}h{size}v{size}h-{size}z" for corner in corners)}"/>')
        drawing.add("</g>")


def _heat_numbers(drawing: Drawing, traffic: np.ndarray, left: float, top: float, cell: float) -> None:
    shade = _shades(traffic)
    for receiver, sender in np.argwhere(traffic > 0).tolist():
        strong = " on-heat" if shade[receiver, sender] > _LEVELS * 0.55 else ""
        tokens = int(traffic[receiver, sender])
        value = units.count(tokens) if tokens < 100_000 else units.pairs(tokens)
        x, y = left + (sender + 0.5) * cell, top + (receiver + 0.5) * cell + 4
        drawing.text(x, y, value, f"tiny{strong}", "middle")


def _heat_scale(drawing: Drawing, x: float, y: float, most: int) -> None:
    if not most:
        return
    for level in range(_LEVELS):
        top = y + (_LEVELS - 1 - level) * 9
        drawing.add(f'<rect x="{number(x)}" y="{number(top)}" width="14" height="9" class="heat" '
                    f'fill-opacity="{(level + 1) / _LEVELS:.3f}"/>')  # fmt: skip
    drawing.text(x + 20, y + 9, units.pairs(most), "small")
    drawing.text(x + 20, y + _LEVELS * 9, "0", "small")


#: Kinds of compute by a part of the interval's name; the first match counts.
_KINDS = (("local", "local"), ("attention", "remote"), ("", "copy"))

#: Most ranks of a timeline.
MOST_TIMELINES = 64


def timeline(name: str, mask: MaskFigures, boundary: float) -> Drawing:
    """Compute and exchange of each rank in one layer; waits are marked. The backward begins `boundary` seconds in."""
    shown = sample_ranks(mask.compute, MOST_TIMELINES)
    roomy = len(shown) <= _FEW
    pitch, tall, thin = (24.0, 11.0, 6.0) if roomy else (11.0, 5.0, 3.0)
    left, top, span = 64.0, 22.0, WIDTH - 80.0
    of_all = "" if len(shown) == len(mask.compute) else f" of {len(mask.compute)}, from the busiest to the idlest,"
    drawing = Drawing(
        f"timeline-{name}",
        "Predicted timeline of one layer",
        f"What {len(shown)} ranks{of_all} compute (upper lane) and exchange (lower lane): forward until "
        f"{units.seconds(boundary)}, backward until {units.seconds(mask.end)}. The longest wait of a rank for an "
        f"exchange is {units.seconds(float(mask.exposed.max()))} in all.",
        WIDTH,
        top + pitch * len(shown) + 44,
    )
    end = mask.end or 1.0
    bottom = top + pitch * len(shown)
    for tick in ticks(end, 8):
        x = left + tick / end * span
        drawing.line(x, top, x, bottom, "grid")
        drawing.text(x, bottom + 16, units.seconds(tick), "small muted", "middle")
    drawing.line(left + boundary / end * span, top - 12, left + boundary / end * span, bottom, "boundary")
    drawing.text(left + boundary / end * span - 6, top - 6, "forward", "small", "end")
    drawing.text(left + boundary / end * span + 6, top - 6, "backward", "small")
    every = rank_step(pitch, 14)
    for i, rank in enumerate(shown):
        y = top + i * pitch + 3
        if i % every == 0:
            drawing.text(left - 8, y + (tall + thin) / 2 + 4, str(rank), "small", "end")
        for interval in (interval for interval in mask.intervals if interval.rank == rank):
            x, width = left + interval.start / end * span, (interval.end - interval.start) / end * span
            tip = (
                f"rank {rank}, {interval.name}: {units.seconds(interval.end - interval.start)}, from "
                f"{units.seconds(interval.start)} to {units.seconds(interval.end)}"
            )
            if interval.stream == "compute":
                kind = next(kind for part, kind in _KINDS if part in interval.name)
                drawing.rect(x, y, width, tall, f"{kind} k{rank}", tip)
                if roomy and width > 6.2 * len(interval.name):
                    drawing.text(x + 4, y + 8.5, interval.name, f"tiny in-{kind}")
            else:
                drawing.rect(x, y + tall + 1, width, thin, f"exchange k{rank}", tip)
        for begin, stop in exposed_parts(mask.intervals, rank):
            x, width = left + begin / end * span, (stop - begin) / end * span
            tip = f"rank {rank} waits {units.seconds(stop - begin)} for an exchange"
            drawing.rect(x, y, width, tall + thin + 1, f"exposed k{rank}", tip)
    drawing.text(left + span / 2, bottom + 36, "time from the start of the layer's forward", "small muted", "middle")
    drawing.text(14, top + pitch * len(shown) / 2, "rank", "small muted", "middle", turned=True)
    return drawing

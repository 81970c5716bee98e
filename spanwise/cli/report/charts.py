"""The drawings of a report: the partition of the mask, bars of ranks, traffic, timeline, documents.

Each takes a name for its ids, and figures, and returns a `Drawing`; what is drawn is to scale, and what is not (many
ranks, long sequences) says so in its description.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spanwise.cli.report import units
from spanwise.cli.report.figures import MaskFigures, exposed_parts
from spanwise.cli.report.partition import STEPS, Line, closer_look, lines
from spanwise.cli.report.svg import Drawing, choose_colors, number, rank_class, stretches, tick_step, ticks
from spanwise.layouts.layout import Layout
from spanwise.masks.span_mask import SpanMask

WIDTH = 800
_LEFT, _SIDE = 64, 720  # of the partition; a side of 720 px gives lines of one or two whole pixels
_FINE = 16  # ranks past which the partition has twice the lines


def colors_of(layout: Layout) -> tuple[int, ...]:
    """A colour for each rank; ranks whose tokens lie side by side have different ones where that is possible."""
    pieces = layout.pieces()
    order = pieces[np.argsort(pieces[:, 1]), 0]
    beside = np.zeros((layout.num_ranks, layout.num_ranks), dtype=np.int64)
    for near in (1, 2):  # the next run, and the one after it
        np.add.at(beside, (order[:-near], order[near:]), 1)
    return choose_colors(beside + beside.T)


def partition(name: str, mask: SpanMask, layout: Layout, colors: Sequence[int]) -> tuple[Drawing, Drawing | None]:
    """Who computes what: the whole mask, and, where that leaves most of the square blank, a closer look at a part."""
    count = min(mask.q_len, _SIDE // 2 if layout.num_ranks <= _FINE else _SIDE)
    drawn = lines(mask, layout, count)
    window = closer_look(mask, layout, drawn)
    whole = _partition(f"partition-{name}", drawn, (0, mask.q_len), colors)
    if window is None:
        return whole, None
    count = min(count, window[1] - window[0])
    return whole, _partition(f"closer-{name}", lines(mask, layout, count, window), window, colors)


def _partition(name: str, drawn: list[Line], window: tuple[int, int], colors: Sequence[int]) -> Drawing:
    """Query rows down, keys to the right; a rank's colour where it computes, paler where it receives the keys."""
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
    scale, top = _SIDE / count, 44.0
    paths: dict[tuple[int, bool, int], list[str]] = {}
    for at, line in enumerate(drawn):
        for piece in line.pieces:
            off = (STEPS - piece.height) / STEPS / 2
            y = number(at + (off if piece.at_bottom else -off))
            parts = paths.setdefault((line.rank, piece.is_local, piece.height), [])
            parts.append(f"M{piece.start} {y}h{piece.stop - piece.start}")
    drawing.rect(_LEFT, top, _SIDE, _SIDE, "plot")
    drawing.add(f'<g transform="translate({_LEFT} {number(top + scale / 2)}) scale({scale:.9g})" fill="none">')
    for (rank, is_local, height), parts in sorted(paths.items()):
        kind = "own" if is_local else "received"
        width = f' stroke-width="{height / STEPS:g}"' if height < STEPS else ""
        drawing.add(f'<path class="stroke {rank_class(rank, colors)} {kind}"{width} d="{"".join(parts)}"/>')
    drawing.add("</g>")
    for rank, low, high in stretches(line.rank for line in drawn):
        begin, length = low * scale, (high - low) * scale
        tip = f"rank {rank}: tokens {first + int(low * rows):,} to {first + int(high * rows):,}"
        drawing.rect(_LEFT - 12, top + begin, 9, length, f"fill {rank_class(rank, colors)}", tip)
        drawing.rect(_LEFT + begin, top - 12, length, 9, f"fill {rank_class(rank, colors)}", tip)
        if length >= 11:
            drawing.text(_LEFT - 16, top + begin + length / 2 + 4, str(rank), "small", "end")
        if length >= 8 * len(str(rank)) + 4:
            drawing.text(_LEFT + begin + length / 2, top - 16, str(rank), "small", "middle")
    drawing.text(_LEFT, 14, "held by rank", "small muted")
    step = max(1.0, tick_step(last - first, 8))
    for tick in range(math.ceil(first / step), math.floor(last / step) + 1):
        at_x = _LEFT + (tick * step - first) / (last - first) * _SIDE
        drawing.line(at_x, top + _SIDE, at_x, top + _SIDE + 4, "axis")
        drawing.text(at_x, top + _SIDE + 17, f"{tick * step:,.0f}", "small muted", "middle")
    drawing.text(_LEFT + _SIDE / 2, top + _SIDE + 34, "keys (token position)", "small muted", "middle")
    drawing.text(14, top + _SIDE / 2, "query rows, first at the top", "small muted", "middle", turned=True)
    return drawing


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


def rank_step(pixels: float, room: float) -> int:
    """Every how many-th rank has a label, a power of two, where a rank has ``pixels`` and a label needs ``room``."""
    return 1 << max(0, math.ceil(math.log2(room / pixels)))


def traffic(name: str, mask: MaskFigures, groups: Sequence[int] = ()) -> Drawing:
    """A heat map, receivers down, senders to the right; lines between groups of so many ranks."""
    count = len(mask.traffic)
    cell = min(40.0, 560 / count)
    left, top, side = 64.0, 44.0, cell * count
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
    levels = 12
    shade = np.ceil(mask.traffic / max(most, 1) * levels).astype(int)
    small = count <= 16
    size = number(cell)
    for level in range(1, levels + 1):
        cells = np.argwhere(shade == level)
        if len(cells):
            drawing.add(f'<g class="heat" fill-opacity="{level / levels:.3f}">')
            if small:
                for receiver, sender in cells.tolist():
                    tip = f"rank {receiver} receives {mask.traffic[receiver, sender]:,} tokens from rank {sender}"
                    drawing.rect(left + sender * cell, top + receiver * cell, cell, cell, "", tip)
            else:
                d = "".join(
                    f"M{number(left + s * cell)} {number(top + r * cell)}h{size}v{size}h-{size}z"
                    for r, s in cells.tolist()
                )
                drawing.add(f'<path d="{d}"/>')
            drawing.add("</g>")
    for rank in range(count):
        drawing.rect(left + rank * cell, top + rank * cell, cell, cell, "self")
    for group in groups:
        for at in np.arange(group, count, group) * cell:
            drawing.line(left + at, top, left + at, top + side, "boundary")
            drawing.line(left, top + at, left + side, top + at, "boundary")
    if count <= 12:
        for receiver, sender in np.argwhere(mask.traffic > 0).tolist():
            strong = " on-heat" if shade[receiver, sender] > levels * 0.55 else ""
            tokens = int(mask.traffic[receiver, sender])
            value = f"{tokens:,}" if tokens < 100_000 else units.pairs(tokens)
            drawing.text(
                left + (sender + 0.5) * cell, top + (receiver + 0.5) * cell + 4, value, f"tiny{strong}", "middle"
            )
    for rank in range(0, count, rank_step(cell, 22)):
        drawing.text(left - 6, top + (rank + 0.5) * cell + 4, str(rank), "small", "end")
        drawing.text(left + (rank + 0.5) * cell, top - 6, str(rank), "small", "middle")
    drawing.text(left + side / 2, 16, "sender", "small muted", "middle")
    drawing.text(14, top + side / 2, "receiver", "small muted", "middle", turned=True)
    if small:
        drawing.text(left + side + 84, top - 6, "in total", "small muted", "end")
        for rank in range(count):
            total = f"{mask.recv_tokens[rank]:,}"
            drawing.text(left + side + 84, top + (rank + 0.5) * cell + 4, total, "small", "end")
    _heat_scale(drawing, left + side + 110, top, levels, most)
    return drawing


def _heat_scale(drawing: Drawing, x: float, y: float, levels: int, most: int) -> None:
    if not most:
        return
    for level in range(levels):
        top = y + (levels - 1 - level) * 9
        drawing.add(f'<rect x="{number(x)}" y="{number(top)}" width="14" height="9" class="heat" '
                    f'fill-opacity="{(level + 1) / levels:.3f}"/>')  # fmt: skip
    drawing.text(x + 20, y + 9, units.pairs(most), "small")
    drawing.text(x + 20, y + levels * 9, "0", "small")


#: What a compute interval is, by its name; the first that fits.
_KINDS = (("local", "local"), ("attention", "remote"), ("", "copy"))
MOST_TIMELINES = 64


def timeline(name: str, mask: MaskFigures, boundary: float) -> Drawing:
    """Compute and exchange of each rank over the forward and the backward of one layer; waits are marked.

    Args:
        boundary: seconds at which the backward begins.
    """
    shown = units.sample(mask.compute, MOST_TIMELINES)
    roomy = len(shown) <= 16
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


def documents(lengths: np.ndarray, pairs: np.ndarray) -> Drawing:
    """Documents by length: the share of tokens and of pairs in each power of two, and how many documents there are.

    Args:
        lengths, pairs: tokens and visible pairs of each document.
    """
    held = lengths > 0
    power = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    powers = range(int(power[held].min()), int(power[held].max()) + 1)
    left, top, height = 64.0, 30.0, 150.0
    span = WIDTH - left - 16
    step = min(110.0, span / len(powers))
    counts = [int((held & (power == p)).sum()) for p in powers]
    drawing = Drawing(
        "documents",
        "Documents by length",
        "; ".join(
            f"{n:,} documents of {1 << p:,} to {(2 << p) - 1:,} tokens" for p, n in zip(powers, counts, strict=True)
        ),
        WIDTH,
        top + height + 44,
    )
    shares = [
        [float(values[held & (power == p)].sum()) / max(float(values.sum()), 1.0) for p in powers]
        for values in (lengths, pairs)
    ]
    most = max(max(row) for row in shares)
    for tick in ticks(most, 4):
        y = top + height - tick / most * height
        drawing.line(left, y, left + step * len(powers), y, "grid")
        drawing.text(left - 8, y + 4, f"{tick:.0%}", "small muted", "end")
    for i, (p, n) in enumerate(zip(powers, counts, strict=True)):
        x = left + i * step
        for j, (kind, what) in enumerate((("tokens", "tokens"), ("pairs", "pairs"))):
            share = shares[j][i]
            tip = f"{n:,} documents of {1 << p:,} to {(2 << p) - 1:,} tokens hold {share:.1%} of the {what}"
            wide = step * 0.36
            drawing.rect(
                x + step * 0.12 + j * wide, top + height * (1 - share / most), wide, height * share / most, kind, tip
            )
        if n:
            drawing.text(
                x + step / 2, top + height * (1 - max(s[i] for s in shares) / most) - 5, f"{n:,}", "small", "middle"
            )
        drawing.text(
            x,
            top + height + 16,
            units.scaled(1 << p, ("", "k", "M")).strip() if p < 10 else f"{1 << p - 10:,} Ki",
            "small muted",
            "middle",
        )
    drawing.text(
        left + step * len(powers) / 2,
        top + height + 36,
        "tokens of a document (from, powers of two)",
        "small muted",
        "middle",
    )
    return drawing

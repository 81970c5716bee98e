"""Draws docs/recurrence.svg: the runs of two layouts, the maps of states that travel between them, and measured times.

python docs/draw_recurrence.py
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

import spanwise
from spanwise.cli.report.svg import RANK_COLORS, WIDTH, Drawing, ticks
from spanwise.layouts import document_runs
from spanwise.planning import documents

CU_SEQLENS = [0, 130, 700, 760, 1024]
RANKS = 4
LEFT, RIGHT = 120, WIDTH - 20
ROW, BAR, GAP = 22, 14, 44
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "recurrence-cpu.json"
STYLE = [
    "text { font: 12px sans-serif; fill: #555 } .title { font-weight: bold; fill: #222 } .tiny { font-size: 10px }",
    ".edge { stroke: #999; stroke-dasharray: 3 3 } .map { stroke: #222; fill: none; stroke-opacity: 0.55 }",
    ".ours { fill: #2f5d94 } .theirs { fill: #e8a33d } .grid { stroke: #ddd }",
    *(f".c{rank} {{ fill: {color} }}" for rank, color in enumerate(RANK_COLORS[:RANKS])),
]


def runs(drawing: Drawing, top: float, balancer: str) -> float:
    """The runs of one layout, a row a rank, and a line for each map that travels; returns where the panel ends."""
    mask = spanwise.SpanMask.documents(CU_SEQLENS)
    plan = spanwise.make_plan(mask, RANKS, balancer=balancer, block_size=32)
    everyone = document_runs.find(plan.layout, documents.packings(plan))
    scale = (RIGHT - LEFT) / plan.seq_len
    bottom, count = top + GAP + RANKS * ROW, 0
    for cut in CU_SEQLENS:
        drawing.line(LEFT + cut * scale, top + GAP - 6, LEFT + cut * scale, bottom, "edge")
    for number, (start, stop) in enumerate(itertools.pairwise(CU_SEQLENS)):
        drawing.text(LEFT + (start + stop) / 2 * scale, top + GAP - 8, f"document {number}", "tiny", "middle")
    for rank in range(RANKS):
        y = top + GAP + rank * ROW
        drawing.text(LEFT - 8, y + 12, f"rank {rank}", anchor="end")
        for start, stop in plan.layout.runs(rank):
            drawing.rect(LEFT + start * scale, y, (stop - start) * scale, BAR, f"c{rank}", f"{start} to {stop}")
    for rank in range(RANKS):
        maps = document_runs.exchanged(everyone, rank, RANKS)
        for sent, to in zip(maps.send, np.repeat(np.arange(RANKS), maps.send_counts), strict=True):
            # To the first later run of the document on that rank.
            same = (everyone.document == everyone.document[sent]) & (everyone.rank == to)
            later = np.flatnonzero(same & (everyone.start > everyone.start[sent]))[0]
            ends = [(everyone.stop[sent], rank), (everyone.start[later], to)]
            (x1, y1), (x2, y2) = ((LEFT + at * scale, top + GAP + of * ROW + BAR / 2) for at, of in ends)
            drawing.line(x1, y1, x2, y2, "map")
            count += 1
    drawing.text(LEFT, top + 18, f"{balancer}: {len(everyone.rank)} runs of documents, {count} maps travel", "title")
    return bottom + 10


def times(drawing: Drawing, top: float) -> float:
    """A bar for each layer, and one for transformers' code; returns where the panel ends."""
    found = json.loads(RESULTS.read_text())
    most = max(row[key] for row in found["rows"] for key in ("seconds", "transformers_seconds"))
    scale = (RIGHT - LEFT - 60) / most
    drawing.text(LEFT, top + 18, "seconds on one core, forward and backward: spanwise, then transformers", "title")
    bottom = top + 34 + len(found["rows"]) * 2 * ROW
    for tick in ticks(most, 6):
        drawing.line(LEFT + tick * scale, top + 28, LEFT + tick * scale, bottom, "grid")
        drawing.text(LEFT + tick * scale, bottom + 14, f"{tick:g}", "tiny", "middle")
    for number, row in enumerate(found["rows"]):
        y = top + 34 + number * 2 * ROW
        drawing.text(LEFT - 8, y + 20, row["name"], anchor="end")
        for line, (key, kind) in enumerate((("seconds", "ours"), ("transformers_seconds", "theirs"))):
            drawing.rect(LEFT, y + line * (BAR + 2), row[key] * scale, BAR, kind)
            drawing.text(LEFT + row[key] * scale + 6, y + line * (BAR + 2) + 11, f"{row[key]:.2f}", "tiny")
    return bottom + 24


def main() -> None:
    drawing = Drawing("recurrence", "Layers with a state", "Runs, maps that travel, and measured times", WIDTH, 0)
    top = 0.0
    for balancer in ("contiguous", "head_tail"):
        top = runs(drawing, top, balancer)
    drawing.height = times(drawing, top)
    background = f'<rect width="{WIDTH}" height="{drawing.height:g}" fill="white"/>'
    drawing.shapes[:0] = [f"<style>{' '.join(STYLE)}</style>", background]
    Path(__file__).with_name("recurrence.svg").write_text(f"{drawing}\n")


if __name__ == "__main__":
    main()

"""Draws docs/layouts.svg: who computes which part of a document mask under three layouts.

python docs/draw_layouts.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import spanwise
from spanwise.masks.blocks import block_table

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
CELL, GAP, TOP = 4, 36, 46
CU_SEQLENS = np.array([0, 96, 224, 672, 800, 1024])
BLOCK = 16


def panel(plan: spanwise.Plan, left: int) -> list[str]:
    table = block_table(plan.mask(), BLOCK)[0]
    owner = np.empty(plan.seq_len, dtype=int)
    for rank in range(plan.num_ranks):
        for start, stop in plan.runs(rank):
            owner[start:stop] = rank
    size = table.shape[0] * CELL
    reads = f"a rank reads {plan.needed_tokens().mean():,.0f} of {plan.seq_len} tokens elsewhere"
    title = f"{plan.balancer}: imbalance {plan.imbalance():.2f}"
    shapes = [
        f'<text x="{left}" y="22" class="title">{title}</text>',
        f'<text x="{left}" y="38">{reads}</text>',
        f'<rect x="{left}" y="{TOP}" width="{size}" height="{size}" fill="none" stroke="#999"/>',
    ]
    for row, kinds in enumerate(table):
        color = COLORS[owner[row * BLOCK]]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], kinds > 0, [0]]))).reshape(-1, 2)
        shapes += [
            f'<rect x="{left + a}" y="{TOP + row * CELL}" width="{b - a}" height="{CELL}" fill="{color}"/>'
            for a, b in edges * CELL
        ]
    return shapes


def main() -> None:
    mask = spanwise.SpanMask.documents(CU_SEQLENS)
    plans = [spanwise.make_plan(mask, 4, balancer=name, block_size=BLOCK) for name in ("contiguous", "lpt", "local")]
    side = 1024 // BLOCK * CELL
    width, height = len(plans) * (side + GAP), side + TOP + 10
    shapes = [shape for i, plan in enumerate(plans) for shape in panel(plan, 10 + i * (side + GAP))]
    style = "text { font: 12px sans-serif; fill: #555 } .title { font-weight: bold; fill: #222 }"
    body = "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *shapes,
            "</svg>",
        ]
    )
    Path(__file__).with_name("layouts.svg").write_text(body + "\n")


if __name__ == "__main__":
    main()

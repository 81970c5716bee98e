"""Draw the masks of gallery.md and index.md under several layouts, and write their figures into the pages.

    python docs/draw_gallery.py

The Python block above each comment `<!-- draw_gallery.py: NAME -->` makes `mask`; the pictures show that mask.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from pages import DOCS, filled

import spanwise
from spanwise.cli.report.pictures import owners, visible
from spanwise.cli.report.svg import rectangles

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
RANKS, BLOCK = len(COLORS), 16
SIDE, STRIP, EDGE = 256, 8, 12  # pixels: the mask, the strips that show owners, where the mask begins
TITLES = {"contiguous": "contiguous", "head_tail": "head_tail", "lpt": "lpt", "local": "local"}


def picture(plan: spanwise.Plan, row: int = 0) -> str:
    """The mask of one batch row: colour is the rank that computes, pale where it receives the key from another rank."""
    mask = plan.mask().row(row)
    at, keys = np.arange(SIDE) * mask.q_len // SIDE, np.arange(SIDE) * mask.kv_len // SIDE
    seen = visible(mask, at, keys)
    of_rows, of_keys = (
        owners(layout, tokens, row if layout.batch_size > 1 else 0)
        for layout, tokens in ((plan.layout, at), (plan.kv_layout, keys))
    )
    own = seen & (of_rows[:, None] == of_keys)
    shapes = []
    for rank, color in enumerate(COLORS):
        mine = (of_rows == rank)[:, None]
        column, line = np.zeros((2, SIDE, SIDE), bool)
        column[:, :STRIP], line[:STRIP] = mine, of_keys == rank
        for cells, opacity, x, y in (
            (own & mine, "", EDGE, EDGE),
            (seen & ~own & mine, ' fill-opacity=".4"', EDGE, EDGE),
            (column, "", 0, EDGE),
            (line, "", EDGE, 0),
        ):
            if d := rectangles(cells):
                shapes.append(f'<path transform="translate({x} {y})" fill="{color}"{opacity} d="{d}"/>')
    size = SIDE + EDGE + 1
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {size + 2} {size + 2}" width="{size + 2}">',
            f'<rect x="-1" y="-1" width="{size + 2}" height="{size + 2}" fill="#fff"/>',
            f'<rect x="{EDGE}" y="{EDGE}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#bbb"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def figures(name: str, mask: spanwise.SpanMask, balancers: tuple[str, ...], folder: Path) -> str:
    """Write the pictures of a mask; Markdown that shows them with imbalance, mean and most tokens received."""
    shown = []
    for balancer in balancers:
        plan = spanwise.make_plan(
            mask, RANKS, balancer=balancer, exchange="needed", stages=1, block_size=BLOCK,
            num_q_heads=8, head_dim=64,
        )  # fmt: skip
        received = plan.needed_tokens()
        costs = f"{plan.imbalance():.3f}; {received.mean():,.0f}, {received.max():,}"
        for row in range(mask.batch_size):
            file = f"{name}-{balancer}{f'-row{row}' if mask.batch_size > 1 else ''}.svg"
            (folder / file).write_text(picture(plan, row))
            title = TITLES[balancer] + (f", row {row}" if mask.batch_size > 1 else "")
            image = f"![{name}, {title}](gallery/{file})"
            shown.append(f"<figure markdown>\n{image}\n<figcaption>{title}: {costs}</figcaption>\n</figure>")
    return "\n".join(['<div class="panels" markdown>', *shown, "</div>"])


def code_above(page: str, name: str) -> str:
    """The last Python block above the comment of `name`."""
    above = page[: page.index(f"<!-- draw_gallery.py: {name} -->")]
    return re.findall(r"^```python\n(.*?)^```$", above, re.DOTALL | re.MULTILINE)[-1]


def draw(source: Path = DOCS, target: Path = DOCS) -> None:
    """Read gallery.md and index.md from `source`; write them and the pictures to `target`."""
    folder = target / "gallery"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    page = (source / "gallery.md").read_text()
    blocks = {}
    for name in re.findall(r"<!-- draw_gallery\.py: (.+?) -->", page):
        scope: dict[str, Any] = {}
        exec(code_above(page, name), scope)
        mask = scope["mask"]
        # Keys that are not the queries' tokens are laid out contiguously, as make_plan asks.
        balancers = ("contiguous", "head_tail", "local") if mask.q_len == mask.kv_len else ("contiguous",)
        blocks[name] = figures(name, mask, balancers, folder)
    (target / "gallery.md").write_text(filled(page, "draw_gallery.py", blocks))
    mask = spanwise.SpanMask.documents([0, 96, 224, 672, 800, 1024])
    layouts = figures("layouts", mask, ("contiguous", "lpt", "local"), folder)
    index = (source / "index.md").read_text()
    (target / "index.md").write_text(filled(index, "draw_gallery.py", {"layouts": layouts}))


if __name__ == "__main__":
    draw()

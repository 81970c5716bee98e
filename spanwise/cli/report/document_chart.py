"""The drawing of document lengths."""

from __future__ import annotations

import numpy as np

from spanwise.cli.report import units
from spanwise.cli.report.svg import WIDTH, Drawing, ticks

_LEFT, _TOP, _HEIGHT = 64.0, 30.0, 150.0


def draw_documents(lengths: np.ndarray, pairs: np.ndarray) -> Drawing:
    """Documents by length: the share of their tokens and visible pairs in each power of two, and their number."""
    power = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    powers = range(int(power[lengths > 0].min()), int(power[lengths > 0].max()) + 1)
    groups = [(lengths > 0) & (power == p) for p in powers]
    counts = [int(group.sum()) for group in groups]
    named = [f"{n:,} documents of {1 << p:,} to {(2 << p) - 1:,} tokens" for p, n in zip(powers, counts, strict=True)]
    height = _TOP + _HEIGHT + 44
    drawing = Drawing("documents", "Documents by length", "; ".join(named), WIDTH, height)
    shares = [
        tuple(float(values[group].sum()) / max(float(values.sum()), 1.0) for values in (lengths, pairs))
        for group in groups
    ]
    most = max(map(max, shares))
    step = min(110.0, (WIDTH - _LEFT - 16) / len(powers))
    for tick in ticks(most, 4):
        y = _TOP + _HEIGHT - tick / most * _HEIGHT
        drawing.line(_LEFT, y, _LEFT + step * len(powers), y, "grid")
        drawing.text(_LEFT - 8, y + 4, units.percent(tick), "small muted", "end")
    for i, p in enumerate(powers):
        _draw_group(drawing, _LEFT + i * step, step, p, counts[i], shares[i], most, named[i])
    middle = _LEFT + step * len(powers) / 2
    drawing.text(middle, height - 8, "tokens of a document (from, powers of two)", "small muted", "middle")
    return drawing


def _draw_group(
    drawing: Drawing, x: float, step: float, power: int, count: int, shares: tuple[float, ...], most: float, named: str
) -> None:
    """The bars of the documents of `2**power` tokens and more, from `x` on."""
    wide = step * 0.36
    for j, (kind, share) in enumerate(zip(("tokens", "pairs"), shares, strict=True)):
        tip = f"{named} hold {units.percent(share, 1)} of the {kind}"
        tall = _HEIGHT * share / most
        drawing.rect(x + step * 0.12 + j * wide, _TOP + _HEIGHT - tall, wide, tall, kind, tip)
    if count:
        y = _TOP + _HEIGHT * (1 - max(shares) / most) - 5
        drawing.text(x + step / 2, y, units.count(count), "small", "middle")
    label = str(1 << power) if power < 10 else f"{1 << power - 10:,} Ki"
    drawing.text(x, _TOP + _HEIGHT + 16, label, "small muted", "middle")

"""Draws docs/published.svg: predicted against published seconds, a dot for each measurement of published.json.

python docs/draw_published.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path

DOCS = Path(__file__).parent
SIZE, LEFT, DECADES = 420, 46, (-4, 3)
COLOURS = {"packed masks": "#d1495b", "attention": "#2e6f95", "steps and others": "#6a994e"}


def place(seconds: float) -> float:
    """Of a time along either axis."""
    low, high = DECADES
    return (math.log10(seconds) - low) / (high - low) * SIZE


def draw() -> str:
    rows = [
        x for x in json.loads((DOCS.parent / "benchmarks/results/published.json").read_text())["rows"] if "ratio" in x
    ]
    low, high = DECADES
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE + LEFT + 10}" height="{SIZE + 50}" font-size="11" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>',
        f'<g transform="translate({LEFT},8)"><rect width="{SIZE}" height="{SIZE}" fill="none" stroke="#888"/>',
    ]
    for factor, dash in ((1.0, ""), (1.25, "3 3"), (1 / 1.25, "3 3")):
        shift = place(factor * 10.0**low)
        top, bottom = max(0.0, shift), max(0.0, -shift)
        lines.append(
            f'<line x1="{bottom:.1f}" y1="{SIZE - top:.1f}" x2="{SIZE - top:.1f}" y2="{bottom:.1f}" stroke="#888" '
            f'stroke-dasharray="{dash}"/>'
        )
    for power in range(low, high + 1):
        at, label = place(10.0**power), {-3: "1 ms", 0: "1 s"}.get(power, f"1e{power}")
        lines.append(f'<text x="{at:.1f}" y="{SIZE + 15}" text-anchor="middle">{label}</text>')
        lines.append(f'<text x="-5" y="{SIZE - at + 4:.1f}" text-anchor="end">{label}</text>')
    for row in rows:
        kind = "packed masks" if row["packed"] else "attention" if row["group"] == "attention" else "steps and others"
        x, y = place(row["measured"]), SIZE - place(row["predicted"])
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{COLOURS[kind]}" fill-opacity="0.6"/>')
    for i, (kind, colour) in enumerate(COLOURS.items()):
        lines.append(f'<circle cx="14" cy="{16 + 16 * i}" r="4" fill="{colour}"/>')
        lines.append(f'<text x="24" y="{20 + 16 * i}">{kind}</text>')
    lines.append(
        f'<text x="{SIZE / 2}" y="{SIZE + 34}" text-anchor="middle">published; predicted upwards; ±25 %</text></g>'
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "published.svg").write_text(draw())

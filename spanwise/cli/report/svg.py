"""SVG text: a drawing with a title and a description for screen readers, and the shapes of charts.

Colours are classes. The page of a drawing defines them for light, dark and print.
"""

from __future__ import annotations

import math
from html import escape

import numpy as np

#: Width of a page's drawings, CSS pixels.
WIDTH = 800

#: Colours of ranks; more ranks repeat them. Every two differ by 0.14 or more in OKLab, in normal sight and as people
#: with protanopia, deuteranopia or tritanopia see them (simulated after Machado et al., 2009). Dark pages mix them with
#: white, which leaves four fifths of that.
RANK_COLORS = ("#33467f", "#f2930d", "#207f93", "#cc460d", "#a67ff2", "#0dccb9", "#7f2020", "#930ddf")


class Drawing:
    """Collects shapes; `str` makes one ``<svg>`` element of them.

    Args:
        name: prefix of the ids inside, unique in a page and without blanks.
        title, description: for screen readers.
        width, height: in CSS pixels; the drawing scales down with its page.
    """

    def __init__(self, name: str, title: str, description: str, width: float, height: float):
        self.name, self.title, self.description = name, title, description
        self.width, self.height = width, height
        self.shapes: list[str] = []

    def __str__(self) -> str:
        ids = tuple(escape(f"{self.name}-{part}") for part in ("title", "desc"))
        return "\n".join(
            [
                f'<svg role="img" aria-labelledby="{ids[0]} {ids[1]}" viewBox="0 0 {self.width:g} {self.height:g}" '
                f'width="{self.width:g}" height="{self.height:g}" xmlns="http://www.w3.org/2000/svg">',
                f'<title id="{ids[0]}">{escape(self.title)}</title>',
                f'<desc id="{ids[1]}">{escape(self.description)}</desc>',
                *self.shapes,
                "</svg>",
            ]
        )

    def text(self, x: float, y: float, value: str, kind: str = "", anchor: str = "start") -> None:
        place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"'
        self.shapes.append(f'<text {place} class="{kind}">{escape(value)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        points = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self.shapes.append(f'<line {points} class="{kind}"/>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> None:
        """A rectangle; `tip` shows under the pointer."""
        size = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self.shapes.append(f'<rect {size} class="{kind}"><title>{escape(tip)}</title></rect>')

    def cells(self, chosen: np.ndarray, x: float, y: float, size: float, attributes: str) -> None:
        """The true cells of bool ``[rows, columns]`` as one path, `size` pixels a cell."""
        if path := rectangles(chosen):
            place = f"translate({number(x)} {number(y)}) scale({size:.6g})"
            self.shapes.append(f'<path transform="{place}" {attributes} d="{path}"/>')


def rectangles(cells: np.ndarray) -> str:
    """SVG path of the true cells ``[rows, columns]``: equal runs of consecutive rows are one rectangle.

    >>> rectangles(np.array([[1, 1, 0], [1, 1, 0]], bool))
    'M0 0h2v2h-2z'
    """
    parts: list[str] = []
    open_runs: dict[tuple[int, int], int] = {}
    for y, line in enumerate([*cells, np.zeros(cells.shape[1], bool)]):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(np.int8), [0]]))).reshape(-1, 2)
        runs = {(int(a), int(b)) for a, b in edges}
        for run in sorted(open_runs.keys() - runs):
            top = open_runs.pop(run)
            parts.append(f"M{run[0]} {top}h{run[1] - run[0]}v{y - top}h{run[0] - run[1]}z")
        open_runs |= dict.fromkeys(runs - open_runs.keys(), y)
    return "".join(parts)


def number(value: float) -> str:
    """A coordinate, to a hundredth."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def ticks(most: float, about: int) -> list[float]:
    """Round numbers from 0 up to `most`, at most `about` steps of 1, 2 or 5 times a power of ten.

    >>> ticks(10, 4)
    [0.0, 5.0, 10.0]
    """
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / about))
    step = power * next((factor for factor in (1, 2, 5) if most / (factor * power) <= about), 10)
    return [i * step for i in range(math.floor(most / step * (1 + 1e-9)) + 1)]

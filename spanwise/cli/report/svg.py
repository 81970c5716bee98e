"""SVG text: a drawing with a title and a description for screen readers, and the shapes of charts.

Colours are classes. The page of a drawing defines them for light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

#: Width of a page's drawings, CSS pixels.
WIDTH = 800

#: Colours of ranks; more ranks repeat them. Every two differ by 0.14 or more in OKLab, in normal sight and as people
#: with protanopia, deuteranopia or tritanopia see them (simulated after Machado et al., 2009). Dark pages mix them with
#: white, which leaves four fifths of that.
RANK_COLORS = ("#33467f", "#f2930d", "#207f93", "#cc460d", "#a67ff2", "#0dccb9", "#7f2020", "#930ddf")


def rank_class(rank: int, colors: Sequence[int]) -> str:
    """The classes of shapes of `rank`: its colour, and its number, by which the page highlights it."""
    return f"c{colors[rank]} k{rank}"


def choose_colors(neighbours: np.ndarray) -> tuple[int, ...]:
    """A colour for each rank, an index into `RANK_COLORS`; all different if there are enough.

    Otherwise each rank in turn takes the colour that its neighbours so far use least, of these the rarest.

    Args:
        neighbours: int ``[num_ranks, num_ranks]``, symmetric: times that two ranks are side by side.
    """
    count = len(neighbours)
    if count <= len(RANK_COLORS):
        return tuple(range(count))
    colors: list[int] = []
    for rank in range(count):
        adjacent, used = np.zeros((2, len(RANK_COLORS)), dtype=np.int64)
        np.add.at(adjacent, colors, neighbours[rank, :rank])
        np.add.at(used, colors, 1)
        colors.append(int(np.lexsort((used, adjacent))[0]))
    return tuple(colors)


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

    def add(self, shape: str) -> None:
        """Add an element as it is; its texts are escaped already."""
        self.shapes.append(shape)

    def text(self, x: float, y: float, value: str, kind: str = "", anchor: str = "start", turned: bool = False) -> None:
        turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if turned else ""
        self.add(
            f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"{_class(kind)}{turn}>{escape(value)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        points = " ".join(f'{key}="{number(v)}"' for key, v in (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2)))
        self.add(f"<line {points}{_class(kind)}/>")

    def rect(self, x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> None:
        """A rectangle; `tip` shows under the pointer."""
        size = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self.add(
            f"<rect {size}{_class(kind)}><title>{escape(tip)}</title></rect>"
            if tip
            else f"<rect {size}{_class(kind)}/>"
        )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def number(value: float) -> str:
    """A coordinate, to a hundredth."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def tick_step(most: float, about: int) -> float:
    """A step of 1, 2 or 5 times a power of ten, at most `about` of them up to `most`."""
    power = 10.0 ** math.floor(math.log10(most / about))
    return power * next((factor for factor in (1, 2, 5) if most / (factor * power) <= about), 10)


def ticks(most: float, about: int) -> list[float]:
    """Round numbers from 0 up to `most`, at most `about` steps.

    >>> ticks(10, 4)
    [0.0, 5.0, 10.0]
    """
    if most <= 0:
        return [0.0]
    step = tick_step(most, about)
    return [i * step for i in range(math.floor(most / step * (1 + 1e-9)) + 1)]


def stretches(values: Iterable[int]) -> list[tuple[int, int, int]]:
    """(value, from, to) of each stretch of equal values."""
    found: list[tuple[int, int, int]] = []
    for i, value in enumerate(values):
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1], i + 1)
        else:
            found.append((value, i, i + 1))
    return found

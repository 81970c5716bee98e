"""Tables, as text and in HTML, and the self-contained page of a report: no network, no script, no libraries.

`page.html.jinja` and `page.css` hold the parts that all reports share; each report adds a template.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from spanwise.overlap.explain import units

#: Characters of the longest bar in a text.
_BAR = 28


def pairs(value: float) -> str:
    """Counts that get large.

    >>> pairs(1_070_000_000)
    '1.07 G'
    """
    return units.scaled(value, ("", "k", "M", "G", "T", "P")).strip()


@dataclasses.dataclass(frozen=True)
class Bar:
    """A cell that is a bar: `own` and `all` are fractions of the longest one."""

    own: float
    all: float

    def __str__(self) -> str:
        own, all_ = round(_BAR * self.own), round(_BAR * self.all)
        return "█" * own + "▒" * (all_ - own)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a report. The first `left` columns are flush left; the row `chosen` stands out."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str | Bar, ...]]
    chosen: int | None = None
    note: str = ""
    left: int = 1

    def __str__(self) -> str:
        rows = [self.columns, *(tuple(map(str, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = "<" * self.left + ">" * (len(widths) - self.left)
        lines = ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]
        marked = [f"{'→' if i - 1 == self.chosen else ' '} {line}" for i, line in enumerate(lines)]
        return "\n".join([self.title, *(lines if self.chosen is None else marked), *filter(None, [self.note])])


def render_page(name: str, **values: Any) -> str:
    """The page of the template ``NAME.html.jinja`` as text; `values` are escaped, except `Markup`."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        seconds=units.seconds, ms=units.milliseconds, bytes=units.num_bytes, count="{:,.0f}".format
    )
    environment.tests["bar"] = lambda cell: isinstance(cell, Bar)
    return environment.get_template(f"{name}.html.jinja").render(**values, style=Markup(_read("page.css")))


def _read(name: str) -> str:
    return resources.files("spanwise.cli.report").joinpath(name).read_text("utf-8")

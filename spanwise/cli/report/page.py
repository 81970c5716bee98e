"""Blocks of a report: headings, paragraphs, facts, tables, drawings; and the self-contained page that they make.

A page has no script, needs no network and no library; `page.css` is its style.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import NamedTuple, TypeAlias

from spanwise import units
from spanwise.cli.report.svg import RANK_COLORS, Drawing

#: Characters of the longest bar in a text, and its pixels on a page.
_BAR, _BAR_PIXELS = 28, 160


def pairs(value: float) -> str:
    """Counts that get large.

    >>> pairs(1_070_000_000)
    '1.07 G'
    """
    return units.scaled(value, ("", "k", "M", "G", "T", "P")).strip()


class Heading(NamedTuple):
    """A heading of level 1 to 3."""

    level: int
    text: str


class Legend(NamedTuple):
    """Classes of drawings, and their meanings."""

    entries: Sequence[tuple[str, str]]


class Preformatted(NamedTuple):
    """Text that keeps its lines."""

    text: str


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


Block: TypeAlias = "str | Heading | Legend | Preformatted | Table | Drawing | Mapping[str, str]"


def render_page(title: str, blocks: Sequence[Block]) -> str:
    """The page of the blocks: a string is a paragraph, a mapping a list of facts."""
    style = resources.files("spanwise.cli.report").joinpath("page.css").read_text("utf-8")
    light = "\n".join(f".c{i} {{ color: {color}; }}" for i, color in enumerate(RANK_COLORS))
    dark = "\n".join(f".c{i} {{ color: color-mix(in oklab, {c} 82%, white); }}" for i, c in enumerate(RANK_COLORS))
    policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{policy}',
            f"<title>{escape(title)}</title>\n<style>\n{style}{light}",
            f"@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n</style>\n</head>\n<body>\n<main>",
            *map(_html, blocks),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _html(block: Block) -> str:
    if isinstance(block, Drawing):
        return f"<figure>{block}</figure>"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Preformatted):
        return f"<pre>{escape(block.text)}</pre>"
    if isinstance(block, Legend):
        keys = (f'<li><span class="key {kind}"></span>{escape(text)}</li>' for kind, text in block.entries)
        return f'<ul class="legend">{"".join(keys)}</ul>'
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    facts = (f"<dt>{escape(topic)}</dt><dd>{escape(text)}</dd>" for topic, text in block.items())
    return f'<dl class="facts">{"".join(facts)}</dl>'


def _table(table: Table) -> str:
    sides = ['class="left"' if i < table.left else "" for i in range(len(table.columns))]
    head = "".join(f"<th {side}>{escape(name)}</th>" for name, side in zip(table.columns, sides, strict=True))
    lines = []
    for index, row in enumerate(table.rows):
        cells = "".join(_cell(cell, side) for cell, side in zip(row, sides, strict=True))
        lines.append(f"<tr {'class=chosen' if index == table.chosen else ''}>{cells}</tr>")
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<h3>{escape(table.title)}</h3><div class="scroll"><table>{body}</table></div>{note}'


def _cell(cell: str | Bar, side: str) -> str:
    if isinstance(cell, str):
        return f"<td {side}>{escape(cell)}</td>"
    own = 100 * cell.own / cell.all if cell.all else 0.0
    bar = f'<span style="width: {own:.1f}%"></span>'
    return f'<td class="left"><span class="bars" style="width: {_BAR_PIXELS * cell.all:.1f}px">{bar}</span></td>'

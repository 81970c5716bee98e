"""Text on a terminal: the console and the tables of reports, benchmarks and calibrations."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.table import Table


def console(width: int = 120) -> Console:
    """Standard output, as wide as the terminal; without one, tables of `width` columns and unbroken lines.

    Text is shown as it is. Names of hardware, masks and files are user input, and rich would take "[red]" for markup
    and ":x:" for an emoji.
    """
    found = Console(markup=False, emoji=False)
    return found if found.is_terminal else Console(width=width, soft_wrap=True, markup=False, emoji=False)


def working(text: str) -> AbstractContextManager[Any]:
    """Shows `text` on a terminal while the body runs."""
    return Console(stderr=True).status(text)


def table(title: str, columns: Iterable[str], left: Collection[str] = (), *, caption: str | None = None) -> Table:
    """An empty table. Columns are flush right, except those named in `left`."""
    found = Table(title=title, caption=caption)
    for column in columns:
        found.add_column(column, justify="left" if column in left else "right")
    return found


def report_table(
    title: str, columns: Iterable[str], left: Collection[str] = (), *, caption: str | None = None
) -> Table:
    """A `table` of a report: title and caption flush left."""
    found = table(title, columns, left, caption=caption)
    found.title_justify = found.caption_justify = "left"
    return found

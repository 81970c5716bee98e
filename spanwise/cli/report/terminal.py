"""Where text for people goes: the console of reports, benchmarks and calibrations."""

from __future__ import annotations

from rich.console import Console


def console(width: int = 120) -> Console:
    """Standard output: as wide as the terminal; where there is none, tables of ``width`` columns and lines unbroken.

    Text is shown as it is. Names of hardware, masks and files come from others, and rich would take "[red]" for
    markup and ":x:" for an emoji.
    """
    found = Console(markup=False, emoji=False)
    return found if found.is_terminal else Console(width=width, soft_wrap=True, markup=False, emoji=False)

"""Seconds, bytes, counts and shares as text: the same in terminals, HTML and SVG."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """Seconds with three significant digits, in the unit that suits.

    >>> seconds(0.0012345)
    '1.23 ms'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= factor * 0.9995:
            return f"{three_digits(value / factor)} {unit}"
    return f"{three_digits(value / 1e-6)} µs" if value else "0"


def milliseconds(value: float) -> str:
    """As `seconds`, of a value in milliseconds."""
    return seconds(value / 1e3)


def num_bytes(value: float) -> str:
    """Bytes in powers of 1,000.

    >>> num_bytes(16_777_216)
    '16.8 MB'
    """
    return scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def pairs(value: float) -> str:
    """Counts that get large.

    >>> pairs(1_070_000_000)
    '1.07 G'
    """
    return scaled(value, ("", "k", "M", "G", "T", "P")).strip()


def scaled(value: float, units: tuple[str, ...]) -> str:
    """`value` over the power of 1,000 that suits, with its unit."""
    step = 0
    while value >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    return f"{three_digits(value)} {units[step]}"


def three_digits(value: float) -> str:
    """Three significant digits; whole numbers below 1,000 as they are."""
    if value == int(value) and value < 1000:
        return str(int(value))
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{min(max(digits, 0), 6)}f}"


def count(value: float) -> str:
    """Tokens and other counts, in full: "107,520"."""
    return f"{value:,.0f}"


def percent(value: float, digits: int = 0) -> str:
    """A share: "12%", or "12.3%" with a digit."""
    return f"{value:.{digits}%}"


def fine_percent(value: float) -> str:
    """A share with three significant digits, for small ones: "0.0312%"."""
    return f"{100 * value:.3g}%"


def times(value: float) -> str:
    """Numbers that are whole as a rule, such as layers: "4" or "2.5"."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"

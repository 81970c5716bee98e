"""Seconds, bytes and counts as people read them: one way for every text, page and error of the package."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """Seconds with three significant digits, in the unit that suits.

    >>> seconds(0.0012345), seconds(12.345)
    ('1.23 ms', '12.3 s')
    """
    return milliseconds(1e3 * value)


def milliseconds(value: float) -> str:
    """As `seconds`, of a value in milliseconds."""
    if value >= 999.5:
        return f"{three_digits(value / 1e3)} s"
    if value >= 0.9995:
        return f"{three_digits(value)} ms"
    return f"{three_digits(1e3 * value)} µs" if value else "0"


def num_bytes(value: float) -> str:
    """Bytes in powers of 1,000.

    >>> num_bytes(512), num_bytes(16_777_216)
    ('512 B', '16.8 MB')
    """
    return scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def scaled(value: float, units: tuple[str, ...]) -> str:
    """`value` over the power of 1,000 that suits, with its unit."""
    step = 0
    while value >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    return f"{three_digits(value)} {units[step]}"


def three_digits(value: float) -> str:
    """Three significant digits; whole numbers below 1,000 as they are.

    >>> three_digits(1.2), three_digits(12)
    ('1.20', '12')
    """
    if value >= 999.5 or value == int(value):
        return f"{value:,.0f}"
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{min(max(digits, 0), 6)}f}"

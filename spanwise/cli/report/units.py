"""Seconds, bytes, counts and shares as text: the same in terminals, HTML and SVG."""

from __future__ import annotations

from spanwise.overlap.explain.units import milliseconds, num_bytes, scaled, seconds, three_digits

__all__ = ["count", "fine_percent", "milliseconds", "num_bytes", "pairs", "percent", "seconds", "three_digits", "times"]


def pairs(value: float) -> str:
    """Counts that get large.

    >>> pairs(1_070_000_000)
    '1.07 G'
    """
    return scaled(value, ("", "k", "M", "G", "T", "P")).strip()


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

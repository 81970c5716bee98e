"""Seconds, bytes, counts and shares as text: the same in terminals, HTML and SVG."""

from __future__ import annotations

from spanwise.overlap.explain.units import milliseconds, num_bytes, scaled, seconds

__all__ = ["count", "milliseconds", "num_bytes", "pairs", "percent", "seconds", "times"]


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


def times(value: float) -> str:
    """Numbers that are whole as a rule, such as layers: "4" or "2.5"."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"

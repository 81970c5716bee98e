"""Numbers as people read them: one way for text, HTML and SVG."""

from __future__ import annotations

import math

import numpy as np


def seconds(value: float) -> str:
    """Three significant digits, in the unit that suits: "1.23 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= factor * 0.9995:
            return f"{three_digits(value / factor)} {unit}"
    return f"{three_digits(value / 1e-6)} µs" if value else "0"


def num_bytes(value: float) -> str:
    """Powers of 1,000: "16.8 MB"."""
    return scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def pairs(value: float) -> str:
    """Counts that get large: "1.07 G"."""
    return scaled(value, ("", "k", "M", "G", "T", "P")).strip()


def scaled(value: float, units: tuple[str, ...]) -> str:
    step = 0
    while value >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    return f"{three_digits(value)} {units[step]}"


def three_digits(value: float) -> str:
    if value == int(value) and value < 1000:
        return str(int(value))
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{min(max(digits, 0), 6)}f}"


def times(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def way(balancer: str, exchange: str, pieces: int, inner: int = 1) -> str:
    """How a plan is cut and moved, in words: "local, needed in 2 pieces", "head_tail, ring, Ulysses inside 4"."""
    staged = f" in {pieces} pieces" if exchange == "needed" and pieces > 1 else ""
    inside = f", Ulysses inside {inner}" if inner > 1 and exchange != "ulysses" else ""
    return f"{balancer}, {exchange}{staged}{inside}"


def sample(values: np.ndarray, most: int) -> list[int]:
    """Ranks to show, ascending: all, or ``most`` of them evenly from the largest value to the smallest."""
    if len(values) <= most:
        return list(range(len(values)))
    order = np.argsort(-values, kind="stable")
    return sorted(order[np.linspace(0, len(order) - 1, most).round().astype(int)].tolist())

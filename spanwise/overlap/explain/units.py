"""Times and sizes as people read them."""

from __future__ import annotations


def duration(ms: float) -> str:
    """Format milliseconds with three significant digits in the unit that fits.

    >>> duration(0.16849), duration(5.906), duration(12_345.0)
    ('168 µs', '5.91 ms', '12.3 s')
    """
    if ms >= 999.5:
        return f"{ms / 1e3:.3g} s" if ms < 999.5e3 else f"{ms / 1e3:,.0f} s"
    if ms >= 0.9995:
        return f"{ms:.3g} ms"
    return f"{1e3 * ms:.3g} µs" if ms else "0"


def num_bytes(value: int) -> str:
    """Format bytes with two decimals in powers of 1,000.

    >>> num_bytes(512), num_bytes(16_800_000)
    ('512 B', '16.80 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value} B"

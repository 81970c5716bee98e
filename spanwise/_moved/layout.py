"""Deprecated: names of this module are now in `spanwise.layouts.layout`, `spanwise.layouts.runs`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.layout", "spanwise.layouts.layout", "spanwise.layouts.runs")

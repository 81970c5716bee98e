"""Deprecated: names of this module are now in `spanwise.layouts.packing`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.packing", "spanwise.layouts.packing")

"""Deprecated: names of this module are now in `spanwise.attention.packed`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.packed", "spanwise.attention.packed")

"""Deprecated: names of this module are now in `spanwise.layouts.ptrr`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.ptrr", "spanwise.layouts.ptrr")

"""Deprecated: names of this module are now in `spanwise.hardware`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.cost", "spanwise.hardware")

"""Deprecated: names of this module are now in `spanwise.attention.context_parallel`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.parallel", "spanwise.attention.context_parallel")

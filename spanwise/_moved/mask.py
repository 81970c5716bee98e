"""Deprecated: names of this module are now in `spanwise.masks.span_mask`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.mask", "spanwise.masks.span_mask")

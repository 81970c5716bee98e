"""Deprecated: names of this module are now in `spanwise.layouts.thd_order`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.thd_order", "spanwise.layouts.thd_order")

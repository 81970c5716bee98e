"""Deprecated: names of this module are now in `spanwise.attention.rank_plan`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.rank_plan", "spanwise.attention.rank_plan")

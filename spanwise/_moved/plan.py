"""Deprecated: names of this module are now in `spanwise.planning.plan`, `spanwise.planning.plan_data`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.plan", "spanwise.planning.plan", "spanwise.planning.plan_data")

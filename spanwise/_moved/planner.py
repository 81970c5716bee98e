"""Deprecated: names of this module are now in `spanwise.planning.make_plan`."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.planner", "spanwise.planning.make_plan")

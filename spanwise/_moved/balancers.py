"""Deprecated: names of this module are now in `spanwise.layouts`: problem, balancers, assignment and local."""

from spanwise._moved import forward

__getattr__ = forward(
    "spanwise.balancers",
    "spanwise.layouts.balancers",
    "spanwise.layouts.problem",
    "spanwise.layouts.assignment",
    "spanwise.layouts.local",
)

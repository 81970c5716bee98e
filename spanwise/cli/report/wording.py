"""Words about exchanges. No other file of the command line knows exchanges by name."""

from __future__ import annotations

from spanwise.planning.plan import Plan


def describe_way(balancer: str, exchange: str, pieces: int, inner: int = 1) -> str:
    """The layout and the exchange in words.

    >>> describe_way("head_tail", "ring", 1, inner=4)
    'head_tail, ring, Ulysses inside 4'
    """
    cut = f" in {pieces} pieces" if exchange == "needed" and pieces > 1 else ""
    inside = f", Ulysses inside {inner}" if inner > 1 and exchange != "ulysses" else ""
    return f"{balancer}, {exchange}{cut}{inside}"


def describe_plan(plan: Plan) -> str:
    """The layout and the exchange of a plan."""
    pieces = max(plan.num_pieces(name) for name in plan.masks)
    return describe_way(plan.balancer, plan.exchange, pieces, plan.inner)


def describe_received(plan: Plan) -> str:
    """Which K/V tokens a rank receives; "{}" stands for the mean of those that it reads."""
    if plan.exchange == "needed":
        return "exactly those that the rank's rows read and it does not hold"
    if plan.exchange == "ring":
        return "whole shards, as they come round; {} tokens of them are read, mean"
    if plan.inner > 1:
        return (
            "those of the ranks that it trades heads with, for its own heads, and from other groups what the exchange "
            "between them brings"
        )
    return "all of the other ranks; {} of them are read, mean"

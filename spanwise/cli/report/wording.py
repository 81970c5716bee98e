"""A plan's layout and exchange in words, for text and HTML alike."""

from __future__ import annotations

from spanwise.planning.plan import Plan
from spanwise.routes.exchanges import EXCHANGES


def describe_way(plan: Plan) -> str:
    """How a plan cuts and moves: "local, needed in 2 chunks", "head_tail, ring, Ulysses inside 4"."""
    chunks = max(plan.num_chunks(name) for name in plan.masks) if plan.stages > 1 else 1
    cut = f" in {chunks} chunks" if chunks > 1 else ""
    inside = f", Ulysses inside {plan.inner}" if plan.inner > 1 and plan.num_groups > 1 else ""
    return f"{plan.balancer}, {plan.exchange}{cut}{inside}"


def describe_received(plan: Plan) -> str:
    """Which K/V tokens a rank receives; "{}" stands for the mean of those that it reads."""
    trades = plan.inner > 1 and plan.kv_exchange.everything
    return (EXCHANGES["ulysses"] if trades else plan.kv_exchange).receives

"""Text of `Plan.explain`: work, traffic, predicted time and the reason of the choice."""

from __future__ import annotations

from spanwise.overlap.explain.units import seconds as as_text
from spanwise.planning.plan_data import PlanData
from spanwise.planning.predict import predict


def describe_exchange(plan: PlanData) -> str:
    """How K/V travel, on one line.

    >>> import spanwise
    >>> describe_exchange(spanwise.make_plan(spanwise.SpanMask.causal(64), (1, 2), block_size=8))
    'heads traded (Ulysses) among 2 ranks'
    """
    between = f"exchange {plan.exchange}, chunks {plan.stages}"
    if plan.inner == 1:
        return between
    inside = f"heads traded (Ulysses) among {plan.inner} ranks"
    return inside if plan.num_groups == 1 else f"{inside}, between them {between}"


def explain(plan: PlanData) -> str:
    """The text of `Plan.explain`."""
    tokens = plan.layout.tokens_per_rank
    lines = [
        f"{plan.seq_len:,} tokens on {plan.num_ranks} ranks: {tokens.min():,} to {tokens.max():,} tokens a rank",
        f"balancer {plan.balancer}, {describe_exchange(plan)}, blocks of {plan.block_size} tokens",
        f"why: {plan.reason}",
    ]
    for name in plan.masks:
        work, recv, needed = plan.work(name), plan.recv_tokens(name), plan.needed_tokens(name)
        lines.append(
            f"mask {name!r} (weight {plan.weights[name]:g}): work {work.mean():,.0f} pairs a rank, imbalance "
            f"{plan.imbalance(name):.3f}; receives {recv.mean():,.0f} K/V tokens, reads {needed.mean():,.0f}"
        )
    if plan.num_q_heads and plan.num_kv_heads and plan.head_dim:
        parts = ", ".join(f"{part} {as_text(seconds)}" for part, seconds in predict(plan).items())
        lines.append(f"predicted on {plan.hardware.name}: {parts}")
    for tried in plan.candidates:
        lines.append(
            f"considered {tried.balancer}, {tried.exchange}, chunks {tried.stages}: imbalance "
            f"{tried.imbalance:.3f}, receives {tried.recv_mean:,.0f} tokens, {as_text(tried.seconds['total'])}"
        )
    lines.append(f"fingerprint {plan.fingerprint}")
    return "\n".join(lines)

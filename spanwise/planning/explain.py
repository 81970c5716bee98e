"""Text of `Plan.explain`: work, traffic, predicted time and the reason of the choice."""

from __future__ import annotations

from spanwise.planning import memory, seconds
from spanwise.planning.plan_data import PlanData
from spanwise.units import num_bytes, seconds as as_text


def describe_exchange(plan: PlanData) -> str:
    """How K/V travel, on one line: "heads traded (Ulysses) among 2 ranks"."""
    between = f"exchange {plan.exchange}"
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
            f"{plan.imbalance(name):.3f}; receives {recv.mean():,.0f} K/V tokens "
            f"(chunks: {plan.num_chunks(name)}), reads {needed.mean():,.0f}"
        )
        if plan.hardware.groups_on_a_host(plan.num_ranks) is not None:
            lines.append(f"  {describe_hosts(plan, name)}")
    where = "a contiguous layout, to which tokens move and back" if plan.relayout else "the layout of attention"
    for name, (maps, time) in seconds.recurrent(plan).items() if plan.recurrences else ():
        kind = (plan.recurrences or {})[name]
        lines.append(
            f"recurrent layers {name!r} ({kind.layers:g}) in {where}: {maps:,} maps of {kind.map_bytes:,} bytes travel "
            f"in a forward of one layer; {as_text(time)} a step"
        )
    if plan.num_q_heads and plan.num_kv_heads and plan.head_dim:
        parts = ", ".join(f"{part} {as_text(value)}" for part, value in seconds.predict(plan).items())
        lines.append(f"predicted on {plan.hardware.name}: {parts}")
    for tried in plan.candidates:
        lines.append(
            f"considered {tried.balancer}, {tried.exchange}, stages {tried.stages}"
            f"{', recurrent layers contiguous' if tried.relayout else ''}: imbalance "
            f"{tried.imbalance:.3f}, receives {tried.recv_mean:,.0f} tokens, {as_text(tried.seconds['total'])}"
        )
    lines.append(f"fingerprint {plan.fingerprint}")
    return "\n".join(lines)


def describe_hosts(plan: PlanData, mask: str) -> str:
    """What stays inside hosts and what crosses between them, on one line; for hardware with hosts."""
    moved = memory.host_traffic(plan, mask)
    share = moved.inside / max(moved.inside + moved.between, 1)
    between = moved.between / plan.num_ranks
    said = f"hosts of {moved.host_size} ranks: {share:.1%} of the K/V tokens stay inside; {between:,.0f} a rank cross"
    if plan.num_q_heads and plan.head_dim:
        said += f" ({num_bytes(between * float(memory.kv_token_bytes(plan)))})"
    return f"{said}, each once a host" if plan.kv_exchange.by_host else said

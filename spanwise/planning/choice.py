"""The choice among the plans that "auto" makes: by memory budget, then by predicted seconds, with the reason."""

from __future__ import annotations

import numpy as np

from spanwise.overlap.explain.units import seconds as as_text
from spanwise.planning import costs
from spanwise.planning.candidate import Candidate
from spanwise.planning.plan import Plan

_TOLERANCE = 0.05  # predictions are not more exact
_AS_FAST = 1.002  # of searched layouts within this of the fastest the one that receives least
_SAVED = 0.7  # skip a baseline if a plan as fast receives at most this share of its tokens
_HIDDEN = 0.02  # where the exchange adds less to a step, no further chunks: with 0.05 a step grew by up to 4 %
_EXPOSED = 0.5  # an exchange that takes more than this share of a balanced forward's compute bounds the step
# Shape that "auto" assumes where the caller gives none: Llama 3 8B's attention, four query heads a K/V head.
_NOMINAL_KV_HEADS, _NOMINAL_DIM = 8, 128


def within_budget(plans: list[Plan], budget: int) -> list[Plan]:
    """The plans whose exchanges hold at most so many bytes on any rank."""
    held = [priced(plan).candidates[0].held for plan in plans]
    fitting = [plan for plan, num_bytes in zip(plans, held, strict=True) if num_bytes <= budget]
    if not fitting:
        least = min(range(len(plans)), key=lambda i: held[i])
        raise ValueError(
            f"every plan considered holds more than memory_budget={budget:,} bytes for its exchange; the least is "
            f"{_name(plans[least])} with {held[least]:,} bytes: allow more, use more ranks, or keep_kv=False"
        )
    return fitting


def exchange_bound(plans: list[Plan]) -> bool:
    """Whether compute cannot hide the exchange, even in a contiguous layout, which has little traffic."""
    least = next((priced(plan).candidates[0] for plan in plans if plan.kv_exchange.exact), None)
    if least is None:
        return False
    return least.seconds["exchange_forward"] > _EXPOSED * least.seconds["compute_forward"] / least.imbalance


def is_searched(plan: Plan) -> bool:
    """Whether the layout is one for little traffic, not by a rule that knows no mask."""
    return "local" in plan.balancer


def is_hidden(plan: Plan) -> bool:
    """Whether the exchange of a priced plan adds next to nothing to the step."""
    seconds = plan.candidates[0].seconds
    return seconds["exposed_forward"] + seconds["exposed_backward"] <= _HIDDEN * seconds["total"]


def fastest(plans: list[Plan]) -> Plan:
    """The simplest plan within the tolerance of the fastest, with the reason; `plans` are sorted, simplest first."""
    plans = [priced(plan) for plan in plans]
    candidates = [plan.candidates[0] for plan in plans]
    seconds = [candidate.seconds["total"] for candidate in candidates]
    fast = [i for i, value in enumerate(seconds) if value <= min(seconds) * (1 + _TOLERANCE)]
    # A baseline that sends and holds far more bytes than another fast plan does not count as simpler.
    limit = min(candidates[i].recv_mean for i in fast) / _SAVED
    simple = (i for i in fast if not plans[i].kv_exchange.everything or candidates[i].recv_mean < limit)
    chosen = next(simple, fast[0])
    if (kind := _kind(plans[chosen])) is not None:  # none of these layouts is simpler than another
        alike = [i for i in fast if _kind(plans[i]) == kind and plans[i].stages <= plans[chosen].stages]
        limit = min(seconds[i] for i in alike) * _AS_FAST
        chosen = min((i for i in alike if seconds[i] <= limit), key=lambda i: candidates[i].recv_mean)
    reason = _reason(plans, seconds, chosen)
    return plans[chosen].replace(reason=reason, candidates=tuple(candidates))


def _kind(plan: Plan) -> tuple[str, bool] | None:
    """What searched layouts of equally simple plans share, with as many chunks; None of a layout by rule."""
    return (plan.exchange, plan.relayout) if is_searched(plan) else None


def _reason(plans: list[Plan], seconds: list[float], chosen: int) -> str:
    """The reason of `chosen`, with the best of the plain plans: a baseline exchange and no searched layout."""
    plan = plans[chosen]
    plain = [i for i, x in enumerate(plans) if not is_searched(x) and x.kv_exchange.everything]
    usual = min(plain, key=lambda i: seconds[i], default=0)
    others = [i for i in range(len(plans)) if i not in plain]
    kinds = "attention and recurrent layers" if plan.recurrences else "attention"
    reason = f"{_name(plan)}: {as_text(seconds[chosen])} a step of {kinds} predicted on {plan.hardware.name}"
    if chosen in plain and others:
        other = min(others, key=lambda i: seconds[i])
        reason += (
            f"; no gain from the other ways, {_name(plans[other])} is the fastest of them ({as_text(seconds[other])})"
        )
    elif plain and chosen not in plain:
        gain = f"{seconds[usual] / seconds[chosen]:.2f} times as fast as" if seconds[chosen] else "against"
        reason += f", {gain} {_name(plans[usual])} ({as_text(seconds[usual])})"
    else:
        reason += f", the least of all that was considered within {_TOLERANCE:.0%}"
    if plan.num_q_heads is None or plan.head_dim is None:
        heads, kv_heads, dim, _ = _nominal_shape(plan.inner).values()
        reason += f"; priced for {heads} query and {kv_heads} K/V heads of {dim}, since num_q_heads and head_dim were "
        reason += "not both given"
    return reason


def _nominal_shape(inner: int) -> dict[str, int]:
    """The assumed attention shape, with more K/V heads if `inner` ranks cannot share it."""
    kv_heads, dim = _NOMINAL_KV_HEADS, _NOMINAL_DIM
    if 4 * kv_heads % inner:
        kv_heads = -(-kv_heads // inner) * inner
    return {"num_q_heads": 4 * kv_heads, "num_kv_heads": kv_heads, "head_dim": dim, "v_head_dim": dim}


def priced(plan: Plan) -> Plan:
    """A copy with what it costs as its only candidate, and without tables of traffic, which are large."""
    if plan.candidates:
        return plan
    missing = plan.num_q_heads is None or plan.head_dim is None
    nominal = plan.replace(**_nominal_shape(plan.inner)) if missing else plan
    work, recv = (
        np.sum([weight * figure(name) for name, weight in plan.weights.items()], axis=0)
        for figure in (plan.work, plan.recv_tokens)
    )
    imbalance = float(work.max() / work.mean()) if work.any() else 1.0
    candidate = Candidate(
        plan.balancer, plan.exchange, plan.stages, imbalance, float(recv.mean()), float(recv.max()),
        costs.held(nominal), costs.predict(nominal), plan.relayout,
    )  # fmt: skip
    return plan.replace(candidates=(candidate,))


def _name(plan: Plan) -> str:
    chunks = f" in {plan.stages} chunks" if plan.stages > 1 else ""
    inside = f", Ulysses inside {plan.inner}" if plan.inner > 1 and plan.num_groups > 1 else ""
    moved = ", recurrent layers in a contiguous layout" if plan.relayout else ""
    return f"{plan.balancer} with {plan.exchange}{chunks}{inside}{moved}"

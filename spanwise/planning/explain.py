"""Text of `Plan.explain`: work, traffic, predicted time and the reason of the choice."""

from __future__ import annotations

import numpy as np

from spanwise.layouts.assignment import Assigner
from spanwise.layouts.token_tree import TokenTree
from spanwise.masks.span_mask import SpanMask
from spanwise.overlap.explain.units import num_bytes
from spanwise.overlap.explain.units import seconds as as_text
from spanwise.planning import costs, documents, recurrent
from spanwise.planning.plan_data import PlanData


def describe_exchange(plan: PlanData) -> str:
    """How K/V travel, on one line: "heads traded (Ulysses) among 2 ranks"."""
    between = f"exchange {plan.exchange}, chunks {plan.stages}"
    if plan.inner == 1:
        return between
    inside = f"heads traded (Ulysses) among {plan.inner} ranks"
    return inside if plan.num_groups == 1 else f"{inside}, between them {between}"


def explain(plan: PlanData, tree: TokenTree | None = None) -> str:
    """The text of `Plan.explain`."""
    saved = [] if tree is None else _saved_by(tree, plan)
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
        if costs.host_size(plan) is not None:
            lines.append(f"  {describe_hosts(plan, name)}")
    lines += _recurrent(plan)
    lines += saved
    if plan.num_q_heads and plan.num_kv_heads and plan.head_dim:
        parts = ", ".join(f"{part} {as_text(seconds)}" for part, seconds in costs.predict(plan).items())
        lines.append(f"predicted on {plan.hardware.name}: {parts}")
    for tried in plan.candidates:
        lines.append(
            f"considered {tried.balancer}, {tried.exchange}, chunks {tried.stages}"
            f"{', recurrent layers contiguous' if tried.relayout else ''}: imbalance "
            f"{tried.imbalance:.3f}, receives {tried.recv_mean:,.0f} tokens, {as_text(tried.seconds['total'])}"
        )
    lines.append(f"fingerprint {plan.fingerprint}")
    return "\n".join(lines)


def describe_hosts(plan: PlanData, mask: str) -> str:
    """What stays inside hosts and what crosses between them, on one line; for hardware with hosts.

    >>> import spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(4096), 16, exchange="hierarchical", hardware=spanwise.H100)
    >>> describe_hosts(plan, "default").split(";")[0]
    'hosts of 8 ranks: 93.3% of the K/V tokens stay inside'
    """
    moved = costs.host_traffic(plan, mask)
    share = moved.inside / max(moved.inside + moved.between, 1)
    between, once = (count / plan.num_ranks for count in moved[2:])
    said = f"hosts of {moved.host_size} ranks: {share:.1%} of the K/V tokens stay inside; {between:,.0f} a rank cross"
    if plan.num_q_heads and plan.head_dim:
        said += f" ({num_bytes(between * float(costs.kv_token_bytes(plan).mean()))})"
    if plan.kv_exchange.by_host:
        return f"{said}, each once a host"
    return f"{said}; {once:,.0f} if a token entered a host once"


def _recurrent(plan: PlanData) -> list[str]:
    """Where the recurrent layers run, and what they cost there."""
    where = "a contiguous layout, to which tokens move and back" if plan.relayout else "the layout of attention"
    return [
        f"recurrent layers {name!r} ({plan.recurrences[name].layers:g}) in {where}: at most {each.runs:,} runs of "
        f"documents a rank, {each.maps:,} maps of {plan.recurrences[name].map_bytes:,} bytes travel; a rank receives "
        f"{each.recv_bytes.mean():,.0f} bytes a layer; {as_text(each.seconds)} a step, moves {as_text(each.moving)}"
        for name, each in (recurrent.costs(plan).items() if plan.recurrences else ())
        if plan.recurrences
    ]


def _saved_by(tree: TokenTree, plan: PlanData) -> list[str]:
    """What the tree saves against its paths as separate sequences, packed and laid out by "local"."""
    documents.check_tree(plan, tree)
    mask = SpanMask.documents(np.append(0, np.cumsum(tree.path_lengths())))
    assigner = Assigner({"default": mask}, None, plan.block_size, None, None)
    layout, kv_layout, block_size = assigner.layouts("local", plan.num_groups, plan.inner)
    apart = plan.replace(
        masks={"default": mask}, weights=assigner.weights, layout=layout, kv_layout=kv_layout, block_size=block_size,
        cu_seqlens=assigner.cu_seqlens,
    )  # fmt: skip
    recv = [f"{plan.recv_tokens(name).mean():,.0f} (mask {name!r})" for name in plan.masks]
    lines = [f"tree: {line}" for line in tree.explain().splitlines()]
    part = sorted(name for name, mask in plan.masks.items() if mask != tree.mask(max_spans=plan.seq_len))
    reads = f" that read all of themselves (mask {', '.join(map(repr, part))} reads less)" if part else ""
    return [
        *lines,
        f"tree: receives {', '.join(recv)} K/V tokens a rank; {apart.recv_tokens().mean():,.0f} as separate sequences"
        f"{reads} in a layout of balancer local",
    ]

"""make_plan: from a mask and a number of ranks to a plan; and all of the search that "auto" is.

Pure, like all of planning: it runs in a data-loader worker and gives the same plan everywhere.

    mask -> layouts -> each with exchanges and numbers of chunks -> predicted seconds -> the simplest of the fastest
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from spanwise import hardware as rates
from spanwise.layouts import balancers
from spanwise.layouts.local import Local
from spanwise.layouts.packing import Packing
from spanwise.layouts.problem import LayoutProblem, LoadBalancer
from spanwise.masks.checks import check_positive
from spanwise.masks.span_mask import SpanMask
from spanwise.planning import memory, seconds
from spanwise.planning.plan import Plan
from spanwise.planning.plan_data import Candidate
from spanwise.planning.recurrence import Recurrence
from spanwise.routes.exchanges import EXCHANGES, Exchange, resolve
from spanwise.units import seconds as as_text

# Bounds of the imbalance to try besides that of "local". Tight: 64 packings on 8 to 64 ranks have a mean step of 0.990
# with it and 1.006 without, times that of a search over blocks; 16 on 1,024 ranks 1.007 and 1.019. Loose: where a step
# waits for the exchange, that is where it takes more than _EXPOSED of a balanced forward's compute; docs/decisions.md,
# "Two exceptions".
_TIGHT, _LOOSE, _EXPOSED = 1.005, 2.0, 0.5
_TOLERANCE = 0.05  # predictions are not more exact
_SAVED = 0.7  # skip a baseline if a plan as fast receives at most this fraction of its tokens
_HIDDEN = 0.02  # where the exchange adds less to a step, no further chunks: with 0.05 a step grew by up to 4 %
# Shape that "auto" assumes where the caller gives none: Llama 3 8B's attention, four query heads a K/V head.
_NOMINAL_KV_HEADS, _NOMINAL_DIM = 8, 128
_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def make_plan(
    mask: SpanMask | Mapping[str, Any] | Any,
    num_ranks: int | tuple[int, int],
    *,
    weights: Mapping[str, float] | None = None,
    balancer: str | LoadBalancer = "auto",
    exchange: Any = "auto",
    stages: int | None = None,
    keep_kv: bool | None = None,
    block_size: int = 128,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    kv_row_dim: int | None = None,
    dtype: Any = "bfloat16",
    hardware: rates.Hardware | None = None,
    memory_budget: int | None = None,
    cu_seqlens: Any = None,
    packing: Packing | None = None,
    recurrences: Mapping[str, Recurrence] | None = None,
) -> Plan:
    """Plan context parallelism of one sequence length over ``num_ranks`` ranks. Pure: reads no process group.

    Args:
        mask: a :class:`SpanMask`, a FlexAttention ``BlockMask``, or masks by name that share one layout.
        num_ranks: size of the cp axis; or ``(outer, inner)``, the shape of a 2-D cp mesh: the ranks of each inner axis
            trade heads for tokens (Ulysses), and `exchange` works along the outer axis.
        weights: layers that use each named mask (default 1 each); the layout balances their weighted sum.
        balancer: "contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local" (each document on
            few ranks, so that little K/V of others is read, in balance), "dual_chunk" (TransformerEngine's order of a
            `packing`), an object with ``assign(problem, num_ranks)``, or "auto". A mask that is not square (cross
            attention) takes "contiguous", "dual_chunk" or "auto", which is "contiguous" then.
        exchange: "all_gather" (every rank gets all K/V), "needed" (every rank gets those that its queries read),
            "hierarchical" (the same, but they enter each host of `hardware` once, where ranks pass them on), "ring"
            (shards go from rank to rank, two at a time in memory), "ulysses" (heads for tokens), a function
            from a `RouteProblem` to steps, or "auto".
        stages: number of chunks in which "needed" brings the K/V, each computed while the next travels. None: 1, 2 or
            4, by predicted time. Other exchanges have no choice. One is used if no pair of ranks has so many blocks.
        keep_kv: keep received K/V for the backward; False: drop them after the forward and refetch them. Default:
            False for "ring", else True.
        block_size: tile in tokens that block-wise balancers assign; smaller tiles where a rank would get no token
            although there are enough. `Plan.block_size` is the one used.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: attention shape of one rank; under tensor parallelism its
            share of the heads. Bytes and seconds follow from it, and attention refuses tensors of another shape.
            ``num_kv_heads`` defaults to ``num_q_heads``, ``v_head_dim`` to ``head_dim``. Without them "auto" assumes 32
            query and 8 K/V heads of 128 (more, where ranks cannot share these); `Plan.reason` mentions it.
        kv_row_dim: numbers of a token that travel in place of K and V, as with ``context_parallel_attention(expand=)``:
            576 for latents of 512 and rotary keys of 64. Bytes and seconds follow; Ulysses trades K and V all the same.
        dtype: K/V dtype, a ``torch.dtype`` or its name.
        hardware: rates with which "auto" and :meth:`Plan.predict` compute seconds. With hosts, "local" also tries a
            layout in which few rows enter one. Default: :data:`spanwise.H100`; see ``Hardware.with_host_size``.
        memory_budget: bytes that a rank may hold for exchanges: `Plan.saved_bytes` of all layers (by `weights`), plus
            the rest of `Plan.resident_bytes` of one layer. "auto" leaves out plans that exceed it.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one such array per batch row; needed by
            "per_document_head_tail", and the default of :func:`spanwise.shard_batch`. Default: those of the masks, if
            all have the same (`SpanMask.cu_seqlens`).
        packing: where packed sequences lie in storage, if they are padded or have other keys than queries; in place of
            `cu_seqlens`. The masks are over storage, as :meth:`Packing.mask` makes them.
        recurrences: layers that carry a state along the sequence, by name. "auto" then also prices what they exchange
            in each layout, "local" layouts of few runs a rank, and moves to a contiguous layout and back for these
            layers (`Plan.relayout`, with any balancer).

    "auto" compares the predicted seconds of a step. Layouts: contiguous, head_tail and local, with tighter and looser
    bounds on the imbalance, too, and with hosts also one in which few rows enter a host. Where the caller asks for
    all_gather, lpt instead of local: locality gains nothing there. Exchanges: all_gather, but not with local; needed in
    1, 2 or 4 chunks, as long as there is an exchange left to hide; hierarchical, if ranks are on several hosts;
    Ulysses, if the number of heads is given and divides; under a `memory_budget` the ring, which is never the fastest.
    The simplest within 5 % of the fastest is taken (no all_gather if another of these receives at most 70 % of its
    tokens; of local layouts the fastest); see `Plan.candidates` and `Plan.reason`. `torch.compile` makes one graph for
    each exchange and number of chunks: name `exchange` and `stages` where plans change from batch to batch.

    Raises:
        ValueError: masks that differ in length or batch size, unknown names, bad numbers, heads that Ulysses cannot
            divide, padding that the dual-chunk order cannot cut, a budget that no plan meets.

    >>> import spanwise
    >>> mask = spanwise.SpanMask.documents([0, 300, 1000, 4096])
    >>> plan = spanwise.make_plan(mask, num_ranks=2, balancer="head_tail", exchange="needed")
    >>> plan.layout.tokens_per_rank.tolist(), plan.recv_tokens().tolist()
    ([2048, 2048], [2048, 24])
    """
    masks, hardware = _as_masks(mask), rates.DEFAULT if hardware is None else hardware
    chosen = None if exchange == "auto" else resolve(exchange)
    levels = groups_and_ranks(num_ranks, chosen)
    if keep_kv is not None and not isinstance(keep_kv, bool):
        raise ValueError(f"keep_kv must be True, False or None, got {keep_kv!r}")
    if keep_kv is False and levels[0] == 1 and levels[1] > 1:
        raise ValueError("keep_kv=False drops K/V of another exchange; Ulysses alone brings none: leave it out")
    if not isinstance(hardware, rates.Hardware):
        raise ValueError(f"hardware must be a spanwise.Hardware, such as spanwise.H100, got {hardware!r}")
    numbers = {
        "stages": stages, "memory_budget": memory_budget, "num_q_heads": num_q_heads, "head_dim": head_dim,
        "num_kv_heads": num_q_heads if num_kv_heads is None else num_kv_heads,
        "v_head_dim": head_dim if v_head_dim is None else v_head_dim, "kv_row_dim": kv_row_dim,
    }  # fmt: skip
    given = {name: None if value is None else check_positive(value, name) for name, value in numbers.items()}
    stages, budget = given.pop("stages"), given.pop("memory_budget")
    if given["num_q_heads"] is not None and given["num_kv_heads"] is not None:
        memory.check_heads(given["num_q_heads"], given["num_kv_heads"], levels[1])
    if chosen is not None and not chosen.chunk_choices(stages):
        raise ValueError(f"exchange {chosen.name!r} chooses its chunks itself, got stages={stages}; use 'needed'")
    if chosen is not None and chosen.by_host and len(hardware.links) == 1:
        raise ValueError(
            f"exchange {chosen.name!r} needs hardware that has hosts, such as spanwise.H100; got {hardware.name!r}"
        )
    if packing is not None:
        if not isinstance(packing, Packing) or cu_seqlens is not None:
            raise ValueError(f"give a spanwise.Packing or cu_seqlens, not both; got {packing!r} and {cu_seqlens!r}")
        for each in masks.values():
            packing.check_mask(each)
    if budget is not None and (num_q_heads is None or head_dim is None):
        raise ValueError("a memory_budget needs num_q_heads and head_dim: bytes follow from them")
    name = str(dtype).removeprefix("torch.")
    if name not in _ITEMSIZES:
        raise ValueError(f"dtype must be one of {sorted(_ITEMSIZES)} or the torch dtype of that name, got {dtype!r}")
    named = recurrences is None or isinstance(recurrences, Mapping)
    if not named or not all(isinstance(each, Recurrence) for each in (recurrences or {}).values()):
        raise ValueError(f"recurrences must map names to spanwise.Recurrence objects, got {recurrences!r}")
    fields = given | {
        "masks": masks, "dtype": name, "itemsize": _ITEMSIZES[name], "hardware": hardware, "packing": packing,
        "recurrences": {str(name): each for name, each in (recurrences or {}).items()} or None,
    }  # fmt: skip
    problem = balancers.problem_of(masks, weights, check_positive(block_size, "block_size"), cu_seqlens, packing)
    plans = _Search(fields, levels, chosen, stages, keep_kv, budget, problem).plans(balancer)
    if budget is not None:
        plans = _within_budget(plans, budget)
    return plans[0].replace(candidates=()) if len(plans) == 1 else _fastest(plans)


def _as_masks(mask: Any) -> dict[str, SpanMask]:
    """Masks by name, from one or several."""
    masks = dict(mask) if isinstance(mask, Mapping) else {"default": mask}
    for name, value in masks.items():
        if hasattr(value, "kv_num_blocks") and hasattr(value, "mask_mod"):
            masks[name] = SpanMask.from_block_mask(value)
        elif not isinstance(value, SpanMask):
            raise ValueError(
                f"mask {name!r} is a {type(value).__name__}; make_plan takes a SpanMask or a BlockMask. A dense "
                f"mask or a mask_mod becomes one with SpanMask.from_mask_mod"
            )
    return masks


def groups_and_ranks(num_ranks: Any, exchange: Exchange | None) -> tuple[int, int]:
    """``(groups, ranks of a group)`` from `num_ranks` and the exchange, None for "auto"."""
    if not isinstance(num_ranks, (tuple, list)):
        size = check_positive(num_ranks, "num_ranks")
        return (size, 1) if exchange is None else exchange.levels(size)
    if len(num_ranks) != 2 or (exchange is not None and exchange.heads):
        raise ValueError(
            f"num_ranks must be an integer, or (outer, inner) with Ulysses on the inner axis already and an exchange "
            f"other than 'ulysses' on the outer one; got {num_ranks!r}"
        )
    outer, inner = (check_positive(size, "each of num_ranks") for size in num_ranks)
    return outer, inner


@dataclasses.dataclass(frozen=True)
class _Search:
    """Plans of checked arguments: layouts, each with every exchange and number of chunks that the caller left open.

    Attributes:
        fields: of every plan, except what its layout decides.
        levels: ``(groups, ranks of a group)``.
        exchange, stages, keep_kv, budget: as in `make_plan`, None where left open.
    """

    fields: dict[str, Any]
    levels: tuple[int, int]
    exchange: Exchange | None
    stages: int | None
    keep_kv: bool | None
    budget: int | None
    problem: LayoutProblem

    def plans(self, balancer: str | LoadBalancer) -> list[Plan]:
        """All that are compared, simplest first."""
        outer = self.levels[0]
        auto, several = balancer == "auto", self.problem.square and outer > 1
        everything = self.exchange is not None and self.exchange.everything
        by_rule: list[str | LoadBalancer] = [balancer]
        if auto and several:  # where everything travels anyway, "lpt" balances best
            by_rule = ["contiguous", "head_tail", *(["lpt"] if everything else [])]
        elif auto:
            by_rule = ["contiguous"]
        found = [plan for each in by_rule if each != "local" or not several for plan in self.variants(each)]
        # With fewer blocks than ranks there is next to nothing to balance or to move.
        if several and (balancer == "local" or (auto and not everything and self.problem.num_blocks >= outer)):
            waits = auto and _waits_for_exchange(found)
            found += self.variants("local", searched=True)
            if (host_groups := self.fields["hardware"].groups_on_a_host(*self.levels)) is not None:
                found += self.variants(Local(host_size=host_groups), "local, by host", searched=True)
            for bound, tried in ((_TIGHT, auto), (_LOOSE, waits)):
                if tried:
                    found += self.variants(Local(bound), f"local, imbalance to {bound:g}", searched=True)
        # Ulysses over all ranks, where "auto" may choose it: the heads divide, and no argument rules it out.
        heads = self.fields["num_q_heads"]
        free = self.exchange is None and self.stages is None and self.keep_kv is not False
        if free and self.levels[1] == 1 < outer and heads is not None and heads % outer == 0:
            plan = self._assigned(by_rule[0], found[0].balancer, 1, outer)
            found += _and_moved(plan.replace(kv_exchange=EXCHANGES["ulysses"]))
        return found

    def variants(self, balancer: str | LoadBalancer, label: str = "", *, searched: bool = False) -> list[Plan]:
        """The layout of a balancer with each exchange and number of chunks, simplest first; priced, if several."""
        plan = self._assigned(balancer, label, *self.levels)
        exchanges = [self.exchange] if self.exchange else self._exchanges(searched)
        options = [(each, stages) for each in exchanges for stages in each.chunk_choices(self.stages)]
        if plan.num_groups == 1:  # nothing travels between groups
            options = [(EXCHANGES["ulysses"] if plan.inner > 1 else self.exchange or plan.kv_exchange, 1)]
        found: list[Plan] = []
        no_more_chunks_of = None  # the exchange of which next to nothing is left to hide
        for exchange, stages in options:
            keeps_kv = exchange.keeps_kv if self.keep_kv is None else self.keep_kv
            variant = plan.replace(kv_exchange=exchange, keep_kv=keeps_kv, stages=stages)
            # Leave out a variant whose K/V cannot be cut into so many chunks: it equals one with fewer.
            asked_for = stages in (1, self.stages)
            if exchange is no_more_chunks_of or not (asked_for or stages in map(variant.num_chunks, variant.masks)):
                continue
            # A price checks the steps of a caller's function.
            is_priced = len(options) > 1 or searched or exchange.name not in EXCHANGES
            found += [_priced(one, searched) if is_priced else one for one in _and_moved(variant)]
            if len(options) > 1 and self.budget is None:
                cost = found[-1].candidates[0].seconds
                if cost["exposed_forward"] + cost["exposed_backward"] <= _HIDDEN * cost["total"]:
                    no_more_chunks_of = exchange
        return found

    def _exchanges(self, searched: bool) -> list[Exchange]:
        """The exchanges that "auto" considers between groups, simplest first."""
        return [
            exchange
            for exchange in EXCHANGES.values()
            if not exchange.heads
            and exchange.chunk_choices(self.stages)
            and not (searched and exchange.everything)  # where all K/V travel, locality gains nothing
            and (exchange.keeps_kv or (self.budget is not None and self.stages is None))
            and (not exchange.by_host or self.fields["hardware"].groups_on_a_host(*self.levels))
        ]

    def _assigned(self, balancer: str | LoadBalancer, label: str, outer: int, inner: int) -> Plan:
        packing, problem = self.fields["packing"], self.problem
        layout, kv_layout, block_size = balancers.layouts(problem, packing, balancer, outer, inner)
        return Plan(
            **self.fields, weights={name: float(weight) for name, weight in (problem.weights or {}).items()},
            cu_seqlens=problem.cu_seqlens_rows if packing is None else None, layout=layout, kv_layout=kv_layout,
            num_ranks=outer * inner, inner=inner, block_size=block_size,
            balancer=label or (balancer if isinstance(balancer, str) else type(balancer).__name__),
            kv_exchange=EXCHANGES["all_gather"], stages=1, keep_kv=self.keep_kv is not False,
            reason="chosen by the caller" if outer * inner > 1 else "one rank computes everything",
        )  # fmt: skip


def _and_moved(plan: Plan) -> list[Plan]:
    """The plan, and where it differs one whose recurrent layers run in a contiguous layout."""
    moved = plan.replace(relayout=True) if plan.recurrences else plan
    return [plan] if moved.recurrent().layout == plan.layout else [plan, moved]


def _waits_for_exchange(plans: list[Plan]) -> bool:
    """Whether compute cannot hide the exchange, even in a contiguous layout, which has little traffic."""
    for least in (_priced(plan).candidates[0] for plan in plans if plan.kv_exchange.exact):
        return least.seconds["exchange_forward"] > _EXPOSED * least.seconds["compute_forward"] / least.imbalance
    return False


def _priced(plan: Plan, searched: bool = False) -> Plan:
    """A copy with what it costs as its only candidate, and without its routes, which are large."""
    if plan.candidates:
        return plan
    nominal = plan.replace(**_nominal_shape(plan))
    work, recv = (
        np.sum([weight * figure(name) for name, weight in plan.weights.items()], axis=0)
        for figure in (plan.work, plan.recv_tokens)
    )
    candidate = Candidate(
        plan.balancer, plan.exchange, plan.stages, float(work.max() / work.mean()) if work.any() else 1.0,
        float(recv.mean()), float(recv.max()), memory.held(nominal), seconds.predict(nominal), plan.relayout, searched,
    )  # fmt: skip
    return plan.replace(candidates=(candidate,))


def _nominal_shape(plan: Plan) -> dict[str, int]:
    """The attention shape to assume, with more K/V heads if ranks cannot share it; empty if it was given."""
    if plan.num_q_heads is not None and plan.head_dim is not None:
        return {}
    inner, kv_heads = plan.inner, _NOMINAL_KV_HEADS
    if 4 * kv_heads % inner:
        kv_heads = -(-kv_heads // inner) * inner
    return {
        "num_q_heads": 4 * kv_heads, "num_kv_heads": kv_heads, "head_dim": _NOMINAL_DIM, "v_head_dim": _NOMINAL_DIM,
    }  # fmt: skip


def _within_budget(plans: list[Plan], budget: int) -> list[Plan]:
    """The plans whose exchanges hold at most so many bytes on any rank."""
    plans = [_priced(plan) for plan in plans]
    fitting = [plan for plan in plans if plan.candidates[0].held <= budget]
    if not fitting:
        least = min(plans, key=lambda plan: plan.candidates[0].held)
        raise ValueError(
            f"every plan considered holds more than memory_budget={budget:,} bytes for its exchange; the least is "
            f"{_name(least)} with {least.candidates[0].held:,} bytes: allow more, use more ranks, or keep_kv=False"
        )
    return fitting


def _fastest(plans: list[Plan]) -> Plan:
    """The simplest plan within the tolerance of the fastest, with the reason; `plans` are sorted, simplest first."""
    plans = [_priced(plan) for plan in plans]
    candidates = [plan.candidates[0] for plan in plans]
    total = [candidate.seconds["total"] for candidate in candidates]
    fast = [i for i, value in enumerate(total) if value <= min(total) * (1 + _TOLERANCE)]
    # A baseline that sends and holds far more bytes than another fast plan does not count as simpler.
    limit = min(candidates[i].recv_mean for i in fast) / _SAVED
    simple = (i for i in fast if not plans[i].kv_exchange.everything or candidates[i].recv_mean < limit)
    chosen = plans[next(simple, fast[0])]
    if chosen.candidates[0].searched:  # none of these layouts is simpler than another: the fastest, by no more chunks
        kind = (chosen.exchange, chosen.relayout)
        alike = [plans[i] for i in fast if candidates[i].searched and plans[i].stages <= chosen.stages]
        alike = [plan for plan in alike if (plan.exchange, plan.relayout) == kind]
        chosen = min(alike, key=lambda plan: (plan.candidates[0].seconds["total"], plan.candidates[0].recv_mean))
    return chosen.replace(reason=_reason(chosen, plans), candidates=tuple(candidates))


def _reason(plan: Plan, plans: list[Plan]) -> str:
    """Its seconds, and those of the best plain plan: a baseline exchange in no searched layout."""
    total = plan.candidates[0].seconds["total"]
    kinds = "attention and recurrent layers" if plan.recurrences else "attention"
    reason = f"{_name(plan)}: {as_text(total)} a step of {kinds} predicted on {plan.hardware.name}"
    plain = [one for one in plans if not one.candidates[0].searched and one.kv_exchange.everything]
    usual = min(plain, key=lambda one: one.candidates[0].seconds["total"], default=plan)
    if usual.candidates[0].seconds["total"] > total > 0:
        other = usual.candidates[0].seconds["total"]
        reason += f", {other / total:.2f} times as fast as {_name(usual)} ({as_text(other)})"
    elif plan.kv_exchange.everything:
        reason += "; no plan considered is more than 5 % faster"
    if shape := _nominal_shape(plan):
        heads, kv_heads, dim, _ = shape.values()
        reason += f"; priced for {heads} query and {kv_heads} K/V heads of {dim}, as none were given"
    return reason


def _name(plan: Plan) -> str:
    chunks = f" in {plan.stages} chunks" if plan.stages > 1 else ""
    inside = f", Ulysses inside {plan.inner}" if plan.inner > 1 and plan.num_groups > 1 else ""
    moved = ", recurrent layers in a contiguous layout" if plan.relayout else ""
    return f"{plan.balancer} with {plan.exchange}{chunks}{inside}{moved}"

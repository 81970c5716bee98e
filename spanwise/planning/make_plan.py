"""make_plan: from a mask and a number of ranks to a plan.

Pure, like all of planning: it runs in a data-loader worker and gives the same plan everywhere. "auto" predicts the
seconds of a few layouts, of the exchanges and of several numbers of chunks. It takes the simplest within 5 % of the
fastest; all_gather only where no plan with far less traffic is as fast (`choice`).

    mask -> balancer -> layout -> Plan
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spanwise import hardware as rates
from spanwise.layouts.assignment import Assigner
from spanwise.layouts.local import Local
from spanwise.layouts.packing import Packing
from spanwise.layouts.problem import LoadBalancer
from spanwise.masks.span_mask import SpanMask
from spanwise.planning import choice, recurrent, requests
from spanwise.planning.plan import Plan
from spanwise.planning.recurrence import Recurrence
from spanwise.routes.exchanges import EXCHANGES

# Simplest first. Where everything travels anyway, locality gains nothing, and longest-first balances best.
_BALANCERS = ("contiguous", "head_tail")  # and "local"
_BALANCERS_BASELINE = ("contiguous", "head_tail", "lpt")
# Bounds of the imbalance to try besides that of "local". Tight: 64 packings on 8 to 64 ranks have a mean step of 0.990
# with it and 1.006 without, times that of a search over blocks; 16 on 1,024 ranks 1.007 and 1.019. Loose: where a step
# waits for the exchange; docs/decisions.md, "Two exceptions".
_TIGHT, _LOOSE = 1.005, 2.0


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
            (shards go from rank to rank, two at a time in memory), "ulysses" (heads for tokens), an `Exchange` object,
            or "auto".
        stages: number of chunks in which "needed" brings the K/V, each computed while the next travels. None: 1, 2 or
            4, by predicted time. Other exchanges have no choice.
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
        hardware: rates with which "auto" and :meth:`Plan.predict` compute seconds. If it has hosts, as
            :data:`spanwise.H100` has, "local" also tries a layout in which few rows enter a host. Default:
            that one, hosts of 8; ``spanwise.H100.with_host_size(4)`` for others.
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
    all_gather, lpt instead of local, because locality gains nothing there. Exchanges: all_gather, but not with local;
    needed in 1, 2 or 4 chunks, as long as there is an exchange left to hide; hierarchical, if the ranks are on several
    hosts of `hardware`; Ulysses, if the number of heads is given and divides; under a `memory_budget` the ring, which
    is never the fastest. The simplest within 5 % of the fastest is taken; `Plan.candidates` and `Plan.reason` show the
    comparison. `torch.compile` makes one graph for each exchange and number of chunks: name `exchange` and `stages`
    where plans change from batch to batch.

    Raises:
        ValueError: masks that differ in length or batch size, unknown names, bad numbers, heads that Ulysses cannot
            divide, padding that the dual-chunk order cannot cut, a budget that no plan meets.

    >>> import spanwise
    >>> mask = spanwise.SpanMask.documents([0, 300, 1000, 4096])
    >>> plan = spanwise.make_plan(mask, num_ranks=2, balancer="head_tail", exchange="needed")
    >>> plan.layout.tokens_per_rank.tolist(), plan.recv_tokens().tolist()
    ([2048, 2048], [2048, 24])
    """
    request = requests.checked(
        mask, num_ranks, exchange=exchange, stages=stages, keep_kv=keep_kv, block_size=block_size,
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        kv_row_dim=kv_row_dim, dtype=dtype, hardware=hardware, memory_budget=memory_budget, cu_seqlens=cu_seqlens,
        packing=packing, recurrences=recurrences,
    )  # fmt: skip
    problem = Assigner(request.masks, weights, request.block_size, cu_seqlens, packing)
    ways = _Ways(problem, request)
    if balancer == "auto":
        plans = ways.auto()
    elif balancer == "local" and problem.square and request.levels[0] > 1:
        plans = ways.local()
    else:
        plans = ways.variants(balancer)
    plans += ways.traded("contiguous" if balancer == "auto" else balancer, plans[0].balancer)
    if memory_budget is not None:
        plans = choice.within_budget(plans, int(memory_budget))
    return plans[0].replace(candidates=()) if len(plans) == 1 else choice.fastest(plans)


@dataclasses.dataclass(frozen=True)
class _Ways:
    """Plans of one request: its layouts, each with every exchange and number of chunks that the caller left open."""

    problem: Assigner
    request: requests.Request

    def auto(self) -> list[Plan]:
        """Plans that "auto" compares, simplest first."""
        problem, exchange = self.problem, self.request.exchange
        outer, _ = self.request.levels
        if outer == 1 or not problem.square:
            return self.variants("contiguous")
        if exchange is not None and exchange.everything:
            return [plan for name in _BALANCERS_BASELINE for plan in self.variants(name)]
        plans = [plan for name in _BALANCERS for plan in self.variants(name)]
        if problem.num_blocks >= outer:  # with fewer blocks there is next to nothing to balance or to move
            bound = choice.exchange_bound(plans)
            plans += self.local()
            for limit in (_TIGHT, _LOOSE) if bound else (_TIGHT,):
                plans += self.variants(Local(limit), f"local, imbalance to {limit:g}")
        return plans

    def local(self) -> list[Plan]:
        """Plans of the layouts with little traffic; which is best is a question of price."""
        plans = self.variants("local")
        host_groups = self.request.hardware.groups_on_a_host(*self.request.levels)
        if host_groups is not None:
            plans += self.variants(Local(host_size=host_groups), "local, by host")
        return plans

    def variants(self, balancer: str | LoadBalancer, label: str = "") -> list[Plan]:
        """The layout of a balancer with each exchange and number of chunks, simplest first."""
        label = label or (balancer if isinstance(balancer, str) else type(balancer).__name__)
        return _variants(self._assigned(balancer, label, *self.request.levels), self.request)

    def traded(self, balancer: str | LoadBalancer, label: str) -> list[Plan]:
        """Ulysses over all ranks, where "auto" may choose it: the heads divide, and no argument rules it out."""
        request, (outer, inner) = self.request, self.request.levels
        free = request.exchange is None and request.stages is None and request.keep_kv is not False
        if not free or not inner == 1 < outer or request.num_q_heads is None or request.num_q_heads % outer:
            return []
        ulysses = EXCHANGES["ulysses"]
        plan = self._assigned(balancer, label, *ulysses.levels(outer))
        return recurrent.variants([plan.replace(kv_exchange=ulysses)])

    def _assigned(self, balancer: str | LoadBalancer, label: str, outer: int, inner: int) -> Plan:
        layout, kv_layout, block_size = self.problem.layouts(balancer, outer, inner)
        many = math.prod(self.request.levels) > 1
        return Plan(
            weights=self.problem.weights, cu_seqlens=self.problem.cu_seqlens, layout=layout, kv_layout=kv_layout,
            block_size=block_size, balancer=label, num_ranks=outer * inner, inner=inner,
            reason="chosen by the caller" if many else "one rank computes everything", **self.request.fields(),
        )  # fmt: skip


def _variants(plan: Plan, request: requests.Request) -> list[Plan]:
    """The plan with every exchange and number of chunks that were left open, simplest first; priced, if several."""
    exchanges, stages = request.exchanges(), request.stages
    if len(exchanges) > 1 and choice.is_searched(plan):  # where all K/V travel, locality gains nothing
        exchanges = [each for each in exchanges if not each.everything]
    if plan.num_groups == 1:  # nothing travels between groups
        named = EXCHANGES["ulysses"] if plan.inner > 1 else request.exchange or plan.kv_exchange
        return recurrent.variants([plan.replace(kv_exchange=named, keep_kv=request.keeps_kv(named))])
    several = len(exchanges) > 1 or len(exchanges[0].counts(stages)) > 1
    if several:
        plan.count()  # once for all variants
    found = []
    for exchange in exchanges:
        for count in exchange.counts(stages):
            variant = plan.replace(kv_exchange=exchange, keep_kv=request.keeps_kv(exchange), stages=count)
            # Leave out a variant whose K/V cannot be cut into so many chunks: it equals one with fewer.
            if count not in (1, stages) and count not in map(variant.num_chunks, variant.masks):
                continue
            variants = recurrent.variants([variant]) if request.recurrences else [variant]
            found += [choice.priced(x) for x in variants] if several else variants
            # Further chunks hide more of the exchange, and there is next to nothing left to hide.
            if several and not request.budget and choice.is_hidden(found[-1]):
                break
    return found

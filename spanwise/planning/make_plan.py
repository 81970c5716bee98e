"""make_plan: from a mask and a number of ranks to a plan, and what "auto" chooses.

Pure, like all of planning: it runs in a data-loader worker and gives the same plan everywhere. What is left to "auto"
is decided by predicted seconds (`predict`): a few layouts, the exchanges, and the numbers of pieces are priced, and the
simplest that is within 5 % of the fastest is taken (an all_gather only where little less would do).

    mask -> balancer -> layout -> Plan
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from spanwise import hardware as cost
from spanwise.layouts.assignment import Assigner
from spanwise.layouts.packing import Packing
from spanwise.layouts.problem import LoadBalancer
from spanwise.masks.span_mask import SpanMask
from spanwise.planning import heads
from spanwise.planning.plan import EXCHANGES, Candidate, Plan

# Simplest first. Where everything travels anyway, locality buys nothing, and longest-first balances best.
_BALANCERS = ("contiguous", "head_tail")  # and local
_BALANCERS_ALL_GATHER = ("contiguous", "head_tail", "lpt")
_STAGES = (1, 2, 4)
_QUALITIES = ("best", "fast")
_TOLERANCE = 0.05  # finer than predictions are right
_SAVED = 0.7  # an all_gather is no simpler way where as fast a one receives at most this share of its tokens
_LARGEST = 2**31  # of any number given
# A bound of the imbalance that is tried where the exchange takes more than this share of a balanced forward's compute.
_LOOSE, _EXPOSED = 2.0, 0.5
# What "auto" prices with where the caller gives no hardware, and no shape: Llama 3 8B's attention. Only ratios matter:
# how many FLOPs a (query, key) pair takes for each byte of a K/V token.
ASSUMED = dataclasses.replace(
    cost.H100,
    name="H100s joined by NVLink, nominal",
    links=(dataclasses.replace(cost.H100.links[0], ranks=None),),
)
_NOMINAL_KV_HEADS, _NOMINAL_DIM = 8, 128  # and four times as many query heads


def make_plan(
    mask: SpanMask | Mapping[str, Any] | Any,
    num_ranks: int | tuple[int, int],
    *,
    weights: Mapping[str, float] | None = None,
    balancer: str | LoadBalancer = "auto",
    exchange: str = "auto",
    stages: int | None = None,
    keep_kv: bool | None = None,
    quality: str = "best",
    block_size: int = 128,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    dtype: Any = "bfloat16",
    hardware: cost.Hardware | None = None,
    memory_budget: int | None = None,
    cu_seqlens: Any = None,
    packing: Packing | None = None,
) -> Plan:
    """Plan context parallelism of one sequence length over ``num_ranks`` ranks. Pure: no process group is read.

    Args:
        mask: a :class:`SpanMask`, a FlexAttention ``BlockMask``, or masks by name that share one layout.
        num_ranks: size of the cp axis; or ``(outer, inner)``, the shape of a 2-D cp mesh: the ranks of each inner axis
            trade heads for tokens (Ulysses), and `exchange` works along the outer axis.
        weights: layers that use each named mask (default 1 each); what the layout balances.
        balancer: "contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local" (little K/V to read
            elsewhere under a bound on the imbalance), "dual_chunk" (TransformerEngine's order of a `packing`), an
            object with ``assign(problem, num_ranks)``, or "auto". A mask that is not square (cross attention) takes
            "contiguous", "dual_chunk" or "auto" (the former).
        exchange: "all_gather" (every rank gets all K/V), "needed" (every rank gets what its queries read), "ring"
            (shards go from rank to rank, two at a time in memory), "ulysses" (heads for tokens), or "auto".
        stages: pieces in which "needed" brings the K/V, each computed while the next travels; None: 1, 2 or 4,
            whichever is predicted to be fastest. Other exchanges have no choice.
        keep_kv: keep received K/V for the backward; False: drop them after the forward and fetch them again. Default:
            False for "ring", else True.
        quality: of the "local" search, "best" or "fast" (a quarter of the time).
        block_size: tile in tokens that block-wise balancers deal out.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: shape of the attention of one rank, under tensor parallelism
            its share of the heads, to speak of bytes and seconds (``num_kv_heads`` defaults to ``num_q_heads``,
            ``v_head_dim`` to ``head_dim``); tensors of another shape are refused. Where they are missing, "auto" prices
            with 32 query and 8 K/V heads of 128 (more, where ranks cannot share these), and says so.
        dtype: K/V dtype, a ``torch.dtype`` or its name.
        hardware: what "auto" and :meth:`Plan.predict` price with. If it has hosts, as :data:`spanwise.H100` has, the
            "local" search prefers traffic inside them. Default: H100s that are all joined by NVLink, since nothing is
            known of hosts.
        memory_budget: bytes that a rank may hold for exchanges: `Plan.saved_bytes` of all layers (by `weights`), and
            what one layer holds beside that (`Plan.resident_bytes`). "auto" leaves out what exceeds it.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one such array per batch row; needed by
            "per_document_head_tail", and the default of :func:`spanwise.shard_batch`.
        packing: where packed sequences lie in storage, if they are padded or have other keys than queries; in place of
            `cu_seqlens`. The masks are over storage, as :meth:`Packing.mask` makes them.

    "auto" compares the predicted seconds of a step: contiguous, head_tail and local layouts (longest-first instead of
    local where all_gather is asked for, and locality buys nothing); all_gather, needed in 1, 2 or 4 pieces, Ulysses
    where the number of heads is given and divides, and under a `memory_budget` the ring, which is never the fastest.
    The simplest way within 5 % of the fastest is taken; `Plan.candidates` and `Plan.reason` tell what was compared.
    Each exchange and number of pieces is a graph of its own to `torch.compile`: name `exchange` and `stages` where
    every batch has a plan of its own.

    Raises:
        ValueError: masks that differ in length or batch size, unknown names, bad numbers, heads that Ulysses cannot
            divide, padding that the dual-chunk order cannot cut, a budget that nothing meets.
    """
    masks = _as_masks(mask)
    outer, inner = _axes(num_ranks)
    if exchange not in (*EXCHANGES, "auto"):
        raise ValueError(f"unknown exchange {exchange!r}; choose one of {[*EXCHANGES, 'auto']}")
    if exchange == "ulysses":
        if not isinstance(num_ranks, (int, np.integer)):
            raise ValueError(
                f"num_ranks={num_ranks!r} has Ulysses on its inner axis already: exchange is the outer one's, one "
                f"of {[*EXCHANGES[:-1], 'auto']}"
            )
        outer, inner = 1, outer
    for name, value in (
        ("block_size", block_size),
        ("stages", stages),
        ("num_q_heads", num_q_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("v_head_dim", v_head_dim),
    ):
        if value is not None:
            _check_count(name, value)
    num_q_heads, num_kv_heads, head_dim, v_head_dim = (
        None if value is None else int(value)
        for value in (num_q_heads, num_kv_heads or num_q_heads, head_dim, v_head_dim or head_dim)
    )
    if num_q_heads is not None and num_kv_heads is not None:
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_q_heads={num_q_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        heads.check_heads(num_q_heads, num_kv_heads, inner)
    if keep_kv is not None and not isinstance(keep_kv, bool):
        raise ValueError(f"keep_kv must be True, False or None, got {keep_kv!r}")
    if keep_kv is False and outer == 1 and inner > 1:
        raise ValueError(
            "keep_kv=False drops K/V that another exchange brought; Ulysses alone brings none: leave it out"
        )
    if hardware is not None and not isinstance(hardware, cost.Hardware):
        raise ValueError(
            f"hardware must be a spanwise.Hardware, such as spanwise.H100 or Hardware.load(path), got {hardware!r}"
        )
    if exchange not in ("needed", "auto") and stages not in (None, 1):
        how = {"all_gather": "brings K/V in one piece", "ring": "brings K/V shard by shard"}.get(
            exchange, "cuts nothing"
        )
        raise ValueError(f"exchange {exchange!r} {how}, got stages={stages}; use exchange='needed'")
    if packing is not None:
        _check_packing(packing, masks, cu_seqlens)
    if memory_budget is not None:
        _check_count("memory_budget", memory_budget, largest=2**63)
        if num_q_heads is None or head_dim is None:
            raise ValueError(
                "a memory_budget needs num_q_heads and head_dim (and num_kv_heads): bytes follow from them"
            )
    dtype_name, itemsize = _dtype(dtype)
    if quality not in _QUALITIES:
        raise ValueError(f"quality must be one of {list(_QUALITIES)}, got {quality!r}")
    dealing = Assigner(masks, weights, int(block_size), cu_seqlens, packing, hardware or ASSUMED, quality)
    base = functools.partial(
        Plan,
        masks=masks,
        block_size=int(block_size),
        exchange="all_gather",
        stages=1,
        keep_kv=keep_kv is not False,
        weights=dealing.weights,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype_name,
        itemsize=itemsize,
        hardware=hardware or ASSUMED,
        cu_seqlens=dealing.cu_seqlens,
        packing=packing,
        reason="chosen by the caller" if outer * inner > 1 else "one rank computes everything",
    )

    def dealt(assigned: str | LoadBalancer, label: str, outer: int, inner: int) -> Plan:
        layout, kv_layout = dealing.layouts(assigned, outer, inner)
        return base(layout=layout, kv_layout=kv_layout, balancer=label, num_ranks=outer * inner, inner=inner)

    def ways_of(assigned: str | LoadBalancer, label: str = "") -> list[Plan]:
        label = label or (assigned if isinstance(assigned, str) else type(assigned).__name__)
        plan = dealt(assigned, label, outer, inner)
        return _ways(plan, exchange, stages, keep_kv, with_ring=memory_budget is not None)

    if balancer != "auto":
        ways = ways_of(balancer)
    elif outer == 1 or not dealing.square:
        ways = ways_of("contiguous")
    elif exchange == "all_gather":
        ways = [way for name in _BALANCERS_ALL_GATHER for way in ways_of(name)]
    else:
        ways = [way for name in _BALANCERS for way in ways_of(name)]
        if dealing.num_blocks >= outer:  # a search over whole blocks would leave ranks without tokens
            bound = exchange != "ring" and _exchange_bound(ways)
            ways += ways_of("local")
            if bound:  # where the exchange is what a step waits for, less balance may be worth it
                ways += ways_of(dealing.local(outer, inner, "fast", _LOOSE), f"local, imbalance to {_LOOSE:g}")
    free = exchange == "auto" and stages is None and keep_kv is not False and inner == 1 < outer
    if free and num_q_heads is not None and num_q_heads % outer == 0:
        traded = dealt(*(("contiguous",) * 2 if balancer == "auto" else (balancer, ways[0].balancer)), 1, outer)
        ways.append(traded.replace(exchange="ulysses"))
    if memory_budget is not None:
        ways = _within(ways, int(memory_budget))
    return ways[0] if len(ways) == 1 else _fastest(ways)


def _axes(num_ranks: Any) -> tuple[int, int]:
    """``(outer, inner)`` of what the caller gave."""
    if isinstance(num_ranks, (tuple, list)):
        if len(num_ranks) != 2:
            raise ValueError(f"num_ranks must be an integer or (outer, inner), got {num_ranks!r}")
        for value in num_ranks:
            _check_count("each of num_ranks", value)
        return int(num_ranks[0]), int(num_ranks[1])
    _check_count("num_ranks", num_ranks)
    return int(num_ranks), 1


def _check_count(name: str, value: Any, largest: int = _LARGEST) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value >= largest:
        raise ValueError(f"{name} must be less than {largest}, got {value}")


def _check_packing(packing: Any, masks: dict[str, SpanMask], cu_seqlens: Any) -> None:
    if not isinstance(packing, Packing):
        raise ValueError(f"packing must be a spanwise.Packing, got a {type(packing).__name__}")
    if cu_seqlens is not None:
        raise ValueError("the packing says where documents are: give packing or cu_seqlens, not both")
    for mask in masks.values():
        packing.check_mask(mask)


def _within(ways: list[Plan], budget: int) -> list[Plan]:
    """The plans whose exchanges hold at most so many bytes on any rank."""
    held = [_held(way) for way in ways]
    fitting = [way for way, num_bytes in zip(ways, held, strict=True) if num_bytes <= budget]
    if not fitting:
        least = min(range(len(ways)), key=lambda i: held[i])
        raise ValueError(
            f"no way of those considered holds at most memory_budget={budget:,} bytes for its exchange; the least is "
            f"{_told(ways[least])} with {held[least]:,} bytes: allow more, use more ranks, or keep_kv=False"
        )
    return fitting


def _held(plan: Plan) -> int:
    """Bytes that the busiest rank holds for exchanges: what all layers save, and what one holds beside that."""
    saved = {name: plan.saved_bytes(name) for name in plan.masks}
    kept = sum(weight * saved[name] for name, weight in plan.weights.items())
    beside = np.max([plan.resident_bytes(name) - saved[name] for name in plan.masks], axis=0)
    return int(np.ceil(np.max(kept + np.maximum(beside, 0))))


def _exchange_bound(ways: list[Plan]) -> bool:
    """Whether little can be hidden: a layout of hardly any traffic, contiguous, still exchanges for too long."""
    least = next(way for way in ways if way.exchange == "needed")
    work, seconds = _weighted_work(least), _with_shape(least).predict()
    balanced = seconds["compute_forward"] * (work.mean() / work.max() if work.any() else 1.0)
    return bool(seconds["exchange_forward"] > _EXPOSED * balanced)


def _ways(plan: Plan, exchange: str, stages: int | None, keep_kv: bool | None, *, with_ring: bool) -> list[Plan]:
    """The plan with every exchange and number of stages that the caller left open, simplest first."""
    if plan.num_groups == 1:
        default = "all_gather" if plan.inner == 1 else "ulysses"
        named = default if exchange == "auto" or plan.inner > 1 else exchange
        return [plan.replace(exchange=named, keep_kv=plan.keep_kv if named != "ring" else bool(keep_kv))]
    if exchange == "needed" and stages is not None:
        return [plan.replace(exchange=exchange, stages=int(stages))]
    ways = []
    if exchange in ("all_gather", "auto") and stages in (None, 1):
        ways.append(plan)
    if exchange in ("needed", "auto"):
        needed = plan.counted().replace(exchange="needed")
        pieces = [needed.replace(stages=n) for n in (_STAGES if stages is None else (int(stages),))]
        # What is not cut into so many pieces after all is no other way.
        ways += [way for way in pieces if way.stages in (1, stages) or way.stages in map(way.num_pieces, way.masks)]
    if exchange == "ring" or (exchange == "auto" and with_ring and stages is None):
        ways.append(plan.counted().replace(exchange="ring", keep_kv=bool(keep_kv)))
    return ways


def _fastest(ways: list[Plan]) -> Plan:
    """The simplest plan within the tolerance of the fastest, with the reason; plans are in order of simplicity."""
    candidates = [_priced(plan) for plan in ways]
    seconds = [candidate.seconds["total"] for candidate in candidates]
    least = min(seconds)
    fast = [i for i, value in enumerate(seconds) if value <= least * (1 + _TOLERANCE)]
    # As fast, but far more bytes to hold and to send, is not simpler.
    spare = min(candidates[i].recv_mean for i in fast) / _SAVED
    chosen = next((i for i in fast if ways[i].exchange != "all_gather" or candidates[i].recv_mean < spare), fast[0])
    plan = ways[chosen]
    # What a user would have without a search: the best of the plain ways.
    plain = [i for i, way in enumerate(ways) if "local" not in way.balancer and way.exchange == "all_gather"]
    usual = min(plain, key=lambda i: seconds[i], default=0)
    told = f"{_told(plan)}: {_ms(seconds[chosen])} a step of attention predicted on {plan.hardware.name}"
    others = [i for i in range(len(ways)) if i not in plain]
    if chosen in plain and others:
        other = min(others, key=lambda i: seconds[i])
        reason = f"{told}; no gain from the other ways, {_told(ways[other])} is the fastest of them "
        reason += f"({_ms(seconds[other])})"
    elif plain and chosen not in plain:
        gain = f"{seconds[usual] / seconds[chosen]:.2f} times as fast as" if seconds[chosen] else "against"
        reason = f"{told}, {gain} {_told(ways[usual])} ({_ms(seconds[usual])})"
    else:
        reason = f"{told}, the least of what was considered within {_TOLERANCE:.0%}"
    if plan.num_q_heads is None or plan.head_dim is None:
        heads, kv_heads, dim, _ = _nominal_shape(plan.inner).values()
        reason += f"; priced for {heads} query and {kv_heads} K/V heads of {dim}, since num_q_heads and head_dim were "
        reason += "not both given"
    return plan.replace(reason=reason, candidates=tuple(candidates))


def _nominal_shape(inner: int) -> dict[str, int]:
    """The shape to price with where none is given: the assumed one, or the next that `inner` ranks can share."""
    kv_heads, dim = _NOMINAL_KV_HEADS, _NOMINAL_DIM
    if 4 * kv_heads % inner:
        kv_heads = -(-kv_heads // inner) * inner
    return {"num_q_heads": 4 * kv_heads, "num_kv_heads": kv_heads, "head_dim": dim, "v_head_dim": dim}


def _with_shape(plan: Plan) -> Plan:
    missing = plan.num_q_heads is None or plan.head_dim is None
    return plan.replace(**_nominal_shape(plan.inner)) if missing else plan


def _weighted_work(plan: Plan) -> np.ndarray:
    return np.sum([weight * plan.work(name) for name, weight in plan.weights.items()], axis=0)


def _priced(plan: Plan) -> Candidate:
    nominal, work = _with_shape(plan), _weighted_work(plan)
    recv = np.sum([weight * plan.recv_tokens(name) for name, weight in plan.weights.items()], axis=0)
    imbalance = float(work.max() / work.mean()) if work.any() else 1.0
    return Candidate(
        plan.balancer, plan.exchange, plan.stages, imbalance, float(recv.mean()), float(recv.max()), _held(nominal),
        nominal.predict(),
    )  # fmt: skip


def _told(plan: Plan) -> str:
    pieces = f" in {plan.stages} pieces" if plan.stages > 1 else ""
    inside = f", Ulysses inside {plan.inner}" if plan.inner > 1 and plan.num_groups > 1 else ""
    return f"{plan.balancer} with {plan.exchange}{pieces}{inside}"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _as_masks(mask: Any) -> dict[str, SpanMask]:
    named = dict(mask) if isinstance(mask, Mapping) else {"default": mask}
    if not named:
        raise ValueError("make_plan needs at least one mask, got an empty mapping")
    masks: dict[str, SpanMask] = {}
    for name, value in named.items():
        if isinstance(value, SpanMask):
            masks[name] = value
        elif hasattr(value, "kv_num_blocks") and hasattr(value, "mask_mod"):
            masks[name] = SpanMask.from_block_mask(value)
        else:
            raise ValueError(
                f"mask {name!r} is a {type(value).__name__}; make_plan takes a SpanMask or a BlockMask. A dense "
                f"mask or a mask_mod becomes one with SpanMask.from_mask_mod"
            )
    return masks


def _dtype(dtype: Any) -> tuple[str, int]:
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    name = str(dtype).removeprefix("torch.")
    if name not in sizes:
        raise ValueError(f"dtype must be one of {sorted(sizes)} or the torch dtype of that name, got {dtype!r}")
    return name, sizes[name]

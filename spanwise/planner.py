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

from spanwise import balancers, cost
from spanwise.mask import SpanMask
from spanwise.plan import EXCHANGES, Candidate, Plan

_DESIGNED_EXCHANGES = ("ring", "ulysses")
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
_NOMINAL_SHAPE = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128}


def make_plan(
    mask: SpanMask | Mapping[str, Any] | Any,
    num_ranks: int,
    *,
    weights: Mapping[str, float] | None = None,
    balancer: str | balancers.LoadBalancer = "auto",
    exchange: str = "auto",
    stages: int | None = None,
    keep_kv: bool = True,
    quality: str = "best",
    block_size: int = 128,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    dtype: Any = "bfloat16",
    hardware: cost.Hardware | None = None,
    cu_seqlens: Any = None,
) -> Plan:
    """Plan context parallelism of one sequence length over ``num_ranks`` ranks. Pure: no process group is read.

    Args:
        mask: a :class:`SpanMask`, a FlexAttention ``BlockMask``, or masks by name that share one layout.
        num_ranks: size of the cp axis.
        weights: layers that use each named mask (default 1 each); what the layout balances.
        balancer: "contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local" (little K/V to read
            elsewhere under a bound on the imbalance), an object with ``assign(problem, num_ranks)``, or "auto".
        exchange: "all_gather" (every rank gets all K/V), "needed" (every rank gets what its queries read), or "auto".
        stages: pieces in which "needed" brings the K/V, each computed while the next travels; None: 1, 2 or 4,
            whichever is predicted to be fastest. An all_gather is one piece.
        keep_kv: keep received K/V for the backward; False: drop them after the forward and fetch them again.
        quality: of the "local" search, "best" or "fast" (a quarter of the time).
        block_size: tile in tokens that block-wise balancers deal out.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: attention shape, to speak of bytes and seconds
            (``num_kv_heads`` defaults to ``num_q_heads``, ``v_head_dim`` to ``head_dim``). Where they are missing,
            "auto" prices with 32 query and 8 K/V heads of 128, and says so.
        dtype: K/V dtype, a ``torch.dtype`` or its name.
        hardware: what "auto" and :meth:`Plan.predict` price with. If it has hosts, as :data:`spanwise.H100` has, the
            "local" search prefers traffic inside them. Default: H100s that are all joined by NVLink, since nothing is
            known of hosts.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one such array per batch row; needed by
            "per_document_head_tail", and the default of :func:`spanwise.shard_batch`.

    "auto" compares the predicted seconds of a step: contiguous, head_tail and local layouts (longest-first instead of
    local where all_gather is asked for, and locality buys nothing), both exchanges, and the numbers of pieces. The
    simplest way within 5 % of the fastest is taken; `Plan.candidates` and `Plan.reason` tell what was compared. Each
    exchange and number of pieces is a graph of its own to `torch.compile`: name `exchange` and `stages` where every
    batch has a plan of its own.

    Raises:
        ValueError: masks that differ in length or batch size or are not square, unknown names, bad numbers.
        NotImplementedError: an exchange or balancer that does not exist yet.
    """
    masks = _as_masks(mask)
    if exchange in _DESIGNED_EXCHANGES:
        raise NotImplementedError(f"exchange {exchange!r} does not exist yet; {list(EXCHANGES)} do")
    if exchange not in (*EXCHANGES, "auto"):
        raise ValueError(f"unknown exchange {exchange!r}; choose one of {[*EXCHANGES, 'auto']}")
    for name, value in (
        ("num_ranks", num_ranks),
        ("block_size", block_size),
        ("stages", stages),
        ("num_q_heads", num_q_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("v_head_dim", v_head_dim),
    ):
        if value is not None and (not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if value is not None and value >= _LARGEST:
            raise ValueError(f"{name} must be less than {_LARGEST}, got {value}")
    num_q_heads, num_kv_heads, head_dim, v_head_dim = (
        None if value is None else int(value)
        for value in (num_q_heads, num_kv_heads or num_q_heads, head_dim, v_head_dim or head_dim)
    )
    if num_q_heads is not None and num_kv_heads is not None and num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads={num_q_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    if not isinstance(keep_kv, bool):
        raise ValueError(f"keep_kv must be True or False, got {keep_kv!r}")
    if hardware is not None and not isinstance(hardware, cost.Hardware):
        raise ValueError(
            f"hardware must be a spanwise.Hardware, such as spanwise.H100 or Hardware.load(path), got {hardware!r}"
        )
    if exchange == "all_gather" and stages not in (None, 1):
        raise ValueError(f"an all_gather brings K/V in one piece, got stages={stages}; use exchange='needed'")
    problem = balancers.LayoutProblem(masks=masks, weights=weights, block_size=int(block_size), cu_seqlens=cu_seqlens)
    weight_of = {name: float(weight) for name, weight in (problem.weights or {}).items()}
    dtype_name, itemsize = _dtype(dtype)
    if quality not in _QUALITIES:
        raise ValueError(f"quality must be one of {list(_QUALITIES)}, got {quality!r}")
    make = functools.partial(
        Plan,
        masks=masks,
        num_ranks=int(num_ranks),
        block_size=int(block_size),
        exchange="all_gather",
        stages=1,
        keep_kv=keep_kv,
        weights=weight_of,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype_name,
        itemsize=itemsize,
        hardware=hardware or ASSUMED,
        cu_seqlens=problem.cu_seqlens_rows,
        reason="chosen by the caller" if num_ranks > 1 else "one rank computes everything",
    )

    def ways_of(label: str, assigned: str | balancers.LoadBalancer) -> list[Plan]:
        layout = balancers.assign_layout(assigned, problem, int(num_ranks))
        return _ways(make(layout=layout, balancer=label), exchange, stages)

    search = functools.partial(_local, hardware or ASSUMED, int(num_ranks))
    if not isinstance(balancer, str):
        ways = ways_of(type(balancer).__name__, balancer)
    elif balancer == "auto" and num_ranks == 1:
        ways = ways_of("contiguous", "contiguous")
    elif balancer != "auto":
        ways = ways_of(balancer, search(quality) if balancer == "local" else balancer)
    elif exchange == "all_gather":
        ways = [way for name in _BALANCERS_ALL_GATHER for way in ways_of(name, name)]
    else:
        ways = [way for name in _BALANCERS for way in ways_of(name, name)]
        if problem.num_blocks >= num_ranks:  # a search over whole blocks would leave ranks without tokens
            bound = _exchange_bound(ways)
            ways += ways_of("local", search(quality))
            if bound:  # where the exchange is what a step waits for, less balance may be worth it
                ways += ways_of(f"local, imbalance to {_LOOSE:g}", search("fast", _LOOSE))
    return ways[0] if len(ways) == 1 else _fastest(ways)


def _local(
    hardware: cost.Hardware, num_ranks: int, quality: str, max_imbalance: float | None = None
) -> balancers.LoadBalancer:
    """The local search, which prefers traffic inside hosts where the hardware has hosts and they are not all."""
    from spanwise.local_balancer import Local  # loads a compiler

    inner, outer = hardware.links[0], hardware.links[-1]
    if inner.ranks is None or inner.ranks >= num_ranks:
        return Local(max_imbalance, quality)
    price = min(1.0, outer.bandwidth / inner.bandwidth)
    return Local(max_imbalance, quality, host_size=inner.ranks, host_price=price)


def _exchange_bound(ways: list[Plan]) -> bool:
    """Whether little can be hidden: a layout of hardly any traffic, contiguous, still exchanges for too long."""
    least = next(_priced(way) for way in ways if way.exchange == "needed")
    balanced = least.seconds["compute_forward"] / least.imbalance
    return least.seconds["exchange_forward"] > _EXPOSED * balanced


def _ways(plan: Plan, exchange: str, stages: int | None) -> list[Plan]:
    """The plan with every exchange and number of stages that the caller left open, simplest first."""
    ways = []
    if plan.num_ranks == 1:
        return [plan.replace(exchange="all_gather" if exchange == "auto" else exchange)]
    if exchange == "needed" and stages is not None:
        return [plan.replace(exchange=exchange, stages=int(stages))]
    if exchange in ("all_gather", "auto") and stages in (None, 1):
        ways.append(plan)
    if exchange in ("needed", "auto"):
        needed = plan.counted().replace(exchange="needed")
        pieces = [needed.replace(stages=n) for n in (_STAGES if stages is None else (int(stages),))]
        # What is not cut into so many pieces after all is no other way.
        ways += [way for way in pieces if way.stages in (1, stages) or way.stages in map(way.num_pieces, way.masks)]
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
        reason += "; priced for 32 query and 8 K/V heads of 128, since num_q_heads and head_dim were not both given"
    return plan.replace(reason=reason, candidates=tuple(candidates))


def _priced(plan: Plan) -> Candidate:
    nominal = plan
    if plan.num_q_heads is None or plan.head_dim is None:
        nominal = plan.replace(**_NOMINAL_SHAPE)
    work = np.zeros(plan.num_ranks)
    recv = np.zeros(plan.num_ranks)
    for name, weight in plan.weights.items():
        work += weight * plan.work(name)
        recv += weight * plan.recv_tokens(name)
    imbalance = float(work.max() / work.mean()) if work.any() else 1.0
    return Candidate(
        plan.balancer, plan.exchange, plan.stages, imbalance, float(recv.mean()), float(recv.max()), nominal.predict()
    )


def _told(plan: Plan) -> str:
    pieces = f" in {plan.stages} pieces" if plan.stages > 1 else ""
    return f"{plan.balancer} with {plan.exchange}{pieces}"


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

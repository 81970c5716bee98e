"""PlanData: masks, a layout and an exchange, with the work and traffic of every rank. Frozen data.

`Plan` adds the methods that users call. Functions take a plan and compute the rest: `memory` (bytes), `seconds`,
`explain` (text), `files`, and `attention.rank_plan` (one rank's tensors).

    mask -> balancer -> layout -> Plan -> plan.local(mesh, device) -> exchange, kernels
"""

# G groups: ranks that trade heads among themselves (Ulysses); without it each rank is a group

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from spanwise.hardware import Hardware
from spanwise.layouts.layout import Layout, contiguous
from spanwise.layouts.packing import Packing
from spanwise.layouts.traffic import Readings
from spanwise.masks.arrays import Int64
from spanwise.masks.checks import check_below, check_row
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.recurrence import Recurrence
from spanwise.routes.exchanges import EXCHANGES, Exchange, resolve, route_of
from spanwise.routes.route import Route, RouteProblem

PlanT = TypeVar("PlanT", bound="PlanData")

# Cached values that follow from masks, layouts, ranks and hosts alone.
_SHARED = ("batch_size", "groups", "kv_groups", "_readings")
# Fields that change no route.
_UNROUTED = frozenset(("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "kv_row_dim", "relayout"))


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One choice that "auto" considered.

    Attributes:
        balancer, exchange, stages: as the plan's.
        imbalance: work of the busiest rank over the mean work, all masks by weight.
        recv_mean, recv_max: K/V tokens that a rank receives in a forward, all masks by weight; mean and most.
        held: bytes that the busiest rank holds for exchanges; `make_plan` compares them with a memory budget.
        seconds: result of `Plan.predict`.
        relayout: as the plan's.
        searched: whether the layout is one for little traffic, as "local" finds them.
    """

    balancer: str
    exchange: str
    stages: int
    imbalance: float
    recv_mean: float
    recv_max: float
    held: int
    seconds: Mapping[str, float]
    relayout: bool = False
    searched: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class PlanData:
    """The part of every rank. Immutable, picklable, equal when fingerprints are equal.

    Attributes:
        masks: mask by name, all over the same tokens.
        layout: token runs of every rank.
        kv_layout: K/V tokens of every rank; equals `layout`, except in cross attention.
        num_ranks: ranks of the cp axis or axes.
        inner: ranks that trade heads for tokens among themselves (Ulysses); 1 without it. Ranks ``[0, inner)`` are the
            first such group.
        block_size: tile in tokens; smaller than requested where whole tiles would have left ranks without tokens.
        balancer: name of the balancer.
        kv_exchange: moves K/V between groups.
        stages: requested number of chunks of the received K/V; `num_chunks` gives the number for each mask.
        keep_kv: whether received K/V are kept for the backward; otherwise the backward refetches them.
        weights: layers that use each mask.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: attention shape, or None if not given.
        dtype: name of the K/V dtype.
        itemsize: bytes of one K/V element.
        hardware: rates that `predict` uses.
        cu_seqlens: document offsets of each batch row, or None.
        packing: where packed sequences lie in storage, or None.
        reason: why this layout and this exchange were chosen.
        candidates: choices that "auto" compared; empty if it had no choice.
        recurrences: layers that carry a state, by name; None for a model without.
        relayout: whether these run in a contiguous layout, to which tokens move and back; see `Plan.recurrent`.
        kv_row_dim: numbers of a token that travel in place of K and V; None if these travel.
    """

    masks: dict[str, SpanMask]
    layout: Layout
    kv_layout: Layout
    num_ranks: int
    inner: int
    block_size: int
    balancer: str
    kv_exchange: Exchange
    stages: int
    keep_kv: bool
    weights: dict[str, float]
    num_q_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None
    dtype: str
    itemsize: int
    hardware: Hardware
    cu_seqlens: tuple[np.ndarray, ...] | None
    packing: Packing | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    recurrences: dict[str, Recurrence] | None = None
    relayout: bool = False
    kv_row_dim: int | None = None

    @property
    def exchange(self) -> str:
        """Name of the exchange that moves K/V between groups."""
        return self.kv_exchange.name

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return self.layout.seq_len

    @property
    def kv_len(self) -> int:
        """Keys of the sequence; `seq_len`, except in cross attention."""
        return self.kv_layout.seq_len

    @functools.cached_property
    def batch_size(self) -> int:
        """Batch rows with different masks; 1 serves any batch. The layout has as many rows, or one for all."""
        return max(mask.batch_size for mask in self.masks.values())

    def mask(self, name: str = "default") -> SpanMask:
        """The mask called ``name``; an unknown name is a ``ValueError`` that lists the known ones."""
        if name not in self.masks:
            raise ValueError(f"the plan has no mask named {name!r}; it has {sorted(self.masks)}")
        return self.masks[name]

    def runs(self, rank: int, row: int = 0) -> Int64:
        """Token runs of ``rank`` in batch row ``row``, int64 ``[n, 2]``. One layout row serves every batch row."""
        return self.layout.runs(rank, row)

    @functools.cached_property
    def causal(self) -> tuple[str, ...]:
        """Names of the masks that are the plain causal mask."""
        return tuple(sorted(name for name, mask in self.masks.items() if mask.is_causal))

    # ---------------------------------------------------------------- work and traffic of every rank

    @functools.cached_property
    def num_groups(self) -> int:
        """Groups of `inner` ranks; a group reads K/V as one."""
        return self.num_ranks // self.inner

    @functools.cached_property
    def groups(self) -> Layout:
        """Tokens of each group; `layout` itself without Ulysses."""
        return self.layout.grouped(self.inner)

    @functools.cached_property
    def kv_groups(self) -> Layout:
        """K/V tokens of each group."""
        return self.kv_layout.grouped(self.inner)

    @functools.cached_property
    def _readings(self) -> dict[str, Readings]:
        return {k: Readings(mask, self.groups, self.kv_groups, self.batch_size) for k, mask in self.masks.items()}

    def readings(self, mask: str = "default") -> Readings:
        """Work and needs of the groups under one mask."""
        self.mask(mask)
        return self._readings[mask]

    def route(self, mask: str = "default") -> Route:
        """Who sends which keys to whom, in which steps; computed once for this object."""
        if mask not in self._routes:
            of = self.readings(mask)
            host_groups = self.hardware.groups_on_a_host(self.num_groups, self.inner) or self.num_groups
            problem = RouteProblem(of.needs, of.pairs, self.kv_groups, self.stages, self.block_size, host_groups)
            self._routes[mask] = route_of(self.kv_exchange, problem, self.batch_size)
        return self._routes[mask]

    @functools.cached_property
    def _routes(self) -> dict[str, Route]:
        return {}

    def work(self, mask: str = "default") -> np.ndarray:
        """Exact mask area of each rank, (query, key) pairs summed over batch rows; int64 ``[num_ranks]``.

        Under Ulysses each rank of a group computes every pair of the group for its share of the heads: the area over
        `inner`, float64.

        >>> import spanwise
        >>> spanwise.make_plan(spanwise.SpanMask.causal(8), 2, balancer="contiguous", block_size=1).work()
        array([10, 26])
        """
        area = self.readings(mask).area
        return area if self.inner == 1 else np.repeat(area / self.inner, self.inner)

    def imbalance(self, mask: str = "default") -> float:
        """Work of the busiest rank over the mean work. 1.0 is perfect; an empty mask gives 1.0.

        >>> import spanwise
        >>> spanwise.make_plan(spanwise.SpanMask.causal(8), 2, balancer="head_tail", block_size=1).imbalance()
        1.0
        """
        work = self.work(mask)
        return float(work.max() / work.mean()) if work.any() else 1.0

    def needs(self, rank: int, mask: str = "default", row: int = 0) -> Int64:
        """K/V runs that ``rank`` reads and its group does not own, int64 ``[n, 2]``, ascending, disjoint.

        >>> import spanwise
        >>> spanwise.make_plan(spanwise.SpanMask.sliding_window(8, 2), 2, block_size=1, balancer="contiguous").needs(1)
        array([[2, 4]])
        """
        rows = self.readings(mask).needs
        return rows[check_row(row, len(rows))][check_below(rank, self.num_ranks, "rank") // self.inner]

    def needed_tokens(self, mask: str = "default") -> Int64:
        """K/V tokens that each rank reads and its group does not own, summed over batch rows; int64 ``[num_ranks]``.

        No exchange can move less for this layout.
        """
        of = self.readings(mask)
        return np.repeat(of.pairs.sum(axis=1) * of.repeats, self.inner)

    def local_work(self, mask: str = "default") -> np.ndarray:
        """The part of `work` whose keys the rank's group holds; the same dtype."""
        area = self.readings(mask).local_area
        return area if self.inner == 1 else np.repeat(area / self.inner, self.inner)

    def traffic(self, mask: str = "default") -> Int64:
        """K/V tokens that each rank receives from each other rank in a forward; int64 ``[receivers, senders]``.

        Summed over batch rows. The exchange decides: all tokens of the others, whole shards from the rank that passes
        them on, or only tokens that the receiver reads. Under Ulysses a token comes with the receiver's heads only.
        The other ranks of the group send theirs; each other group sends through its rank at the receiver's place.

        >>> import spanwise
        >>> mask = spanwise.SpanMask.causal(8)
        >>> spanwise.make_plan(mask, 2, balancer="contiguous", exchange="needed", block_size=1).traffic()
        array([[0, 0],
               [4, 0]])
        """
        groups = self.route(mask).tokens.sum(axis=0)
        if self.inner == 1:
            return groups
        between = np.kron(groups, np.eye(self.inner, dtype=np.int64))
        rank = np.arange(self.num_ranks)
        inside = (rank[:, None] // self.inner == rank // self.inner) & (rank[:, None] != rank)
        return between + inside * self.batch_size * self.kv_layout.tokens_per_rank

    def num_chunks(self, mask: str = "default") -> int:
        """Chunks in which the K/V of other groups arrive; 0 where nothing travels.

        >>> import spanwise
        >>> spanwise.make_plan(spanwise.SpanMask.causal(64), 2, exchange="needed", stages=2, block_size=8).num_chunks()
        2
        """
        return len(self.route(mask).sources)

    def recv_tokens(self, mask: str = "default") -> Int64:
        """K/V tokens that each rank receives in one forward, summed over batch rows; int64 ``[num_ranks]``."""
        tokens = np.repeat(self.route(mask).tokens.sum(axis=(0, 2)), self.inner)
        held = self.batch_size * self.kv_layout.tokens_per_rank
        return tokens + np.repeat(held.reshape(-1, self.inner).sum(axis=1), self.inner) - held

    # ---------------------------------------------------------------- the attention's shape

    @functools.cached_property
    def sum_itemsize(self) -> int:
        """Bytes of one element of dK/dV on their way home: they travel in float32 at least."""
        return max(self.itemsize, 4)

    def attention_shape(self, what: str) -> tuple[int, int, int, int]:
        """num_q_heads, num_kv_heads, head_dim, v_head_dim; ``ValueError`` that `what` needs them if not given."""
        shape = (self.num_q_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)
        missing = [n for n in ("num_q_heads", "num_kv_heads", "head_dim") if getattr(self, n) is None]
        if missing:
            raise ValueError(f"{what} needs {', '.join(missing)}: pass them to make_plan")
        return shape  # type: ignore[return-value]

    # ---------------------------------------------------------------- variants and identity

    def compute(self) -> None:
        """Compute work and traffic now: in a loader's worker, because they travel with the plan."""
        for of in self._readings.values():
            _ = [of.area, of.local_area, of.pairs]

    def replace(self: PlanT, **changes: Any) -> PlanT:
        """The plan with other fields; ``exchange`` is as in `make_plan`. Areas and traffic are kept if they may.

        >>> import spanwise
        >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(512), num_ranks=2, exchange="needed")
        >>> plan.replace(exchange="ring").exchange
        'ring'
        """
        if "exchange" in changes:
            changes["kv_exchange"] = resolve(changes.pop("exchange"))
        other = dataclasses.replace(self, **changes)
        if not changes.keys() & {"masks", "layout", "kv_layout", "num_ranks", "inner"}:
            other.__dict__.update({name: getattr(self, name) for name in _SHARED})
        if changes.keys() <= _UNROUTED and "_routes" in self.__dict__:
            other.__dict__["_routes"] = self._routes
        return other

    def recurrent(self: PlanT) -> PlanT:
        """The plan in whose layout recurrent layers run: itself, or with `relayout` one with a contiguous layout.

        Give it to `spanwise.recurrence.recurrence_route`, and both to `spanwise.relayout_route`.

        >>> import spanwise
        >>> layers = {"ssm": spanwise.Recurrence(layers=4, heads=8, key_dim=16, value_dim=16, delta_rule=False)}
        >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(64), 2, balancer="head_tail", recurrences=layers)
        >>> plan.replace(relayout=True).recurrent().layout.runs(0).tolist()
        [[0, 32]]
        """
        if not self.relayout:
            return self
        layout = contiguous(self.seq_len, self.num_ranks)
        return self.replace(layout=layout, kv_layout=layout, balancer="contiguous", relayout=False)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that must agree across ranks."""
        header = {key: value for key, value in self.header().items() if key not in ("reason", "candidates")}
        digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
        if self.kv_exchange != EXCHANGES.get(self.exchange):  # of the caller: its name says little
            for name in sorted(self.masks):
                for step in self.route(name).steps:
                    digest.update(f"{step.source} {len(step.moves)} ".encode() + step.moves.tobytes())
        digest.update(self.layout.digest())
        digest.update(self.kv_layout.digest())
        for name in sorted(self.masks):
            digest.update(name.encode())
            digest.update(self.masks[name].digest())
        for cu in self.cu_seqlens or ():
            digest.update(np.ascontiguousarray(cu, dtype=np.int64).tobytes())
        if self.packing is not None:
            digest.update(self.packing.digest())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanData) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def header(self) -> dict[str, Any]:
        """All fields that JSON can hold: everything except arrays."""
        plain = (
            "num_ranks", "inner", "block_size", "balancer", "exchange", "stages", "keep_kv", "weights", "num_q_heads",
            "num_kv_heads", "head_dim", "v_head_dim", "kv_row_dim", "dtype", "itemsize", "relayout", "reason",
        )  # fmt: skip
        header = {name: getattr(self, name) for name in plain} | {
            "hardware": self.hardware.to_dict(),
            "candidates": [dataclasses.asdict(candidate) for candidate in self.candidates],
        }
        each = {name: dataclasses.asdict(recurrence) for name, recurrence in (self.recurrences or {}).items()}
        return header | {"recurrences": each or None}

    def __getstate__(self) -> dict[str, Any]:
        # With what a loader's worker has computed; without rank plans, which hold tensors of this process's device.
        names = [*(f.name for f in dataclasses.fields(self)), *_SHARED, "fingerprint"]
        return {name: self.__dict__[name] for name in names if name in self.__dict__}

    @functools.cached_property
    def built(self) -> dict[Any, Any]:
        """Rank plans built from this object, so that each layer of a model gets the same one."""
        return {}

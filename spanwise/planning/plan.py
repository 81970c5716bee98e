"""Plan: which rank holds which tokens, what each must fetch, and what that costs.

A plan is data: masks, a layout and how K/V travel. What follows from these for every rank is counted here, exactly, on
the host; no process group is read, and `plan.fingerprint` proves that all ranks hold the same. `planner` makes plans,
`plan_file` reads and writes them, `predict` prices them, and `plan.local` (`rank_plan`) builds one rank's tensors.

    mask -> balancer -> layout -> Plan -> plan.local(mesh, device) -> shard, exchange, kernels
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spanwise import hardware as cost
from spanwise.layouts.layout import Layout
from spanwise.layouts.packing import Packing, Side
from spanwise.layouts.runs import count_tokens
from spanwise.masks.span_mask import SpanMask
from spanwise.planning import chunking as pieces
from spanwise.planning import memory as footprint
from spanwise.planning import predict
from spanwise.planning import traffic as counting

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from spanwise.attention.rank_plan import RankPlan
    from spanwise.planning.timeline import Timeline

EXCHANGES = ("all_gather", "needed", "ring", "ulysses")


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One way that "auto" considered.

    Attributes:
        balancer, exchange, stages: as the plan's.
        imbalance: busiest over mean work, all masks by weight.
        recv_mean, recv_max: K/V tokens that a rank receives in a forward, all masks by weight.
        held: bytes that the busiest rank holds for exchanges, as `make_plan` counts them against a memory budget.
        seconds: what `Plan.predict` gives for it.
    """

    balancer: str
    exchange: str
    stages: int
    imbalance: float
    recv_mean: float
    recv_max: float
    held: int
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The part of every rank. Made by `make_plan`; immutable, picklable, equal when fingerprints are equal.

    Attributes:
        masks: mask by name, all over the same tokens.
        layout: token runs of every rank.
        kv_layout: K/V tokens of every rank; `layout`, but for cross attention.
        num_ranks: ranks of the cp axis or axes.
        inner: ranks that trade heads for tokens among themselves (Ulysses); 1 without it. Ranks ``[0, inner)`` are the
            first such group, and `exchange` works between groups.
        block_size: tile in tokens.
        balancer: what dealt out the tokens.
        exchange: how K/V travel.
        stages: pieces in which the K/V of other ranks shall arrive; `num_pieces` says how many a mask gets.
        keep_kv: whether received K/V are kept for the backward, or fetched again.
        weights: layers that use each mask; what the layout balances.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: attention shape, or None if not given.
        dtype: name of the K/V dtype.
        itemsize: bytes of one K/V element.
        hardware: rates that `predict` uses.
        cu_seqlens: document offsets of each batch row, or None.
        packing: where packed sequences lie in storage, or None.
        reason: why this layout and this exchange were chosen.
        candidates: what "auto" compared; empty if nothing was left to it.
    """

    masks: dict[str, SpanMask]
    layout: Layout
    kv_layout: Layout
    num_ranks: int
    inner: int
    block_size: int
    balancer: str
    exchange: str
    stages: int
    keep_kv: bool
    weights: dict[str, float]
    num_q_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None
    dtype: str
    itemsize: int
    hardware: cost.Hardware
    cu_seqlens: tuple[np.ndarray, ...] | None
    packing: Packing | None
    reason: str
    candidates: tuple[Candidate, ...] = ()

    @property
    def seq_len(self) -> int:
        return self.layout.seq_len

    @property
    def kv_len(self) -> int:
        return self.kv_layout.seq_len

    @property
    def batch_size(self) -> int:
        """Batch rows that the masks distinguish; 1 serves any batch. The layout has as many, or one for all."""
        return max(mask.batch_size for mask in self.masks.values())

    def mask(self, name: str = "default") -> SpanMask:
        """The mask called ``name``; ``ValueError`` lists the names there are."""
        if name not in self.masks:
            raise ValueError(f"the plan has no mask named {name!r}; it has {sorted(self.masks)}")
        return self.masks[name]

    def runs(self, rank: int, row: int = 0) -> np.ndarray:
        """Token runs of ``rank`` in batch row ``row``, int64 ``[n, 2]``. One layout row serves every batch row."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, {self.num_ranks}), got {rank}")
        return self.layout.runs(rank, row if self.layout.batch_size > 1 else 0)

    @functools.cached_property
    def causal(self) -> tuple[str, ...]:
        """Names of the masks that are the plain causal mask."""
        if self.kv_len != self.seq_len:
            return ()
        causal = SpanMask.causal(self.seq_len)
        return tuple(sorted(name for name, mask in self.masks.items() if mask == causal))

    # What the ranks do and receive. Groups are the ranks that trade heads: single ranks without Ulysses.

    @property
    def num_groups(self) -> int:
        """Groups of `inner` ranks: those that read K/V as one."""
        return self.num_ranks // self.inner

    @functools.cached_property
    def groups(self) -> Layout:
        """Tokens of each group; `layout` itself without Ulysses."""
        return self.layout.grouped(self.inner)

    @functools.cached_property
    def kv_groups(self) -> Layout:
        """K/V tokens of each group."""
        return self.kv_layout.grouped(self.inner)

    def work(self, mask: str = "default") -> np.ndarray:
        """Exact mask area of each rank, (query, key) pairs summed over batch rows; int64 ``[num_ranks]``.

        Under Ulysses each rank of a group computes every pair of the group for its share of the heads: the area over
        `inner`, float64.
        """
        self.mask(mask)
        return self._of_ranks(self._work[mask])

    def _of_ranks(self, of_groups: np.ndarray) -> np.ndarray:
        return of_groups if self.inner == 1 else np.repeat(of_groups / self.inner, self.inner)

    @functools.cached_property
    def _work(self) -> dict[str, np.ndarray]:
        return {name: counting.area(mask, self.groups, self.batch_size) for name, mask in self.masks.items()}

    def imbalance(self, mask: str = "default") -> float:
        """Largest over mean work of the ranks; 1.0 is perfect, and what an empty mask has."""
        work = self.work(mask)
        return float(work.max() / work.mean()) if work.any() else 1.0

    def needs(self, rank: int, mask: str = "default", row: int = 0) -> np.ndarray:
        """K/V runs that ``rank`` reads and its group does not own, int64 ``[n, 2]``, ascending, disjoint."""
        self.mask(mask)
        return self._needs[mask][row][rank // self.inner]

    @functools.cached_property
    def _needs(self) -> dict[str, counting.Needs]:
        layouts = self.groups, self.kv_groups
        return {name: counting.needs(mask, *layouts, self.batch_size) for name, mask in self.masks.items()}

    def needed_tokens(self, mask: str = "default") -> np.ndarray:
        """K/V tokens that each rank reads and its group does not own, summed over batch rows; int64 ``[num_ranks]``.

        The least any exchange can move for this layout.
        """
        self.mask(mask)
        rows = self._needs[mask]
        groups = [sum(count_tokens(row[group]) for row in rows) for group in range(self.num_groups)]
        return np.repeat(np.array(groups, np.int64), self.inner)

    def local_work(self, mask: str = "default") -> np.ndarray:
        """The part of `work` whose keys the rank's group holds; the same dtype."""
        self.mask(mask)
        return self._of_ranks(self._local_work[mask])

    @functools.cached_property
    def _local_work(self) -> dict[str, np.ndarray]:
        layouts = self.groups, self.kv_groups
        return {name: counting.local_area(mask, *layouts, self.batch_size) for name, mask in self.masks.items()}

    def traffic(self, mask: str = "default") -> np.ndarray:
        """K/V tokens that each rank gets from each other one in a forward; int64 ``[receivers, senders]``.

        All_gather: every token of the others. Needed: those that the receiver reads. Ring: whole shards, from the rank
        that passes them on. Summed over batch rows. Under Ulysses a token comes for the receiver's heads only: those of
        the other ranks of its group, and from each other group through the rank of the same place in it.
        """
        self.mask(mask)
        groups = self.group_traffic(mask)
        if self.inner == 1:
            return groups
        traffic = np.kron(groups, np.eye(self.inner, dtype=np.int64))
        rank = np.arange(self.num_ranks)
        alike = (rank[:, None] // self.inner == rank // self.inner) & (rank[:, None] != rank)
        return traffic + alike * self.batch_size * self.kv_layout.tokens_per_rank

    def group_traffic(self, mask: str = "default") -> np.ndarray:
        """`traffic` between groups; int64 ``[receivers, senders]``."""
        self.mask(mask)
        if self.exchange == "needed":
            return self._needed_traffic[mask]
        held = self.batch_size * self.kv_groups.tokens_per_rank
        if self.exchange == "ring":
            return counting.ring_traffic(self.hops(mask), held).sum(axis=0)
        every = np.tile(held, (self.num_groups, 1))
        np.fill_diagonal(every, 0)
        return every

    def hops(self, mask: str = "default") -> tuple[int, ...]:
        """Hops of a ring that some rank reads: on hop h rank r gets what rank r − h (or group) holds."""
        self.mask(mask)
        return counting.ring_hops(self._needed_traffic[mask])

    def lists(self, mask: str = "default") -> tuple[np.ndarray, int]:
        """What the exchange cuts into pieces: tokens of each pair's list, and how many batch rows take each list.

        One list serves all batch rows, unless mask or layout differ between them.
        """
        rows = max(self.mask(mask).batch_size, self.layout.batch_size)
        alike = self.batch_size // rows
        return self._needed_traffic[mask] // alike, alike

    @functools.cached_property
    def _needed_traffic(self) -> dict[str, np.ndarray]:
        return {name: counting.needed_traffic(rows, self.kv_groups) for name, rows in self._needs.items()}

    def num_pieces(self, mask: str = "default") -> int:
        """Pieces in which the K/V of other groups arrive.

        Needed: `stages`, or one where that would be less than a block for every pair; none where nobody reads anything
        elsewhere. Ring: one for each of its `hops`. An all_gather is one piece.
        """
        self.mask(mask)
        if self.exchange == "needed":
            return pieces.num_pieces(self.lists(mask)[0], self.stages, self.block_size)
        if self.exchange == "ring":
            return len(self.hops(mask))
        return min(1, self.num_groups - 1)

    def recv_tokens(self, mask: str = "default") -> np.ndarray:
        """K/V tokens that each rank receives in one forward, summed over batch rows; int64 ``[num_ranks]``.

        The sums of `traffic` by receiver.
        """
        return self.traffic(mask).sum(axis=1)

    def recv_bytes(self, mask: str = "default") -> np.ndarray:
        """Bytes that each rank receives in one forward, int64: K and V, and under Ulysses q and the output too.

        With all_gather padding is included. Needs ``num_q_heads``, ``num_kv_heads`` and ``head_dim``.
        """
        self.mask(mask)
        self._require_shape("recv_bytes()")
        return footprint.received(self, mask)

    def resident_bytes(self, mask: str = "default") -> np.ndarray:
        """Bytes that each rank holds at most for the exchange in a layer's forward, beside its own shards; int64.

        K/V of others, as they come and in order, and what is packed to leave; under Ulysses q and the output too. What
        eager code needs with kernel "sdpa", of a batch of `batch_size` rows, to the byte. Not counted: results of
        kernels and of their merge, zeros put in padding, spare keys of "flex", and the copies that batch rows with
        masks of their own take where k and v are not ``[B, T, H, D]`` in memory.

        Needs what `recv_bytes` needs.
        """
        self.mask(mask)
        self._require_shape("resident_bytes()")
        return footprint.resident(self, mask)

    def saved_bytes(self, mask: str = "default") -> np.ndarray:
        """The part of `resident_bytes` that a layer keeps for its backward, int64."""
        self.mask(mask)
        self._require_shape("saved_bytes()")
        return footprint.saved(self, mask)

    @property
    def sum_itemsize(self) -> int:
        """Bytes of one element of dK/dV on their way home: they travel in float32 at least."""
        return max(self.itemsize, 4)

    def predict(self) -> dict[str, float]:
        """Predicted seconds of attention in one step (forward and backward), all masks by weight, on `hardware`.

        Returns:
            ``compute_forward``, ``compute_backward``: of the busiest rank. ``exchange_forward``, ``exchange_backward``:
            of the collectives. ``exposed_forward``, ``exposed_backward``: what a pass takes longer than the busiest
            rank computes. ``total``: of both passes, as simulated by :meth:`timeline`.

        Raises:
            ValueError: the plan was made without ``num_q_heads``, ``num_kv_heads`` and ``head_dim``.
        """
        self._require_shape("predict()")
        return predict.predict(self)

    def timeline(self, mask: str = "default") -> Timeline:
        """When each rank computes and K/V travel in one layer that uses ``mask``, as predicted; needs what `predict`
        needs."""
        self.mask(mask)
        self._require_shape("timeline()")
        return predict.simulate(self, mask)

    @property
    def attention_shape(self) -> tuple[int, int, int, int]:
        """num_q_heads, num_kv_heads, head_dim, v_head_dim."""
        shape = (self.num_q_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)
        assert None not in shape  # as _require_shape made sure
        return shape  # type: ignore[return-value]

    def _require_shape(self, what: str) -> None:
        missing = [n for n in ("num_q_heads", "num_kv_heads", "head_dim") if getattr(self, n) is None]
        if missing:
            raise ValueError(f"{what} needs {', '.join(missing)}: pass them to make_plan")

    def counted(self) -> Plan:
        """This plan, after everything was counted that its variants share."""
        _ = self._work, self._local_work, self._needed_traffic
        return self

    def replace(self, **changes: Any) -> Plan:
        """The plan with other fields; what was counted of masks and layout is kept unless one of these changes."""
        other = dataclasses.replace(self, **changes)
        if not changes.keys() & {"masks", "layout", "kv_layout", "num_ranks", "inner"}:
            for name in ("groups", "kv_groups", "_work", "_needs", "_local_work", "_needed_traffic", "causal"):
                if name in self.__dict__:
                    other.__dict__[name] = self.__dict__[name]
        return other

    # Identity, text, files.

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that must agree across ranks."""
        digest = hashlib.blake2b(digest_size=16)
        header = {key: value for key, value in self.header().items() if key not in ("reason", "candidates")}
        digest.update(json.dumps(header, sort_keys=True).encode())
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
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def header(self) -> dict[str, Any]:
        """Everything but arrays, as JSON holds it."""
        return {
            "num_ranks": self.num_ranks,
            "inner": self.inner,
            "block_size": self.block_size,
            "balancer": self.balancer,
            "exchange": self.exchange,
            "stages": self.stages,
            "keep_kv": self.keep_kv,
            "weights": self.weights,
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "dtype": self.dtype,
            "itemsize": self.itemsize,
            "hardware": self.hardware.to_dict(),
            "reason": self.reason,
            "candidates": [dataclasses.asdict(candidate) for candidate in self.candidates],
        }

    def told(self) -> str:
        """How K/V travel, in words."""
        between = f"exchange {self.exchange}, pieces {self.stages}"
        if self.inner == 1:
            return between
        inside = f"heads traded (Ulysses) among {self.inner} ranks"
        return inside if self.num_groups == 1 else f"{inside}, between them {between}"

    def explain(self) -> str:
        """Work, traffic, predicted time and the reason of the choice, as text for a person."""
        tokens = self.layout.tokens_per_rank
        lines = [
            f"{self.seq_len:,} tokens on {self.num_ranks} ranks: {tokens.min():,} to {tokens.max():,} tokens a rank",
            f"balancer {self.balancer}, {self.told()}, blocks of {self.block_size} tokens",
            f"why: {self.reason}",
        ]
        for name in self.masks:
            work, recv, needed = self.work(name), self.recv_tokens(name), self.needed_tokens(name)
            lines.append(
                f"mask {name!r} (weight {self.weights[name]:g}): work {work.mean():,.0f} pairs a rank, imbalance "
                f"{self.imbalance(name):.3f}; receives {recv.mean():,.0f} K/V tokens, reads {needed.mean():,.0f}"
            )
        if self.num_q_heads and self.num_kv_heads and self.head_dim:
            parts = ", ".join(f"{part} {seconds * 1e3:.3f} ms" for part, seconds in self.predict().items())
            lines.append(f"predicted on {self.hardware.name}: {parts}")
        for tried in self.candidates:
            lines.append(
                f"considered {tried.balancer}, {tried.exchange}, pieces {tried.stages}: imbalance "
                f"{tried.imbalance:.3f}, receives {tried.recv_mean:,.0f} tokens, {tried.seconds['total'] * 1e3:.3f} ms"
            )
        lines.append(f"fingerprint {self.fingerprint}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Plan(seq_len={self.seq_len}, num_ranks={self.num_ranks}, masks={sorted(self.masks)}, "
            f"balancer={self.balancer!r}, exchange={self.exchange!r}, fingerprint={self.fingerprint[:8]}…)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` (numpy's npz; no pickled code)."""
        from spanwise.planning import files as plan_file

        plan_file.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote; ``ValueError`` if the file is not one, or was altered."""
        from spanwise.planning import files as plan_file

        return plan_file.load(path)

    def __getstate__(self) -> dict[str, Any]:
        # What is cached can be computed again, and a rank's tensors have no place in a message between processes.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    # The torch side.

    @functools.cached_property
    def built(self) -> dict[Any, RankPlan]:
        """Rank plans that `local` has built from this object, so that each layer of a model gets the same one."""
        return {}

    def local(
        self, mesh: DeviceMesh | None, device: torch.device | str | None = None, *, kernel: str = "auto"
    ) -> RankPlan:
        """This rank's tensors, as a frozen pytree; see :func:`spanwise.attention.rank_plan.local_plan`."""
        from spanwise.attention import rank_plan

        return rank_plan.local_plan(self, mesh, device, kernel=kernel)

    def shard(self, x: Any, rank: int, dim: int = 1, *, batch_dim: int | None = 0, side: Side = "q") -> Any:
        """``rank``'s shard of ``x``, a tensor or a pytree of tensors, without a mesh; see :func:`spanwise.shard`."""
        from spanwise.batch import batch

        return batch.shard_for_rank(self, rank, x, dim=dim, batch_dim=batch_dim, side=side)

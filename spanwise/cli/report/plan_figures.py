"""Every number of a plan's report, read off the plan once. Text, HTML and JSON show these and compute nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from spanwise.cli.report.compare import Comparison
from spanwise.planning.grids import Grid
from spanwise.planning.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Source of the planned sequence: a file, how it was packed, and the sequence's index among `sequences`."""

    origin: str
    packing: str
    sequence: int
    sequences: int

    def describe(self) -> str:
        """The source in a line."""
        which = f"sequence {self.sequence} of {self.sequences:,}, counted from 0; " if self.sequences > 1 else ""
        return f"{self.origin}: {which}{self.packing}"


#: Names in JSON of the figures of a mask that have others here.
_JSON = {
    "work": "work_pairs", "local": "local_pairs", "traffic": "traffic_tokens", "compute": "compute_seconds",
    "exchange": "exchange_seconds", "exposed": "exposed_seconds", "end": "end_seconds", "intervals": "timeline",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class MaskFigures:
    """One mask of a plan; arrays have an entry a rank.

    Attributes:
        note: the keys that a row reads, in words.
        layers: layers that use the mask.
        pairs: visible (query, key) pairs of the whole mask.
        imbalance: busiest over mean rank.
        work: pairs of each rank; `local`: those whose key it holds.
        needed_tokens: K/V tokens that a rank reads and does not hold; `recv_tokens`: those it receives in a forward.
        recv_bytes: bytes it receives in a forward, with q and the output under Ulysses.
        resident_bytes: bytes it holds at most for the exchange; `saved_bytes`: those it keeps for the backward.
        traffic: K/V tokens ``[receivers, senders]`` of a forward.
        compute, exchange: predicted seconds of each rank's streams, forward and backward.
        exposed: seconds of the exchange while nothing is computed.
        end: seconds at which the last rank is done.
        intervals: of the timeline.
    """

    name: str
    note: str
    layers: float
    pairs: int
    imbalance: float
    work: np.ndarray
    local: np.ndarray
    needed_tokens: np.ndarray
    recv_tokens: np.ndarray
    recv_bytes: np.ndarray
    resident_bytes: np.ndarray
    saved_bytes: np.ndarray
    traffic: np.ndarray
    compute: np.ndarray
    exchange: np.ndarray
    exposed: np.ndarray
    end: float
    intervals: tuple[Any, ...]

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["intervals"] = [dataclasses.asdict(interval) for interval in self.intervals]
        return {_JSON.get(k, k): v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}


#: Attributes of a plan that JSON holds as they are.
_OF_PLAN = (
    "fingerprint", "inner", "block_size", "balancer", "exchange", "stages", "reason", "num_q_heads", "num_kv_heads",
    "head_dim", "dtype",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """A plan and all figures of its report."""

    plan: Plan
    source: Source
    command: str
    comparison: Comparison | None
    lengths: np.ndarray
    predict: dict[str, float]
    candidates: tuple[dict[str, Any], ...]
    masks: tuple[MaskFigures, ...]
    grids: tuple[Grid, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON, without the plan's arrays. Names hold the unit: seconds, bytes, tokens or pairs."""
        plan = self.plan
        return {
            "command": self.command,
            "source": dataclasses.asdict(self.source),
            "tokens": plan.seq_len,
            "documents": len(self.lengths),
            "document_tokens": self.lengths.tolist(),
            "ranks": plan.num_ranks,
            **{name: getattr(plan, name) for name in _OF_PLAN},
            "hardware": plan.hardware.to_dict(),
            "tokens_per_rank": plan.layout.tokens_per_rank.tolist(),
            "predicted_seconds": self.predict,
            "candidates": list(self.candidates),
            "masks": [mask.as_dict() for mask in self.masks],
            "compare_ranks": self.comparison.as_dict() if self.comparison else None,
            "grids": [grid.as_dict() for grid in self.grids],
        }


def figures(
    plan: Plan,
    source: Source,
    command: str,
    comparison: Comparison | None = None,
    notes: Mapping[str, str] | None = None,
) -> Figures:
    """All figures of `plan`; ``ValueError`` unless it has the attention's shape and one batch row.

    Args:
        command: the shell command that makes the plan.
        comparison: other numbers of ranks, if they were compared.
        notes: the keys that a row reads under each mask, in words.
    """
    if plan.batch_size > 1:
        raise ValueError(
            f"a report shows one sequence, and the plan has {plan.batch_size} batch rows with masks of their own"
        )
    lengths = np.diff(plan.cu_seqlens[0]) if plan.cu_seqlens else np.array([plan.seq_len])
    candidates = tuple({**dataclasses.asdict(one), "seconds": dict(one.seconds)} for one in plan.candidates)
    masks = tuple(mask_figures(plan, name, (notes or {}).get(name, "")) for name in plan.masks)
    return Figures(plan, source, command, comparison, lengths, plan.predict(), candidates, masks)


def mask_figures(plan: Plan, name: str, note: str) -> MaskFigures:
    """The figures of one of the plan's masks."""
    intervals = tuple(plan.timeline(name).intervals)
    compute, exchange, exposed = np.zeros((3, plan.num_ranks))
    for rank in range(plan.num_ranks):
        busy, moving = (_union(intervals, rank, stream) for stream in ("compute", "exchange"))
        compute[rank], exchange[rank] = (float((runs[:, 1] - runs[:, 0]).sum()) for runs in (busy, moving))
        exposed[rank] = sum(stop - start for start, stop in uncovered(moving, busy))
    return MaskFigures(
        name=name,
        note=note,
        layers=plan.weights[name],
        pairs=int(plan.work(name).sum()),
        imbalance=plan.imbalance(name),
        work=plan.work(name),
        local=plan.local_work(name),
        needed_tokens=plan.needed_tokens(name),
        recv_tokens=plan.recv_tokens(name),
        recv_bytes=plan.recv_bytes(name),
        resident_bytes=plan.resident_bytes(name),
        saved_bytes=plan.saved_bytes(name),
        traffic=plan.traffic(name),
        compute=compute,
        exchange=exchange,
        exposed=exposed,
        end=max((interval.end for interval in intervals), default=0.0),
        intervals=intervals,
    )


def _union(intervals: tuple[Any, ...], rank: int, stream: str) -> np.ndarray:
    """Seconds in which a stream of a rank is busy, float ``[n, 2]``, ascending and disjoint."""
    merged: list[list[float]] = []
    for start, end in sorted((i.start, i.end) for i in intervals if i.rank == rank and i.stream == stream):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged).reshape(-1, 2)


def uncovered(intervals: np.ndarray, cover: np.ndarray) -> list[tuple[float, float]]:
    """Parts of `intervals` outside `cover`; both float ``[n, 2]``, ascending and disjoint."""
    parts = []
    for start, stop in intervals.tolist():
        at = start
        for low, high in cover[(cover[:, 1] > start) & (cover[:, 0] < stop)].tolist():
            if low > at:
                parts.append((at, low))
            at = max(at, high)
        if at < stop:
            parts.append((at, stop))
    return parts


def exposed_parts(intervals: tuple[Any, ...], rank: int) -> list[tuple[float, float]]:
    """(start, end) in seconds of each time that `rank` exchanges and computes nothing."""
    return uncovered(_union(intervals, rank, "exchange"), _union(intervals, rank, "compute"))


def sample_ranks(values: np.ndarray, most: int) -> list[int]:
    """Ranks to show, ascending: all, or `most` of them evenly from the largest value to the smallest."""
    if len(values) <= most:
        return list(range(len(values)))
    order = np.argsort(-values, kind="stable")
    return sorted(order[np.linspace(0, len(order) - 1, most).round().astype(int)].tolist())

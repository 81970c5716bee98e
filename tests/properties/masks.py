"""Random masks in words, drawn by Hypothesis. Imports nothing of spanwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.properties.cells import MaskCase, slice_cells


class Rng:
    """Numbers drawn by Hypothesis, with the names of numpy's generator: a case that fails shrinks to a simple one."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def random(self) -> float:
        """One of 20 numbers below 1; the simplest is the largest, so that rare choices shrink away."""
        return 0.975 - self._draw(st.sampled_from(range(20))) / 20

    def integers(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high - 1))

    def choice(self, options: Sequence[Any], p: Sequence[float] | None = None) -> Any:
        if p is None:
            return self._draw(st.sampled_from(options))
        return self._draw(
            st.sampled_from([one for one, share in zip(options, p, strict=True) for _ in range(round(40 * share))])
        )

    def array(self) -> np.random.Generator:
        """For arrays, whose entries do not shrink one by one."""
        return np.random.default_rng(self._draw(st.integers(0, 2**32 - 1)))


SQUARE = (
    "full", "causal", "sliding_window", "documents", "prefix_lm", "shared_prefix", "block_causal", "spans", "slices",
    "mask_mod", "block_mask",
)  # fmt: skip
CROSS = ("full", "spans", "slices", "mask_mod", "block_mask")


def random_mask(rng: Rng, q_len: int, kv_len: int, depth: int = 1) -> MaskCase:
    """A mask of one batch row."""
    if depth and rng.random() < 0.2:
        parts = tuple(random_mask(rng, q_len, kv_len, depth - 1) for _ in range(2))
        return MaskCase(rng.choice(["and", "or"]), {}, parts)
    kind = rng.choice(SQUARE if q_len == kv_len else CROSS)
    return MaskCase(kind, _args(kind, rng, q_len, kv_len))


def random_batch(rng: Rng, q_len: int, kv_len: int, batch: int) -> MaskCase:
    """A mask with a row for each of `batch` batch rows."""
    return MaskCase("stack", {}, tuple(random_mask(rng, q_len, kv_len) for _ in range(batch)))


def cuts(rng: Rng, length: int, parts: int) -> list[int]:
    """Offsets of `parts` pieces of `length`, some of them empty."""
    return [0, *sorted(rng.integers(0, length + 1) for _ in range(parts - 1)), length]


def window(rng: Rng, length: int) -> list[int]:
    """``(left, right)``; sometimes no limit on the left, sometimes 0."""
    left = int(rng.choice([-1, 0, 1, rng.integers(0, length + 1)]))
    return [left, int(rng.choice([0, 1, rng.integers(0, length + 1)]))]


def _args(kind: str, rng: Rng, q_len: int, kv_len: int) -> dict[str, Any]:
    if kind == "full":
        return {"q_len": q_len, "kv_len": kv_len}
    if kind == "causal":
        return {"seq_len": q_len}
    if kind == "sliding_window":
        left, right = window(rng, q_len)
        return {"seq_len": q_len, "left": left, "right": right}
    if kind in ("mask_mod", "block_mask"):
        stride, reach = rng.integers(2, 9), rng.integers(0, 4)
        return {"q_len": q_len, "kv_len": kv_len, "stride": max(stride, kv_len // 16), "reach": reach}
    if kind == "spans":
        return _spans(rng, q_len, kv_len)
    if kind == "slices":
        return _slices(rng, q_len, kv_len)
    if kind == "shared_prefix":
        prefix = rng.integers(0, q_len + 1)
        return {"prefix_len": prefix, "suffix_lens": np.diff(cuts(rng, q_len - prefix, 4)).tolist()}
    if kind == "block_causal":
        previous = None if rng.random() < 0.4 else rng.integers(0, 4)
        some = rng.integers(0, q_len + 1) if rng.random() < 0.5 else 0
        block_len = rng.integers(1, q_len + 1)
        return {"seq_len": q_len, "block_len": block_len, "num_previous": previous, "global_tokens": some}
    cu_seqlens = cuts(rng, q_len, rng.integers(1, 7))
    if kind == "prefix_lm":
        return {"cu_seqlens": cu_seqlens, "prefix_lens": [rng.integers(0, n + 1) for n in np.diff(cu_seqlens)]}
    return {"cu_seqlens": cu_seqlens, **_reach(rng, q_len, 0.4)}


def _reach(rng: Rng, q_len: int, windows: float) -> dict[str, Any]:
    """How far a row reads inside its document; `windows`: share of the masks that have one."""
    causal = rng.random() < 0.7
    near = window(rng, q_len) if rng.random() < windows else None
    # Libraries read [-1, 0] of rows that are not causal in two ways, so it is refused.
    return {"causal": causal or near == [-1, 0], "window": near}


def _spans(rng: Rng, q_len: int, kv_len: int) -> dict[str, Any]:
    """Rough spans (no two rows alike) or smooth ones, with rows that read nothing."""
    num_spans, array = rng.integers(1, 5), rng.array()
    if rng.random() < 0.5:
        edges = array.integers(0, kv_len + 1, (2 * num_spans, q_len))
    else:
        first = array.integers(0, kv_len + 1, (2 * num_spans, 1))
        edges = np.clip(first + np.cumsum(array.integers(0, 3, (2 * num_spans, q_len)), axis=1), 0, kv_len)
    edges = np.sort(edges, axis=0)
    start, end = edges[0::2], edges[1::2]
    empty = array.random(q_len) < rng.choice([0, 0.3, 1.0], p=[0.45, 0.45, 0.1])
    return {"start": start.tolist(), "end": np.where(empty, start, end).tolist(), "kv_len": kv_len}


def _slices(rng: Rng, q_len: int, kv_len: int) -> dict[str, Any]:
    """Slices that do not overlap."""
    held = np.zeros((q_len, kv_len), bool)
    names: dict[str, list[Any]] = {"q_ranges": [], "k_ranges": [], "types": []}
    for _ in range(rng.integers(1, 12)):
        q, k = (sorted(rng.integers(0, n + 1) for _ in range(2)) for n in (q_len, kv_len))
        kind = rng.integers(0, 4)
        more = slice_cells(q, k, kind, q_len, kv_len)
        if not (held & more).any():
            held |= more
            for name, value in zip(names, (q, k, kind), strict=True):
                names[name].append(value)
    return {**names, "q_len": q_len, "kv_len": kv_len}


def random_packing(rng: Rng, q_len: int, cross: bool, multiple: int | None) -> MaskCase:
    """Packed sequences in storage with padding; `multiple`: slots of such a length, for the dual-chunk order."""
    count = rng.integers(1, 5)
    q_lens, q_starts, q_slots = _slots(rng, q_len, count, multiple)
    kv_lens, kv_starts, kv_slots = q_lens, q_starts, q_slots
    if cross:
        kv_lens, kv_starts, kv_slots = _slots(rng, rng.integers(1, 2 * q_len + 1), count, multiple)
    return MaskCase("packing", {
        "q_lens": q_lens, "kv_lens": kv_lens, "q_starts": q_starts, "kv_starts": kv_starts, "q_len": q_slots,
        "kv_len": kv_slots, **_reach(rng, q_len, 0.3), "align": rng.choice(["top_left", "bottom_right"]),
    })  # fmt: skip


def _slots(rng: Rng, total: int, count: int, multiple: int | None) -> tuple[list[int], list[int], int]:
    """Lengths and first rows of sequences, and rows of storage."""
    lens = np.diff(cuts(rng, total, count)).tolist()
    starts, at = [], 0
    for n in lens:
        starts.append(at)
        at += n + rng.integers(0, 4) if multiple is None else -(-n // multiple) * multiple
    return lens, starts, max(at, multiple or 1)

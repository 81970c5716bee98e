"""Seconds of attention under context parallelism, for the methods that others measured, with their padding.

spanwise's own cost model prices plans (`Plan.timeline`) and collectives (`Hardware`). The methods of others differ from
its plans in padding, in copies, and in which transfers overlap with compute; those are read off their code.

A method is a ring over `ring` groups of ranks, Ulysses inside each group, and a style of ring:

    zigzag      2 · ring chunks of each padded document, a rank has two; K/V travel while it computes
    ring        one contiguous chunk a rank: the last rank computes nearly always
    stripe      every ring-th token: every step has a causal mask
    gather      zigzag, all K/V gathered before compute
    llama3      contiguous chunks of the packed sequence, all K/V gathered before compute
    dcp         Megatron's dynamic CP: a document on as few ranks as hold it, zigzag there
    magi        blocks of 2,048 tokens by longest first, needed K/V in two stages: a plan of spanwise
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

import spanwise
from benchmarks.published.settings import Kernel, Machine
from spanwise.advice.model import CONTENTION

# A copy through an index tensor that is as large as the data (torch.gather), in copies of the same bytes.
_INDEXED = 1.5
# Copies around a call of MagiAttention's baselines, in those of its queries: rows picked and put back by index because
# documents are padded, the result merged (exps/dist_attn/baselines/utils_cp.py); forward, backward.
_PADDED_CALL = (2 * _INDEXED + 0.5, 4 * _INDEXED + 0.5)
# Merge of a step's result, in copies of the queries: one kernel in bfloat16, or torch operations in float32.
_MERGE, _MERGE_PADDED, _MERGE_UNFUSED = 1.5, (5.5, 8.5), 4.5
_MAGI_BLOCK, _MAGI_STAGES, _DCP_TOKENS = 2048, 2, 8192


@dataclasses.dataclass(frozen=True)
class Method:
    """How ranks share attention; see the module."""

    style: str
    ring: int = 1
    ulysses: int = 1
    padded: bool = False
    fused: bool = True
    hierarchical: bool = False
    double: bool = False


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention over packs of documents (each a tuple of lengths) on so many ranks."""

    packs: tuple[tuple[int, ...], ...]
    causal: bool
    heads: int
    kv_heads: int
    dim: int
    machine: Machine
    kernel: Kernel
    itemsize: int = 2

    def area(self, pack: tuple[int, ...]) -> float:
        """Pairs of a pack."""
        return sum(n * (n + 1) / 2 if self.causal else float(n) * n for n in pack)

    @property
    def flops(self) -> float:
        """Of a forward, mean over packs."""
        return 4.0 * self.heads * self.dim * float(np.mean([self.area(pack) for pack in self.packs]))


def method_of(words: str, ranks: int, host: int = 8) -> Method:
    """The method that a description names; ``ValueError`` if none."""
    text = words.lower()
    padded = text in ("ring_p2p", "ring_allgather", "usp", "loongtrain", "hybrid_dcp", "ulysses")
    two = re.search(r"(?:usp|ulysses)[ -]?(\d+) ?x ?(?:ring|allgather)?[ -]?(\d+)", text)
    hybrid = re.search(r"hp(\d+)/cp(\d+)", text)
    if ranks == 1:
        return Method("zigzag")
    if two or hybrid:
        ulysses, ring = (int(n) for n in (two or hybrid).groups())  # type: ignore[union-attr]
        style = "gather" if "allgather" in text else "zigzag"
        return Method(style, ring, ulysses, padded, double="loongtrain" in text)
    if text.startswith("magi"):
        return Method("magi", ranks, hierarchical="native" in text)
    if text in ("usp", "loongtrain"):
        return Method("zigzag", max(1, ranks // host), min(ranks, host), padded, double=text == "loongtrain")
    if "ulysses" in text or "a2a" in text:
        return Method("zigzag", 1, ranks, padded)
    if "dcp" in text:
        return Method("dcp", ranks, padded=padded)
    if re.search("all.?gather|torch context.parallel", text):
        return Method("gather", ranks, padded=padded)
    for name, style in (
        ("llama3", "llama3"), ("strip", "stripe"), ("zigzag", "zigzag"), ("contiguous", "ring"), ("ring_cp", "ring"),
        ("p2p", "zigzag"), ("megatron", "zigzag"), ("balanced", "zigzag"), ("pass-kv", "zigzag"), ("ring", "ring"),
    ):  # fmt: skip
        if name in text:
            fused = padded or "megatron" in text or "p2p" in text
            return Method(style, ranks, padded=padded, fused=fused)
    raise ValueError(f"method {words!r} is unknown")


def seconds(problem: Problem, method: Method, *, backward: bool) -> float:
    """Seconds of a pass; the mean over packs is that of rates, as benchmarks report them."""
    times = [_pack_seconds(problem, pack, method, backward) for pack in problem.packs]
    areas = [problem.area(pack) for pack in problem.packs]
    return float(np.mean(areas) / np.mean([area / time for area, time in zip(areas, times, strict=True)]))


def _pack_seconds(problem: Problem, pack: tuple[int, ...], method: Method, backward: bool) -> float:
    if method.style == "magi":
        return _planned(problem, pack, method, backward)
    if method.style == "dcp":
        return _dynamic(problem, pack, method, backward)
    documents = np.array(pack, dtype=np.float64)
    ranks = method.ring * method.ulysses
    tokens = float(documents.sum()) / ranks
    if method.style in ("zigzag", "gather") and method.ring > 1:
        documents = -(-documents // (2 * method.ring)) * 2 * method.ring
    held = float(documents.sum()) / method.ring  # of a group, with padding
    heads = -(-problem.heads // method.ulysses)  # heads are padded to a multiple
    trade = _trade_seconds(problem, method, held / method.ulysses, heads, backward)
    copies = _copy(problem, held * heads) * _PADDED_CALL[backward] if method.padded else 0.0
    if method.style in ("gather", "llama3"):
        return trade + _gathered(problem, pack, documents, method, heads, copies, backward)
    first, each, calls = _ring_steps(problem, documents, method, heads, backward)
    kv = 2 * held * max(1, problem.kv_heads / method.ulysses) * problem.dim * problem.itemsize
    hop = 0.0
    if method.ring > 1:  # rings of Ulysses groups run side by side
        traffic = np.roll(np.eye(method.ring), 1, axis=1) * kv * (2 if backward else 1)
        hop = problem.machine.hardware.all_to_all_seconds(np.kron(traffic, np.eye(method.ulysses)))
    merge = _MERGE if method.fused else _MERGE_UNFUSED
    merge = (_MERGE_PADDED[backward] if method.padded else merge) * _copy(problem, tokens * problem.heads)
    step = each + (copies + merge) * calls
    overlapped = max(step + CONTENTION * min(hop, step), hop)
    last = hop * (2 if method.double else 1) if backward else 0.0  # gradients travel home; a window's wait before
    return trade + max(first + copies, hop) + (method.ring - 1) * overlapped + (last if method.ring > 1 else 0.0)


def _ring_steps(
    problem: Problem, documents: np.ndarray, method: Method, heads: int, backward: bool
) -> tuple[float, float, float]:
    """Kernel seconds of a ring's own step and of each other, and the part of the queries that another step reads."""
    call = functools.partial(problem.kernel.seconds, problem.machine, heads=heads, dim=problem.dim, backward=backward)
    chunk = documents / method.ring
    half = chunk / 2
    own = call(chunk, chunk, chunk * chunk / 2 if problem.causal else chunk * chunk, edge=problem.causal)
    if method.ring == 1:
        return own, 0.0, 0.0
    if not problem.causal or method.style == "ring":  # of a causal contiguous ring the last rank is the slowest
        return own, call(chunk, chunk, chunk * chunk, edge=False), 1.0
    if method.style == "stripe":
        return own, own, 1.0
    # Half of the steps read the first half of the keys with all queries, the others all keys with half of them.
    return own, (call(chunk, half, chunk * half, edge=False) + call(half, chunk, half * chunk, edge=False)) / 2, 0.75


def _copy(problem: Problem, rows: float) -> float:
    """Seconds to copy rows of one head each."""
    return problem.machine.hardware.copy_seconds(rows * problem.dim * problem.itemsize)


def _trade_seconds(problem: Problem, method: Method, tokens: float, heads: int, backward: bool) -> float:
    """Ulysses: q, k, v to heads and the output back, or their gradients; a collective for each, with two copies."""
    size = method.ulysses
    if size == 1:
        return 0.0
    hardware, total = problem.machine.hardware, 0.0
    kv_heads = -(-problem.kv_heads // size) * size  # repeated or padded where ranks outnumber them
    for count in (heads * size, kv_heads, kv_heads, heads * size):
        num_bytes = tokens * count * problem.dim * problem.itemsize
        total += hardware.all_to_all_seconds(np.full((size, size), num_bytes / size))
        total += 2 * hardware.copy_seconds(num_bytes)
    return total


def _gathered(
    problem: Problem, pack: tuple[int, ...], documents: np.ndarray, method: Method, heads: int, copies: float,
    backward: bool,
) -> float:  # fmt: skip
    """All K/V gathered first; in the backward once more, and their gradients are scattered after it."""
    hardware, ranks = problem.machine.hardware, method.ring
    held = float(documents.sum()) / ranks * max(1, problem.kv_heads / method.ulysses) * problem.dim * problem.itemsize
    exchange = 2 * hardware.all_gather_seconds(held, ranks)
    exchange += 2 * hardware.reduce_scatter_seconds(held, ranks) if backward else 0.0
    every = 2 * hardware.copy_seconds(held * ranks)  # K and V of all ranks
    if method.padded:  # reordered, and picked by index for each of two calls; gradients put back, summed, reordered
        exchange += every * (6 * _INDEXED + 4.5 if backward else 3 * _INDEXED)
    call = functools.partial(problem.kernel.seconds, problem.machine, heads=heads, dim=problem.dim, backward=backward)
    if method.style == "llama3":  # equal contiguous chunks: queries and pairs of each document on each rank
        ends, times = np.cumsum(pack, dtype=np.float64), []
        starts, size = ends - np.array(pack), float(ends[-1]) / ranks
        for rank in range(ranks):
            low, high = np.maximum(starts, rank * size), np.minimum(ends, (rank + 1) * size)
            queries = np.maximum(high - low, 0.0)
            seen = (low + high) / 2 - starts if problem.causal else ends - starts
            times.append(call(queries, 2 * seen if problem.causal else seen, queries * seen, edge=problem.causal))
        return exchange + max(times)
    area = documents * documents / ranks / (2 if problem.causal else 1)
    read = documents / 2 if problem.causal else documents  # by each of a rank's two chunks, in the mean
    halves = 2 * call(documents / ranks / 2, read, area / 2, edge=problem.causal)
    return exchange + halves + copies


def _dynamic(problem: Problem, pack: tuple[int, ...], method: Method, backward: bool) -> float:
    """Megatron's dynamic CP (Megatron-LM#2282): documents one after another, each on a power of two of ranks."""
    work = np.zeros(method.ring)
    for length in sorted(pack, reverse=True):
        size = min(method.ring, 2 ** max(0, math.ceil(math.log2(length / _DCP_TOKENS))))
        one = dataclasses.replace(method, style="zigzag", ring=size, padded=size > 1)
        group = int(work.reshape(-1, size).max(axis=1).argmin()) if method.ring % size == 0 else 0
        ranks = slice(group * size, (group + 1) * size)
        work[ranks] = work[ranks].max() + _pack_seconds(problem, (length,), one, backward)
    return float(work.max())


@functools.lru_cache(maxsize=256)
def _plan(
    pack: tuple[int, ...], causal: bool, ranks: int, hierarchical: bool, shape: tuple[int, int, int]
) -> spanwise.Plan:
    mask = spanwise.SpanMask.documents(np.append(0, np.cumsum(pack)), causal=causal)
    heads, kv_heads, dim = shape
    exchange, stages = ("hierarchical", None) if hierarchical and ranks > 8 else ("needed", _MAGI_STAGES)
    return spanwise.make_plan(
        mask, ranks, balancer="lpt", block_size=_MAGI_BLOCK, exchange=exchange, stages=stages, num_q_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim,
    )  # fmt: skip


def _planned(problem: Problem, pack: tuple[int, ...], method: Method, backward: bool) -> float:
    """A plan like MagiAttention's, priced by spanwise itself."""
    shape = (problem.heads, problem.kv_heads, problem.dim)
    plan = _plan(pack, problem.causal, method.ring, method.hierarchical, shape)
    hardware = dataclasses.replace(
        problem.machine.hardware, attention_flops=problem.kernel.forward,
        attention_backward_flops=problem.kernel.backward,
    )  # fmt: skip
    timeline = plan.replace(hardware=hardware).timeline()
    return (timeline.backward if backward else timeline.forward).seconds

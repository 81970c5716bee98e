"""How many CP ranks, which exchange, how fast, will it fit: degrees of parallelism for a model and its documents. Pure.

    lengths -> documents of the slowest replica -> plan of its fullest micro-batch -> seconds and bytes of a step

Every CP x DP x TP is bounded from below: its compute, without exchange. Plans are made in the order of these bounds,
for those that could still be the advice.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from spanwise import hardware as rates
from spanwise.advice.model import RECOMPUTED, Model, Step, apart, read_model
from spanwise.hardware import Hardware, attention_flops
from spanwise.masks.arrays import Float64, Int64
from spanwise.masks.checks import check_lengths, check_positive
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan
from spanwise.planning.memory import held as held_bytes

# Measured over predicted seconds of published steps (benchmarks/results/published.json, "steps"): a twentieth below the
# first, half below the second, a twentieth above the third. Nominal rates, and rates fitted on one run of the machine.
NOMINAL, MEASURED = (0.95, 1.39, 2.24), (0.79, 1.02, 1.26)
# The same of memory, its ends.
MEMORY = (0.88, 1.41)
# The simplest within so much of the fastest is taken, as `make_plan` does.
_TIE = 1.05
# Memory for what no formula counts: fragments, workspaces, the communicator's buffers.
_USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Choice:
    """Degrees of parallelism, and what a step of them costs.

    Attributes:
        dp, cp, tp: replicas, ranks that share a sequence, ranks that share each layer.
        exchange, balancer: of the plan of the fullest micro-batch; "none" without CP.
        tokens: of a rank in it; `micro_batches`: of a step.
        parts: predicted seconds of a step, by name.
        memory: predicted bytes of a rank.
        spread: measured over predicted seconds of published steps: low, median, high.
    """

    dp: int
    cp: int
    tp: int
    exchange: str
    balancer: str
    tokens: int
    micro_batches: int
    parts: Mapping[str, float]
    memory: int
    spread: tuple[float, float, float]

    @property
    def predicted(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def seconds(self) -> float:
        """Expected seconds of a step."""
        return self.spread[1] * self.predicted

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which nine tenths of such steps lie."""
        return self.spread[0] * self.predicted, self.spread[2] * self.predicted

    def __str__(self) -> str:
        how = "no CP" if self.cp == 1 else f"CP {self.cp} ({self.exchange}, {self.balancer})"
        low, high = self.interval
        return (
            f"{how}, DP {self.dp}, TP {self.tp}: {self.seconds:.3g} s a step ({low:.3g} to {high:.3g}), "
            f"{MEMORY[0] * self.memory / 1e9:.0f} to {MEMORY[1] * self.memory / 1e9:.0f} GB, "
            f"{self.micro_batches} x {self.tokens:,} tokens a rank"
        )


@dataclasses.dataclass(frozen=True)
class Advice:
    """Choices from the best, the attention kernel, and what to measure to decide between the first two."""

    choices: tuple[Choice, ...]
    kernel: str
    measure: str

    @property
    def best(self) -> Choice:
        """The first choice."""
        return self.choices[0]

    def __str__(self) -> str:
        lines = [f"{i + 1}. {choice}" for i, choice in enumerate(self.choices[:5])]
        return "\n".join([*lines, f"kernel: {self.kernel}", self.measure])


def advise(
    model: Mapping[str, Any] | str | os.PathLike[str] | Model,
    lengths: Any,
    num_ranks: int,
    *,
    hardware: Hardware | None = None,
    memory: int | None = None,
    checkpointing: str = "full",
    max_tp: int | None = None,
) -> Advice:
    """Degrees of parallelism for a model trained on packed documents, with intervals from published measurements.

    Parameters are sharded over dp x cp (FSDP), in bfloat16 with float32 states of Adam; replicas get documents longest
    first, and as few micro-batches as memory holds.

    Args:
        model: a Hugging Face config, as a dict or the path of its `config.json`; dense, full or sliding attention.
        lengths: tokens of each document of one global batch, int ``[num_documents]``.
        num_ranks: devices.
        hardware: rates; default H100. With a file of `spanwise calibrate` intervals are narrower.
        memory: bytes of a device; default: nine tenths of the hardware's.
        checkpointing: "full", "selective" or "none".
        max_tp: largest tensor-parallel degree; default: ranks of a host.

    Raises:
        ValueError: an unknown model, or nothing that fits into memory.

    >>> config = dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
    ...               intermediate_size=14336, vocab_size=128256)
    >>> found = advise(config, [4096] * 64, 8)
    >>> found.best.cp, found.best.dp * found.best.tp
    (1, 8)
    """
    known = model if isinstance(model, Model) else read_model(model)
    machine, size = hardware or rates.DEFAULT, check_positive(num_ranks, "num_ranks")
    documents = check_lengths(lengths, "lengths")
    documents = documents[documents > 0]
    if len(documents) == 0 or checkpointing not in RECOMPUTED:
        raise ValueError(
            f"give a document with a token and checkpointing of {sorted(RECOMPUTED)}, got {checkpointing!r}"
        )
    budget = memory or int(_USABLE * machine.memory)
    host = max_tp or machine.links[0].ranks or 1
    powers = [2**i for i in range(size.bit_length()) if size % 2**i == 0]
    found = [
        _fullest(Step(known, machine, size // tp, tp, recomputed=RECOMPUTED[checkpointing]), documents, cp, budget)
        for tp in powers if tp <= host and known.kv_heads % tp == 0
        for cp in powers if size // tp % cp == 0
    ]  # fmt: skip
    problems, choices = [one for one in found if one is not None], list[Choice]()
    for problem in sorted(problems, key=lambda one: (round(math.log(one.bound, _TIE)), one.cp * one.step.tp)):
        best = min(choices, key=lambda one: one.predicted, default=None)
        if best is not None and len(choices) > 1:
            slack = _TIE if problem.cp * problem.step.tp < best.cp * best.tp else 1 / _TIE
            if problem.bound > slack * best.predicted:
                continue
        choice = problem.choice(MEASURED if machine.source.startswith("measured") else NOMINAL)
        if choice.memory <= budget:
            choices.append(choice)
    if not choices:
        raise ValueError(
            f"nothing fits into {budget / 1e9:.0f} GB a device; use more ranks, shorter documents or full checkpointing"
        )
    near = _TIE * min(one.predicted for one in choices)
    choices.sort(key=lambda one: (max(one.predicted, near), one.cp * one.tp, one.tp))
    return Advice(tuple(choices), "flex" if any(known.windows) else "varlen", _measure(choices))


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The fullest micro-batch of the slowest replica of one CP x DP x TP."""

    step: Step
    cp: int
    documents: Int64
    micro_batches: int
    all_documents: Int64  # of the replica

    @property
    def bound(self) -> float:
        """Seconds of a step without exchange, with perfect balance."""
        model, area = self.step.model, self._area(self.all_documents)
        compute = sum(self.step.compute(float(self.all_documents.sum()) / self.cp).values())
        for backward in (False, True):
            flops = attention_flops(area, model.heads, model.head_dim, model.head_dim, backward=backward)
            again = 1.0 if backward else 1 + (self.step.recomputed == 1)
            split = flops / (self.cp * self.step.tp)
            compute += again * self.step.hardware.attention_seconds(split, backward=backward)
        return float(compute + self.step.sharding(compute))

    def _area(self, documents: Int64) -> float:
        """Pairs of all layers."""
        total, n = 0.0, documents.astype(np.float64)
        for window in self.step.model.windows or (None,) * self.step.model.layers:
            reach = np.minimum(n, window) if window else n
            total += float((reach * n - reach * (reach - 1) / 2).sum())
        return total

    def choice(self, spread: tuple[float, float, float]) -> Choice:
        """With a plan of the exchange."""
        model, step = self.step.model, self.step
        cu_seqlens = np.append(0, np.cumsum(self.documents))
        windows = model.windows or (None,) * model.layers
        kinds = {str(window or "full"): window for window in windows}
        masks = {
            name: SpanMask.documents(cu_seqlens, window=(window - 1, 0) if window else None)
            for name, window in kinds.items()
        }
        plan = make_plan(
            masks, self.cp, weights={name: float(windows.count(window)) for name, window in kinds.items()},
            num_q_heads=model.heads // step.tp, num_kv_heads=model.kv_heads // step.tp,
            head_dim=model.head_dim, hardware=apart(step.hardware, step.tp), cu_seqlens=cu_seqlens,
        )  # fmt: skip
        seconds, again = plan.predict(), float(step.recomputed == 1)
        parts = step.compute(float(self.all_documents.sum()) / self.cp)
        batches = self._area(self.all_documents) / self._area(self.documents)
        parts["attention"] = batches * ((1 + again) * seconds["compute_forward"] + seconds["compute_backward"])
        exposed = (1 + again) * seconds["exposed_forward"] + seconds["exposed_backward"]
        parts["exchange"] = self.micro_batches * exposed
        parts["sharding"] = step.sharding(sum(parts.values()))
        tokens = -(-int(self.documents.sum()) // self.cp)  # of a rank
        memory, exchange = int(step.memory(tokens)), "none"
        if self.cp > 1:
            memory, exchange = memory + held_bytes(plan), plan.exchange
        return Choice(
            step.ranks // self.cp, self.cp, step.tp, exchange, plan.balancer, tokens, self.micro_batches, parts, memory,
            spread,
        )  # fmt: skip


def _fullest(step: Step, documents: Int64, cp: int, budget: int) -> _Problem | None:
    """The problem of so many CP ranks; None where a document does not fit into the memory of its ranks."""
    fixed, model = step.memory(0), step.model
    most = int((budget - fixed) / (step.memory(1) - fixed))  # tokens of a rank
    if most < 1 or documents.max() > cp * most:
        return None
    # Keys whose attention costs a query as much as the matrix products of its token.
    same_work = model.parameters / (2.0 * model.layers * model.heads * model.head_dim)
    work = documents.astype(np.float64) * (documents + same_work)
    replica = _longest_first(work, step.ranks // cp)
    own = documents[replica == np.bincount(replica, weights=work).argmax()]
    count = -(-int(own.sum()) // (cp * most))
    while True:  # whole documents: more micro-batches where they do not fit evenly
        packed = _longest_first(own.astype(np.float64), count)
        if np.bincount(packed, weights=own).max() <= cp * most:
            break
        count += 1
    fullest = own[packed == np.bincount(packed, weights=own.astype(np.float64) ** 2).argmax()]
    return _Problem(step, cp, fullest, count, own)


def _longest_first(work: Float64, bins: int) -> Int64:
    """The bin of each document: most work first, each to the bin with the least so far; int64 ``[n]``."""
    owner, heap = np.empty(len(work), dtype=np.int64), [(0.0, one) for one in range(bins)]
    for document in np.argsort(-work, kind="stable").tolist():
        load, owner[document] = heap[0]
        heapq.heapreplace(heap, (load + float(work[document]), int(owner[document])))
    return owner


def _measure(choices: list[Choice]) -> str:
    """What decides between the first two."""
    if len(choices) < 2 or choices[0].interval[1] < choices[1].interval[0]:
        return "measure: nothing; no other choice is near"
    one, other = choices[:2]
    if other.predicted < 1.01 * one.predicted:
        return "measure: nothing; the first two are predicted alike"
    part = max(one.parts, key=lambda name: abs(one.parts[name] - other.parts[name]))
    how = {
        "exchange": f"`spanwise calibrate` over {max(one.cp, other.cp)} ranks",
        "attention": "`spanwise calibrate` with the model's kernel and heads",
        "tensor parallelism": f"an all-gather over {max(one.tp, other.tp)} ranks of a host",
        "sharding": f"an all-gather over {one.dp * one.cp} ranks",
    }.get(part, "one layer's forward and backward on one device")
    both = f"{one.parts[part]:.3g} s and {other.parts[part]:.3g} s"
    return f"measure: the first two differ most in {part} ({both}): {how}"

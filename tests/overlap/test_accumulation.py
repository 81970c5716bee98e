"""Several microbatches in one graph: never longer than PyTorch's pass or greedy lists, in half of its time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from spanwise import H100, overlap
from spanwise.hardware import Link
from spanwise.overlap.arrays import GREEDILY, Rule, limits_of
from spanwise.overlap.dag import Dag, Kind, Node, Storage
from spanwise.overlap.engine import Engine
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.pytorch_pass import pytorch_order
from spanwise.overlap.search import schedule
from tests.overlap.pipelines import Stage

CLOSE = 1.002  # of another order: what costs cannot tell apart


class Build:
    """Nodes and memory of a dag, added in order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.memory: list[tuple[int, int, list[int]]] = []  # bytes, maker, users

    def compute(self, ms: float, *deps: int) -> int:
        return self._add(Kind.COMPUTE, ms, deps)

    def collective(self, ms: float, group: str, *deps: int) -> tuple[int, int]:
        start = self._add(Kind.START, ms, deps, group)
        return start, self._add(Kind.WAIT, 0.0, (start,), start=start)

    def _add(self, kind: Kind, ms: float, deps: tuple[int, ...], group: str = "", start: int = -1) -> int:
        self.nodes.append(Node(f"node {len(self.nodes)}", kind, ms, tuple(dict.fromkeys(deps)), group, start))
        return len(self.nodes) - 1

    def takes(self, num_bytes: int, maker: int, *users: int) -> list[int]:
        self.memory.append((num_bytes, maker, list(users)))
        return self.memory[-1][2]

    def dag(self) -> Dag:
        storages = (Storage(size, maker, tuple(dict.fromkeys(users))) for size, maker, users in self.memory)
        return Dag(tuple(self.nodes), tuple(storages))


def accumulated(seed: int, layers: int = 0, microbatches: int = 0) -> Dag:
    """Forward and backward of some microbatches: parameters gathered in both, gradients reduced each time or summed.

    Some have tensor parallelism, whose collectives follow every product, or experts, whose exchanges go before it.
    """
    draw, made = random.Random(seed), Build()
    layers, microbatches = layers or draw.randint(2, 8), microbatches or draw.randint(2, 8)
    ratio = draw.choice([0.2, 0.5, 1.0, 1.0, 2.0])
    gather_ms = [ratio * draw.lognormvariate(0, 0.5) for _ in range(layers)]
    compute_ms = [draw.lognormvariate(0, 0.4) for _ in range(layers)]
    weight = [draw.randint(50, 200) for _ in range(layers)]
    activation, tp_ms = draw.randint(20, 300), draw.uniform(0.1, 0.6)
    tp, experts, each = draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.5
    sums: list[int] = [-1] * layers

    def gathered(layer: int) -> tuple[int, list[int]]:
        start, wait = made.collective(gather_ms[layer], "dp")
        return wait, made.takes(weight[layer], start, wait)

    for _ in range(microbatches):
        x, saved = made.compute(0.2), []
        for layer in range(layers):
            wait, users = gathered(layer)
            if experts and layer % 2:
                x = made.collective(2 * tp_ms, "ep", x)[1]
            out = made.compute(compute_ms[layer], x, wait)
            users.append(out)
            saved.append(made.takes(activation, out))
            x = made.collective(tp_ms, "tp", out)[1] if tp else out
            saved[-1].append(x)
        grad = made.compute(0.3, x)
        saved[-1].append(grad)
        for layer in reversed(range(layers)):
            wait, users = gathered(layer)
            inner = made.compute(compute_ms[layer], grad, wait)
            users.append(inner)
            new = made.compute(compute_ms[layer], grad)
            saved[layer].append(new)
            if layer:
                saved[layer - 1].append(inner)
            users = made.takes(2 * weight[layer], new)
            if each:
                new = made.collective(1.5 * gather_ms[layer], "dp", new)[1]
                users.append(new)
            if sums[layer] >= 0:
                new = made.compute(0.05, sums[layer], new)
                users.append(new)
            sums[layer] = new
            grad = made.collective(tp_ms, "tp", inner)[1] if tp else inner
    for layer in range(layers):
        total = sums[layer] if each else made.collective(1.5 * gather_ms[layer], "dp", sums[layer])[1]
        made.compute(0.1, total)
    return made.dag()


def recommended(seed: int) -> Dag:
    """Steps of a DLRM: sharded tables exchange rows before the interaction and gradients after it."""
    draw, made = random.Random(seed), Build()
    tables, depth, microbatches = draw.randint(2, 16), draw.randint(2, 6), draw.randint(1, 6)
    dense_ms, rows_ms = draw.uniform(0.2, 2), draw.uniform(0.1, 3)
    reduced = []
    for _ in range(microbatches):
        rows = []
        for _ in range(tables):
            found = made.compute(draw.uniform(0.05, 0.4))
            start, wait = made.collective(rows_ms * draw.lognormvariate(0, 0.5), "ep", found)
            made.takes(draw.randint(50, 500), start, wait)
            made.takes(draw.randint(50, 500), found, wait)
            rows.append(wait)
        x = made.compute(dense_ms)
        for _ in range(depth):
            x = made.compute(dense_ms, x)
            made.takes(draw.randint(20, 200), x)
        x = made.compute(dense_ms, x, *rows)
        for _ in range(depth):
            x = made.compute(2 * dense_ms, x)
            reduced.append(made.collective(draw.uniform(0.5, 2), "dp", x)[1])
        for _ in range(tables):
            _, wait = made.collective(rows_ms * draw.lognormvariate(0, 0.5), "ep", x)
            made.compute(draw.uniform(0.05, 0.4), wait)
    made.compute(0.5, *reduced)
    return made.dag()


def greedy(dag: Dag, budget: int) -> float:
    """The shortest of 64 greedy lists of random orders; infinite if none fits the budget."""
    engine, random_order = Engine(dag, limits_of(dag, range(len(dag)), budget)), np.random.default_rng(0)
    runs = (engine.forward(random_order.random(len(dag)), Rule(memory=GREEDILY)) for _ in range(64))
    return min((run.makespan for run in runs), default=math.inf)


@pytest.mark.parametrize(
    ("family", "share"),
    [(accumulated, 1.0), (accumulated, 1.1), (accumulated, 1.5), (accumulated, 99), (recommended, 99)],
)
def test_never_longer_than_greedy_lists(family: Callable[[int], Dag], share: float) -> None:
    for seed in range(8):
        dag = family(seed)
        budget = int(share * dag.peak_bytes())
        found = schedule(dag, budget=budget)
        assert found.timeline.peak_bytes <= budget
        assert found.timeline.makespan <= CLOSE * greedy(dag, budget), seed


def test_more_memory_is_never_longer() -> None:
    for seed in range(4):
        dag = accumulated(seed)
        spans = [schedule(dag, budget=int(share * dag.peak_bytes())).timeline.makespan for share in (1.0, 1.2, 1.6, 9)]
        assert all(more <= CLOSE * less for less, more in itertools.pairwise(spans)), (seed, spans)


def test_twenty_thousand_nodes_are_scheduled_in_seconds() -> None:
    dag = accumulated(6, layers=180, microbatches=8)
    assert 15_000 <= len(dag) <= 22_000
    began = time.process_time()
    found = schedule(dag, budget=2 * dag.peak_bytes())
    seconds = time.process_time() - began
    assert found.timeline.makespan <= found.before.makespan and seconds < 20, seconds


SLOW = dataclasses.replace(H100, links=(Link(25e9, 15e-6, ranks=8), Link(3e9, 50e-6)))
STEPS = [
    Stage(microbatches=2, layers=4, dp=8, dim=4096, tokens=4096),
    Stage(microbatches=8, layers=4, dp=8, dim=4096, tokens=4096, each=False),
    Stage(microbatches=4, layers=6, dp=8, dim=4096, tokens=1024),
]


@pytest.mark.compiles
@pytest.mark.parametrize("step", STEPS, ids=["two", "eight", "short"])
def test_never_longer_than_pytorchs_pass(step: Stage) -> None:
    gm, ranks = step.traced()
    for hardware in (H100, SLOW.with_host_size(4)):
        cost = overlap.CostModel(hardware, ranks=ranks)
        dag = to_dag(gm, cost).contracted.dag
        for bucket in (False, True):
            theirs, _ = pytorch_order(gm, cost, cost.latency, ranks=ranks, bucket=bucket)
            budget = max(theirs.peak_bytes, dag.peak_bytes())
            result = overlap.optimize(gm, cost, bucket=bucket, memory_budget=budget)
            assert result.timeline.makespan <= CLOSE * theirs.makespan, (hardware.name, bucket)
            if bucket:
                assert len(result.timeline.dag.starts) <= len(theirs.dag.starts)

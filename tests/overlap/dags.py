"""Dags for tests: built by hand, drawn by hypothesis with all their orders, and families of training steps by seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from spanwise.overlap.dag import Dag, Kind, Node, Storage

C, S, W = Kind.COMPUTE, Kind.START, Kind.WAIT


class Build:
    """Nodes and memory of a dag, added in order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.memory: list[tuple[int, int, list[int], bool]] = []  # bytes, maker, users, kept

    def compute(self, ms: float, *deps: int) -> int:
        return self.add(C, ms, deps)

    def collective(self, ms: float, group: str, *deps: int) -> tuple[int, int]:
        start = self.add(S, ms, deps, group)
        return start, self.add(W, 0.0, (start,), start=start)

    def add(self, kind: Kind, ms: float, deps: tuple[int, ...] = (), group: str = "", start: int = -1) -> int:
        self.nodes.append(Node(f"node {len(self.nodes)}", kind, ms, tuple(sorted(set(deps))), group, start))
        return len(self.nodes) - 1

    def takes(self, num_bytes: int, maker: int, *users: int, kept: bool = False) -> list[int]:
        self.memory.append((num_bytes, maker, list(users), kept))
        return self.memory[-1][2]

    def dag(self) -> Dag:
        storages = (Storage(size, maker, tuple(dict.fromkeys(users)), kept) for size, maker, users, kept in self.memory)
        return Dag(tuple(self.nodes), tuple(storages))


@st.composite
def dags(draw: st.DrawFn, most: int = 7) -> Dag:
    """Up to `most` nodes on three streams, with memory: results, and what collectives read until their wait."""
    made, open_starts = Build(), list[int]()
    for i in range(draw(st.integers(1, most))):
        deps = draw(st.lists(st.integers(0, i - 1), max_size=2)) if i else []
        kind = draw(st.sampled_from([C, C, S, W] if open_starts else [C, C, S]))
        ms = float(draw(st.integers(0, 5)))
        if kind == W:
            start = open_starts.pop(draw(st.integers(0, len(open_starts) - 1)))
            made.add(W, 0.0, (*deps, start), start=start)
            continue
        if kind == S:
            open_starts.append(i)
        made.add(kind, ms, tuple(deps), draw(st.sampled_from("ab")) if kind == S else "")
    dag = made.dag()
    for maker in (i for i in range(len(dag)) if dag.kinds[i] != W):
        for _ in range(draw(st.integers(0, 2))):
            users = [i for i in dag.users[maker] if draw(st.booleans())]
            # As a result is read where its collective is waited for, and by those who read that.
            users += [i for user in users if dag.kinds[user] == W for i in dag.users[user] if draw(st.booleans())]
            made.takes(draw(st.integers(0, 9)), maker, *sorted(users), kept=draw(st.booleans()))
    return made.dag()


def orders(dag: Dag) -> Iterator[tuple[int, ...]]:
    """All orders of a small dag."""
    for order in itertools.permutations(range(len(dag))):
        place = np.argsort(order)
        if all(place[dep] < place[i] for i, node in enumerate(dag.nodes) for dep in node.deps):
            yield order


def some_order(dag: Dag, choose: random.Random) -> list[int]:
    """A random order of any dag."""
    missing = [len(deps) for deps in dag.unique_deps]
    ready, order = [i for i, count in enumerate(missing) if not count], list[int]()
    while ready:
        order.append(ready.pop(choose.randrange(len(ready))))
        for user in dag.users[order[-1]]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return order


def anything(seed: int) -> Dag:
    """10 to 150 nodes after up to three nodes shortly before them; collectives of up to four groups."""
    draw, made = random.Random(seed), Build()
    groups, window = [f"group {i}" for i in range(draw.randint(1, 4))], draw.choice([1, 3, 8, 40])
    share, count, free = draw.uniform(0.1, 0.5), draw.choice([10, 20, 60, 150]), draw.choice([0.0, 0.0, 0.3])
    ends: list[int] = []
    users: dict[int, list[int]] = {}
    while len(made.nodes) < count:
        near = ends[-window:]
        deps = draw.sample(near, min(len(near), draw.randint(0, 3)))
        ms = 0.0 if draw.random() < free else draw.lognormvariate(0, 1) * (30 if draw.random() < 0.02 else 1)
        maker = end = len(made.nodes)
        if draw.random() < share:
            maker, end = made.collective(ms, draw.choice(groups), *deps)
        else:
            made.compute(ms, *deps)
        for dep in deps:  # a collective reads them until it ends
            users[dep] += [maker, end]
        users[end] = made.takes(draw.randint(0, 500), maker, end)
        ends.append(end)
    return made.dag()


def accumulated(seed: int, layers: int = 0, microbatches: int = 0) -> Dag:
    """Forward and backward of 2 to 8 microbatches: parameters gathered in both, gradients reduced each time or summed.

    Half of them have tensor parallelism, whose collectives follow every product.
    """
    draw, made = random.Random(seed), Build()
    layers, microbatches = layers or draw.randint(2, 8), microbatches or draw.randint(2, 8)
    ratio = draw.choice([0.2, 0.5, 1.0, 1.0, 2.0])
    gather_ms = [ratio * draw.lognormvariate(0, 0.5) for _ in range(layers)]
    compute_ms = [draw.lognormvariate(0, 0.4) for _ in range(layers)]
    weight = [draw.randint(50, 200) for _ in range(layers)]
    activation, tp_ms = draw.randint(20, 300), draw.uniform(0.1, 0.6)
    tp, each = draw.random() < 0.5, draw.random() < 0.5
    sums: list[int] = [-1] * layers

    def gathered(layer: int) -> tuple[int, list[int]]:
        start, wait = made.collective(gather_ms[layer], "dp")
        return wait, made.takes(weight[layer], start, wait)

    for _ in range(microbatches):
        x, saved = made.compute(0.2), []
        for layer in range(layers):
            wait, users = gathered(layer)
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


def shared(seed: int) -> Dag:
    """Accumulated, with all groups on one link."""
    dag = accumulated(seed)
    return dag.with_links(dict.fromkeys(dag.groups, "card"))

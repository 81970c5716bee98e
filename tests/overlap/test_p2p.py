"""Messages between two ranks: what may move across them, and that no rank comes to wait for another forever."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise import H100, overlap
from spanwise.hardware import Link
from spanwise.overlap.dag import Kind
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.graph import Captured, to_dag
from spanwise.overlap.fx.operators import MESSAGES
from spanwise.overlap.pytorch_pass import pytorch_order
from spanwise.overlap.scheduler import ListScheduler
from spanwise.overlap.search import schedule
from tests.overlap.pipelines import OPS, Stage
from tests.overlap.test_graph import follows

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(not MESSAGES, reason=f"torch {torch.__version__} has no functional messages"),
]
SLOW = dataclasses.replace(H100, links=(Link(25e9, 15e-6, ranks=8), Link(3e9, 50e-6)))


def depends(captured: Captured) -> list[int]:
    """Of each node, all that it depends on, as bits."""
    found: list[int] = []
    for node in captured.dag.nodes:
        bits = 0
        for dep in node.deps:
            bits |= found[dep] | 1 << dep
        found.append(bits)
    return found


@pytest.mark.parametrize("batch", [False, True])
def test_what_may_cross_a_message(batch: bool) -> None:
    gm, _ = Stage(rank=2, stages=3, microbatches=3, batch=batch).traced()
    captured = to_dag(gm, lambda node: 1.0)
    assert captured.barriers == ()
    before, dag = depends(captured), captured.dag

    def peers(i: int) -> set[int]:
        node = captured.nodes[dag.nodes[i].start if dag.nodes[i].kind == Kind.WAIT else i]
        return set() if node.target not in MESSAGES else set(node.args[1]) if batch else {node.args[1]}  # type: ignore

    events = [i for i, node in enumerate(dag.nodes) if node.kind != Kind.COMPUTE]
    free = 0
    for i, j in itertools.combinations(events, 2):
        first, second, kept = dag.nodes[i].kind, dag.nodes[j].kind, bool(before[j] >> i & 1)
        if peers(i) & peers(j) and first == second == Kind.START:
            assert kept, "the order of one peer"
        if first == Kind.START and second == Kind.WAIT and (peers(i) or peers(j)):
            assert kept, "starts stay before waits that follow them"
        free += not kept and bool(peers(i) or peers(j))
    assert free > 30  # such as a gather that starts before a message, or is waited for after it
    place = {i: at for at, i in enumerate(schedule(dag, budget=2**40).order)}
    messages = [j for j in dag.starts if peers(j)]
    assert any(place[i] < place[j] for i in dag.starts if not peers(i) for j in messages if j < i)
    assert sum(len(node.deps) for node in dag.nodes) < 4 * len(dag)


def test_what_is_received_is_written_until_its_wait() -> None:
    """torch receives into the operand: readers of it stay before the start or after the wait; nothing is copied."""

    def step(x: torch.Tensor) -> Any:
        landing = torch.zeros_like(x)
        early = landing + 1
        got = OPS.irecv(landing, 1, 0, "pp")
        sent, other = OPS.batch_p2p_ops(["isend", "irecv"], [1, 1], [1, 1], [x, torch.zeros_like(x)], "pp")
        read = x * 2  # what is sent may be read
        return early, OPS.wait_tensor(got) + 1, OPS.wait_tensor(sent).sum(), OPS.wait_tensor(other) + read

    captured = to_dag(make_fx(step, tracing_mode="fake")(torch.ones(4)), lambda node: 1.0)
    pairs = [("irecv", "add"), ("add_1", "wait_tensor"), ("add_2", "wait_tensor_2"), ("batch_p2p_ops", "irecv")]
    assert all(follows(captured, *pair) for pair in [*pairs, ("wait_tensor_2", "wait_tensor_1")])  # one peer, one wait
    assert not follows(captured, "mul", "batch_p2p_ops")
    makers = [captured.dag.nodes[s.maker].name for s in captured.dag.storages]
    assert {"zeros_like", "zeros_like_1"} <= set(makers) and "irecv" not in makers


def legal(captured: Captured, theirs: Timeline) -> Timeline:
    """Another order of the same nodes, with messages in the order that their peers keep."""
    number = {node.name: i for i, node in enumerate(captured.dag.nodes)}
    order = np.array([number[theirs.dag.nodes[i].name] for i in theirs.order.tolist()])
    return simulate(captured.dag, ListScheduler(captured.dag).in_units(order, np.arange(len(order))))


STAGES = {
    "last": Stage(rank=2, stages=2, dim=4096, tokens=4096, microbatches=4, layers=4),
    "first": Stage(rank=0, stages=2, dim=4096, tokens=2048, microbatches=4, layers=4, each=False),
    "middle": Stage(rank=2, stages=4, dim=4096, tokens=4096, microbatches=6, layers=3),
    "two": Stage(microbatches=2, layers=4, dp=8, dim=4096, tokens=4096),
    "eight": Stage(microbatches=8, layers=4, dp=8, dim=4096, tokens=4096, each=False),
    "short": Stage(microbatches=4, layers=6, dp=8, dim=4096, tokens=1024),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_or_a_step_is_never_longer_than_pytorchs(name: str) -> None:
    """PyTorch's pass changes the order of messages to one peer, which then arrive in each other's place."""
    gm, ranks = STAGES[name].traced()
    has_messages = STAGES[name].stages > 1
    for hardware, hosts in ((H100, 8), (SLOW, 2 if has_messages else 4)):
        cost = overlap.CostModel(hardware.with_host_size(hosts), ranks=ranks)
        captured = to_dag(gm, cost)
        for bucket in (False,) if has_messages else (False, True):
            theirs, _ = pytorch_order(gm, cost, cost.latency, ranks=ranks, bucket=bucket)
            budget = None if has_messages else max(theirs.peak_bytes, captured.contracted.dag.peak_bytes())
            result = overlap.optimize(gm, cost, bucket=bucket, memory_budget=budget)
            theirs = legal(captured, theirs) if has_messages else theirs
            assert result.timeline.makespan <= 1.002 * theirs.makespan, (hardware.name, hosts, bucket)
            assert result.timeline.makespan <= 1.001 * result.before.makespan and result.barriers == ()
            assert not bucket or len(result.timeline.dag.starts) <= len(theirs.dag.starts)


Event = tuple[str, Any]  # "start" or "wait"; a message by the two ranks and its number, a collective by group and name


def deadlock(programs: dict[int, list[Event]]) -> dict[int, list[Event]]:
    """What is left of the programs of all ranks; a wait goes on when all ranks that it needs have started."""
    left, started = dict(programs), {rank: set[Any]() for rank in programs}
    moved = True
    while moved:
        moved = False
        for rank in left:
            while left[rank]:
                what, key = left[rank][0]
                needed = key[0] if isinstance(key[0], tuple) else {key[1] if key[0] == rank else key[0]}
                if what == "wait" and not all(key in started[other] for other in needed):
                    break
                started[rank].add(key)
                left[rank], moved = left[rank][1:], True
    return {rank: events for rank, events in left.items() if events}


def events(stage: Stage, captured: Captured, order: list[int]) -> list[Event]:
    """Starts and waits of a rank; a message is matched with its peer's by its number among those of the two."""
    numbers: dict[tuple[int, int], int] = {}
    found, key = [], {}
    for node, i in ((captured.dag.nodes[i], i) for i in order):
        if node.kind == Kind.START:
            call = captured.nodes[i]
            key[i] = (tuple(stage.ranks("dp")), node.name)
            if call.target in MESSAGES:
                to: Any = call.args[1][0] if stage.batch else call.args[1]  # type: ignore[index]
                peer = to * stage.dp + stage.rank % stage.dp
                sends = "send" in str(call.args[0] if stage.batch else call.target)
                pair = (stage.rank, peer) if sends else (peer, stage.rank)
                numbers[pair] = numbers.get(pair, 0) + 1
                key[i] = (*pair, numbers[pair])
        if node.kind != Kind.COMPUTE:
            found.append(("start", key[i]) if node.kind == Kind.START else ("wait", key[node.start]))
    return found


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), stages=st.integers(2, 3), batch=st.booleans())
def test_stages_with_any_costs_do_not_wait_for_one_another_forever(seed: int, stages: int, batch: bool) -> None:
    """Every stage is scheduled at costs of its own, so that the orders of two stages have nothing in common."""
    draw = random.Random(seed)
    programs = {}
    for number in range(stages):
        costs = {name: draw.uniform(0.01, 3) for name in ("all", "reduce", "mm", "isend", "irecv", "batch")}
        for rank in (2 * number, 2 * number + 1):
            stage = Stage(rank, stages, microbatches=3, layers=2, batch=batch)
            captured = to_dag(stage.traced()[0], lambda node, of=costs: of.get(node.name.split("_")[0], 0.1))
            programs[rank] = events(stage, captured, schedule(captured.dag, budget=2**40, effort=30).order)
    assert deadlock(programs) == {}

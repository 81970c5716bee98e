"""Messages between two ranks: what may move across them, and that no rank comes to wait for another forever."""

from __future__ import annotations

import dataclasses
import heapq
import random
from typing import Any

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
from spanwise.overlap.search import schedule
from tests.overlap.pipelines import OPS, Stage

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
    for at, i in enumerate(events):
        for j in events[at + 1 :]:
            first, second = dag.nodes[i].kind, dag.nodes[j].kind
            kept = bool(before[j] >> i & 1)
            if peers(i) & peers(j) and first == second == Kind.START:
                assert kept, "the order of one peer"
            if first == Kind.START and second == Kind.WAIT and (peers(i) or peers(j)):
                assert kept, "starts stay before waits that follow them"
            free += not kept and bool(peers(i) or peers(j))
    assert free > 30  # such as a gather that starts before a message, or is waited for after it
    starts = [i for i in dag.starts if not peers(i)]
    early = schedule(dag, budget=2**40).timeline
    place = {i: at for at, i in enumerate(early.order.tolist())}
    assert any(place[i] < place[j] for i in starts for j in dag.starts if peers(j) and j < i)
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
    names = [node.name for node in captured.dag.nodes]
    before = depends(captured)

    def follows(later: str, earlier: str) -> bool:
        return bool(before[names.index(later)] >> names.index(earlier) & 1)

    assert follows("irecv", "add") and follows("add_1", "wait_tensor") and not follows("mul", "batch_p2p_ops")
    assert follows("batch_p2p_ops", "irecv")  # one peer
    assert follows("add_2", "wait_tensor_2") and follows("wait_tensor_2", "wait_tensor_1")  # one wait for a batch
    assert {captured.dag.nodes[s.maker].name for s in captured.dag.storages if "zeros" in names[s.maker]} == {
        "zeros_like", "zeros_like_1"
    }  # fmt: skip
    assert not any(names[s.maker] == "irecv" for s in captured.dag.storages)


def legal(captured: Captured, theirs: Timeline) -> Timeline:
    """Another order of the same nodes, with messages in the order that their peers keep."""
    place = {theirs.dag.nodes[i].name: at for at, i in enumerate(theirs.order.tolist())}
    dag, found = captured.dag, []
    missing = [len(deps) for deps in dag.unique_deps]
    ready = [(place[node.name], i) for i, node in enumerate(dag.nodes) if not missing[i]]
    heapq.heapify(ready)
    while ready:
        i = heapq.heappop(ready)[1]
        found.append(i)
        for user in dag.users[i]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place[dag.nodes[user].name], user))
    return simulate(dag, found)


STAGES = [
    Stage(rank=2, stages=2, dim=4096, tokens=4096, microbatches=4, layers=4),
    Stage(rank=0, stages=2, dim=4096, tokens=2048, microbatches=4, layers=4, each=False),
    Stage(rank=2, stages=4, dim=4096, tokens=4096, microbatches=6, layers=3),
]


@pytest.mark.parametrize("stage", STAGES, ids=["last", "first", "middle"])
def test_a_stage_is_never_longer_than_pytorchs(stage: Stage) -> None:
    """PyTorch's pass changes the order of messages to one peer, which then arrive in each other's place."""
    gm, ranks = stage.traced()
    for hardware in (H100, SLOW):
        for hosts in (8, 2):
            cost = overlap.CostModel(hardware.with_host_size(hosts), ranks=ranks)
            captured = to_dag(gm, cost)
            theirs, _ = pytorch_order(gm, cost, cost.latency, ranks=ranks, bucket=False)
            repaired = legal(captured, theirs)
            result = overlap.optimize(gm, cost, bucket=False)
            assert result.timeline.makespan <= 1.002 * repaired.makespan, (hardware.name, hosts)
            assert result.timeline.makespan <= 1.001 * result.before.makespan
            assert result.barriers == ()


class Deadlock(Exception):
    pass


def run(programs: dict[int, list[tuple[str, Any]]], groups: dict[str, set[int]]) -> None:
    """Run the starts and waits of all ranks; a wait goes on when all ranks that it needs have started.

    A message is matched with its peer's by its number among the messages of the two; a collective by its key.
    """
    at, started = dict.fromkeys(programs, 0), {rank: set() for rank in programs}
    while any(at[rank] < len(program) for rank, program in programs.items()):
        moved = False
        for rank, program in programs.items():
            while at[rank] < len(program):
                what, key = program[at[rank]]
                if what == "start":
                    started[rank].add(key)
                elif key[0] in groups:
                    if not all(key in started[other] for other in groups[key[0]]):
                        break
                elif key not in started[key[1] if key[0] == rank else key[0]]:
                    break
                at[rank] += 1
                moved = True
        if not moved:
            raise Deadlock({rank: program[at[rank] :][:1] for rank, program in programs.items()})


def events(stage: Stage, captured: Captured, order: list[int]) -> list[tuple[str, Any]]:
    """Starts and waits as `run` takes them: messages by the two ranks and their number, collectives by their names."""
    numbers: dict[tuple[int, int], int] = {}
    found, key = [], {}
    for i in order:
        node = captured.dag.nodes[i]
        if node.kind == Kind.START:
            call = captured.nodes[i]
            key[i] = (f"dp{stage.stage}", node.name)
            if call.target in MESSAGES:
                to: Any = call.args[1][0] if stage.batch else call.args[1]  # type: ignore[index]
                peer = to * stage.dp + stage.rank % stage.dp
                sends = "send" in str(call.args[0] if stage.batch else call.target)
                pair = (stage.rank, peer) if sends else (peer, stage.rank)
                numbers[pair] = numbers.get(pair, 0) + 1
                key[i] = (*pair, numbers[pair])
            found.append(("start", key[i]))
        elif node.kind == Kind.WAIT:
            found.append(("wait", key[node.start]))
    return found


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), stages=st.integers(2, 3), batch=st.booleans())
def test_stages_with_any_costs_do_not_wait_for_one_another_forever(seed: int, stages: int, batch: bool) -> None:
    """Every stage is scheduled at costs of its own, so that the orders of two stages have nothing in common."""
    draw = random.Random(seed)
    programs, groups = {}, {}
    for number in range(stages):
        first = Stage(2 * number, stages, microbatches=3, layers=2, batch=batch)
        costs = {name: draw.uniform(0.01, 3) for name in ("all", "reduce", "mm", "isend", "irecv", "batch")}
        groups[f"dp{number}"] = {first.rank, first.rank + 1}
        for rank in (first.rank, first.rank + 1):
            stage = dataclasses.replace(first, rank=rank)
            gm, _ = stage.traced()
            captured = to_dag(gm, lambda node, of=costs: of.get(node.name.split("_")[0], 0.1))
            order = schedule(captured.dag, budget=2**40, effort=30).order
            programs[rank] = events(stage, captured, order)
    run(programs, groups)

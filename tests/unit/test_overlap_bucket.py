"""Buckets of collectives on an overlap `Dag`: what is merged, that it stays a legal graph, and that nothing is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.overlap.bucket import Merged, merge, unmerged
from spanwise.overlap.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.simulate import simulate
from tests.unit.test_overlap_schedule import with_memory

C, S, W = Kind.COMPUTE, Kind.START, Kind.WAIT


def two_gathers(*deps: int) -> Dag:
    """Two all-gathers with readers; the second one's start depends on `deps`."""
    nodes = (
        Node("gather a", S, 2.0, group="dp"),
        Node("wait a", W, deps=(0,), start=0),
        Node("read a", C, 1.0, (1,)),
        Node("cast b", C, 1.0),
        Node("gather b", S, 3.0, (3, *deps), "dp"),
        Node("wait b", W, deps=(4,), start=4),
        Node("read b", C, 1.0, (2, 5)),
    )
    return Dag(nodes, (Storage(8, 0, (1, 2)), Storage(4, 3, (4, 5)), Storage(9, 4, (5, 6)), Storage(1, 6, kept=True)))


def test_members_start_together_where_the_first_one_did() -> None:
    merged = merge(two_gathers(), [[4, 0]], [4.5])
    assert merged.members == ((3,), (0, 4), (1, 5), (2,), (6,))
    start, wait = merged.dag.nodes[1:3]
    assert start == Node("gather a and 1 more", S, 4.5, (0,), "dp")
    assert wait == Node("wait a and 1 more", W, 0.0, (1,), start=1)
    assert merged.dag.storages[0] == Storage(8, 1, (2, 3)) and merged.dag.storages[2] == Storage(9, 1, (2, 4))
    assert merged.dag.peak_bytes() == 8 + 4 + 9 and simulate(merged.dag).makespan == 1 + 4.5 + 2
    assert merged.launches == 1 == unmerged(two_gathers()).launches - 1


def test_members_start_together_where_the_last_one_did() -> None:
    """Unless somebody needs one of them before."""
    dag = two_gathers()
    order = [3, 0, 1, 4, 5, 2, 6]
    assert merge(dag, [[0, 4]], [4.5], order, late=True).members == ((3,), (0, 4), (1, 5), (2,), (6,))
    other = Dag((*dag.nodes[:2], Node("work", C, 1.0), *(Node("b", S, group="dp"), Node("w", W, deps=(3,), start=3))))
    assert merge(other, [[0, 3]], [2.0], [0, 2, 3, 1, 4], late=True).members == ((2,), (0, 3), (1, 4))
    assert merge(other, [[0, 3]], [2.0], [0, 2, 3, 1, 4]).members == ((0, 3), (2,), (1, 4))


def test_a_merge_that_makes_a_cycle_names_the_node() -> None:
    with pytest.raises(GraphError, match="node 'gather a': no bucket of 'gather a', 'gather b': they would wait for"):
        merge(two_gathers(2), [[0, 4]], [4.5])
    with pytest.raises(GraphError, match="node 'gather b': it depends on a member of its bucket: 'gather a', 'gather"):
        merge(two_gathers(0), [[0, 4]], [4.5])
    # Each bucket alone is legal, both together are not.
    nodes = (
        Node("x 0", S, 1.0, group="x"), Node("y 0", S, 1.0, group="y"),
        Node("wait x 0", W, deps=(0,), start=0), Node("wait y 0", W, deps=(1,), start=1),
        Node("y 1", S, 1.0, (2,), "y"), Node("x 1", S, 1.0, (3,), "x"),
    )  # fmt: skip
    dag = Dag(nodes)
    assert merge(dag, [[0, 5]], [1.0]).launches == merge(dag, [[1, 4]], [1.0]).launches == 3
    with pytest.raises(GraphError, match=r"node '[xy] 0'.*they would wait for one another through 'wait [xy] 0'"):
        merge(dag, [[0, 5], [1, 4]], [1.0, 1.0])


def test_buckets_that_are_none() -> None:
    dag = two_gathers()
    for bad in ([0, 1], [0, 0], [0, 99], []):
        with pytest.raises(ValueError, match="a bucket has starts of one process group"):
            merge(dag, [bad], [1.0])
    with pytest.raises(GraphError, match="node 'gather a': it is in two buckets"):
        merge(dag, [[0], [0, 4]], [1.0, 1.0])
    with pytest.raises(ValueError, match="expected milliseconds of 1 buckets, got 0"):
        merge(dag, [[0, 4]], [])
    with pytest.raises(GraphError, match="its cost must be finite and not negative, got nan"):
        merge(dag, [[0, 4]], [float("nan")])


def check(dag: Dag, merged: Merged) -> None:
    """Every node is there once, and what a node depended on comes before it."""
    assert sorted(i for members in merged.members for i in members) == list(range(len(dag)))
    unit = {i: u for u, members in enumerate(merged.members) for i in members}
    for i, node in enumerate(dag.nodes):
        of_merged = merged.dag.nodes[unit[i]]
        assert of_merged.kind == node.kind and of_merged.group == node.group
        assert {unit[dep] for dep in node.deps} <= set(of_merged.deps)
        if node.kind == W:
            assert unit[node.start] == of_merged.start
    for old, new in zip(dag.storages, merged.dag.storages, strict=True):
        assert new.maker == unit[old.maker] and new.num_bytes == old.num_bytes
        assert set(new.users) == {unit[user] for user in old.users} and new.kept == old.kept


@settings(deadline=None, max_examples=200)
@given(with_memory(), st.randoms(use_true_random=False), st.booleans())
def test_a_merge_is_legal_or_refused(dag: Dag, draw: random.Random, late: bool) -> None:
    buckets = [[i for i in dag.starts if dag.nodes[i].group == group and draw.random() < 0.8] for group in dag.groups]
    buckets = [bucket for bucket in buckets if bucket]
    try:
        check(dag, merge(dag, buckets, [1.0] * len(buckets), late=late))
    except GraphError as error:
        assert any(error.node == dag.nodes[i].name for bucket in buckets for i in bucket)


def test_a_merge_of_nothing_changes_nothing() -> None:
    dag = two_gathers()
    merged = merge(dag, [], [])
    assert merged.dag.nodes == dag.nodes and merged.dag.storages == dag.storages
    assert merged.members == unmerged(dag).members

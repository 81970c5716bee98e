"""PyTorch's own pass: what it is warmed up on, and what its clock does not count."""

from __future__ import annotations

import pytest
from torch import fx

from spanwise.overlap import _torch, pytorch_pass as peers
from spanwise.overlap.fx import operators

pytestmark = pytest.mark.compiles

#: Captures a graph and runs the pass on it, noting at each look at the clock which modules torch has imported.


def merged(ranks: dict[str, tuple[int, ...]], bucket: bool) -> fx.GraphModule:
    with peers._groups(ranks), peers._quiet():
        return _torch.torch_overlap_pass(peers._tiny(ranks), lambda node, size: 1.0, bucket=bucket)


def test_the_warm_up_merges_collectives() -> None:
    """Otherwise the first bucket of the graph that is timed would import what makes one."""
    starts = [
        sum(node.target in operators.STARTS for node in merged({"1": (0, 1)}, bucket).graph.nodes)
        for bucket in (False, True)
    ]
    assert starts == [2, 1]


def test_the_warm_up_without_groups() -> None:
    assert not any(node.target in operators.STARTS for node in merged({}, True).graph.nodes)

"""PyTorch's own pass: what it is warmed up on, and what its clock does not count."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap import pytorch_pass as peers
from spanwise.overlap.fx import operators

pytestmark = pytest.mark.compiles

#: Captures a graph and runs the pass on it, noting at each look at the clock which modules torch has imported.
NOTED = """
import sys, time
from spanwise.hardware import H100
from spanwise.overlap import pytorch_pass as peers
from spanwise.overlap.fx.capture import CaptureConfig, capture
from spanwise.overlap.costs.roofline import CostModel

graphs = capture(CaptureConfig(layers=1, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=16, dp=2, device="cpu"))
ranks = {axis.name: axis.ranks for axis in graphs.axes.values() if axis.name}
noted = []

class Clock:
    @staticmethod
    def process_time():
        noted.append({name for name in sys.modules if name.startswith("torch")})
        return time.process_time()

peers.time = Clock
early = {name for name in sys.modules if name.startswith("torch")}
peers.pytorch_order(graphs.forward, CostModel(H100, ranks=ranks), lambda node: 0.01, ranks=ranks, bucket=True)
began, ended = noted
print(len(began - early), *sorted(ended - began))
"""


@pytest.mark.slow
def test_imports_are_not_timed() -> None:
    done = subprocess.run([sys.executable, "-c", NOTED], capture_output=True, text=True, check=True)
    warm, *timed = done.stdout.split()
    assert int(warm) and timed == []


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

"""Graphs in pieces compute what the whole graphs do, on all ranks in lockstep, whenever their collectives end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import is_start
from spanwise.overlap.split.region import find_regions
from spanwise.overlap.split.rewrite import rewrite
from tests.lockstep import Lockstep
from tests.overlap.programs import SMALL, graphs_on, step


def in_pieces(gm: fx.GraphModule, pieces: int) -> fx.GraphModule:
    """`gm` with its largest region in pieces."""
    region, graph = find_regions(gm.graph)[0], _torch.copy_graph(gm.graph)
    rewrite(graph, region.by_name, region.tokens, pieces)
    graph.lint()
    return fx.GraphModule(gm, graph)


def error(found: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]]) -> float:
    """Largest difference of two tensors, relative to the largest element, over all ranks."""
    worst = 0.0
    for of_rank, wanted in zip(found, expected, strict=True):
        for x, y in zip(of_rank, wanted, strict=True):
            if isinstance(y, torch.Tensor):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel():
                worst = max(
                    worst, float((x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30))
                )
            elif isinstance(y, torch.Tensor):
                assert torch.equal(x, y)
    return worst


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("batch", "pieces"), [(1, 3), (2, 2)])
def test_all_ranks_in_pieces_compute_the_same(which: str, batch: int, pieces: int) -> None:
    """Collectives of activations are cut, gathers of parameters stay whole."""
    graphs = [graphs_on(rank, dataclasses.replace(SMALL, batch=batch)) for rank in range(SMALL.num_ranks)]
    feed, expected = step(graphs)[which]
    whole = getattr(graphs[0], which)
    modules = [in_pieces(getattr(g, which), pieces) for g in graphs]
    after, before = (sum(map(is_start, gm.graph.nodes)) for gm in (modules[0], whole))
    assert after > before
    dp, tp = (graphs[0].axes[axis].name for axis in ("dp", "tp"))
    assert find_regions(whole.graph)[0].group == tp
    parameters = [[n.name for n in gm.graph.nodes if dp in n.args] for gm in (whole, modules[0])]
    assert parameters[0] == parameters[1] and len(parameters[0]) > 10
    for late in (False, True):
        assert error(Lockstep(modules, [g.axes for g in graphs], late=late).run(feed), expected) < 1e-12

"""Graphs in pieces compute what the whole graphs do, on all ranks in lockstep, whenever their collectives end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.capture import CaptureConfig, Graphs, capture
from spanwise.overlap.split.region import find_regions
from spanwise.overlap.split.rewrite import rewrite
from tests.lockstep import Lockstep
from tests.overlap.test_optimize import inputs_of

SMALL = CaptureConfig(
    layers=1, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=28, vocab=24, dp=2, tp=2, device="cpu", dtype=torch.float64
)


@functools.cache
def graphs_on(rank: int, config: CaptureConfig) -> Graphs:
    return capture(dataclasses.replace(config, rank=rank))


def graphs_of(config: CaptureConfig) -> list[Graphs]:
    return [graphs_on(rank, config) for rank in range(config.num_ranks)]


def in_pieces(gm: fx.GraphModule, pieces: int, without: int | None = None) -> fx.GraphModule:
    """`gm` with its largest region in pieces; without the kind of segment of that number."""
    region = find_regions(gm.graph)[0]
    kinds = sorted(region.segments)
    if without is not None:
        del kinds[without % len(kinds)]
    graph = _torch.copy_graph(gm.graph)
    rewrite(graph, region.chosen(kinds), region.tokens, pieces)
    graph.lint()
    return fx.GraphModule(gm, graph)


def equal_layout(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def error(found: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]]) -> float:
    """Largest difference of two tensors, relative to the largest element, over all ranks."""
    worst = 0.0
    for of_rank, wanted in zip(found, expected, strict=True):
        equal_layout(of_rank, wanted)
        for x, y in zip(of_rank, wanted, strict=True):
            if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel():
                worst = max(
                    worst, float((x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30))
                )
            elif isinstance(y, torch.Tensor):
                assert torch.equal(x, y)
    return worst


def step(graphs: Sequence[Graphs]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Inputs and outputs of both graphs on all ranks."""
    axes = [g.axes for g in graphs]
    given = [inputs_of(g.forward, seed) for seed, g in enumerate(graphs)]
    forward = Lockstep([g.forward for g in graphs], axes).run(given)
    saved = [[*outputs[1:], torch.ones_like(outputs[0])] for outputs in forward]
    return {"forward": (given, forward), "backward": (saved, Lockstep([g.backward for g in graphs], axes).run(saved))}


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("batch", "pieces", "without"), [(1, 3, None), (2, 2, 0)])
def test_all_ranks_in_pieces_compute_the_same(which: str, batch: int, pieces: int, without: int | None) -> None:
    graphs = graphs_of(dataclasses.replace(SMALL, batch=batch))
    feed, expected = step(graphs)[which]
    modules = [in_pieces(getattr(g, which), pieces, without) for g in graphs]
    starts = [sum(str(n.target).startswith("_c10d") and "wait" not in n.name for n in m.graph.nodes) for m in modules]
    assert starts[0] > sum(
        str(n.target).startswith("_c10d") and "wait" not in n.name for n in getattr(graphs[0], which).graph.nodes
    )
    for late in (False, True):
        assert error(Lockstep(modules, [g.axes for g in graphs], late=late).run(feed), expected) < 1e-12


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_gathers_of_parameters_stay_whole(which: str) -> None:
    graphs = graphs_of(SMALL)[0]
    dp = graphs.axes["dp"].name
    gm = getattr(graphs, which)
    (region, *_) = find_regions(gm.graph)
    assert region.group == graphs.axes["tp"].name
    before, after = ([n.name for n in g.graph.nodes if dp in n.args] for g in (gm, in_pieces(gm, 2)))
    assert before == after and len(before) > 10

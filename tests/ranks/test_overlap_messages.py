"""Stages of a pipeline on real gloo ranks: scheduled across their messages, they give the numbers that they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from spanwise import overlap
from spanwise.overlap.costs.roofline import node_flops
from spanwise.overlap.fx.operators import MESSAGES, STARTS
from tests.overlap.pipelines import Stage
from tests.ranks.gloo import GlooPool

pytestmark = pytest.mark.skipif(not MESSAGES, reason=f"torch {torch.__version__} has no functional messages")


class Cost:
    """Collectives of one stage are long where messages are, on another not."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def __call__(self, node: fx.Node) -> float:
        if node.target in MESSAGES:
            return 0.5 + self.stage
        return 0.9 - 0.2 * self.stage if node.target in STARTS else 1.0 if node_flops(node) else 0.01


def steps(rank: int, _: Any, stages: int, batch: bool) -> list[tuple[bool, float, tuple[str, ...]]]:
    found = []
    for each in (True, False):
        stage = Stage(rank, stages, dist.get_world_size() // stages, microbatches=4, each=each, batch=batch)
        groups = stage.groups()
        gm, given = stage.trace(groups), stage.inputs()
        expected = stage.step(groups, given)
        for options in ({"bucket": False}, {"bucket": True, "effort": 50}):
            results: list[overlap.Result] = []
            new = overlap.graph_pass(cost=Cost(stage.stage), on_result=results.append, **options)(gm, ())
            got = new(*given)
            (result,) = results
            same = all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
            found.append((same, result.timeline.makespan / result.before.makespan, result.barriers))
    return found


@pytest.mark.parametrize(("stages", "batch"), [(2, True), (4, False), pytest.param(2, False, marks=pytest.mark.slow)])
def test_a_scheduled_stage_is_the_stage(gloo_pool: GlooPool, stages: int, batch: bool) -> None:
    for answers in gloo_pool.run(4, steps, stages, batch):
        for same, gain, barriers in answers:
            assert same and gain < 1.0 and barriers == ()

"""`graph_pass`: what it returns and refuses."""

from __future__ import annotations

import pytest
import torch

from spanwise import overlap
from tests.overlap.programs import Cost, graphs_on


def test_a_pass_returns_a_scheduled_copy() -> None:
    gm, results = graphs_on(0).backward, list[overlap.Result]()
    before, gm.meta["of"] = gm.code, "mine"
    apply = overlap.graph_pass(cost=Cost(), bucket=False, on_result=results.append)
    new = apply(gm, ())
    names, others = ([node.name for node in of.graph.nodes] for of in (gm, new))
    assert gm.code == before and new.meta["of"] == "mine" and sorted(others) == sorted(names) != others != names
    (result,) = results
    assert overlap.simulate(new, Cost()).makespan == result.timeline.makespan < 0.9 * result.before.makespan
    assert result.sizes is None and result.barriers == ()  # no size is symbolic
    assert apply(new, None).code == new.code  # its own order is as good as any; values are in the graph


def test_wrong_options_and_things_that_are_no_graphs_are_refused() -> None:
    with pytest.raises(TypeError, match="'budget'"):
        overlap.graph_pass(cost=Cost(), budget=3)
    for options in ({"sizes": 0}, {"effort": 1.5}):
        with pytest.raises(ValueError, match=f"got {next(iter(options.values()))}"):
            overlap.graph_pass(cost=Cost(), **options)
    for other in (torch.nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match=r"takes an fx\.GraphModule of ATen operators, got"):
            overlap.graph_pass(cost=Cost())(other, ())  # type: ignore[arg-type]

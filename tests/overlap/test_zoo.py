"""The zoo of graphs (`benchmarks.overlap_zoo`): one small family, against its own order and the bound."""

from __future__ import annotations

import pytest

from benchmarks import overlap_zoo as zoo


@pytest.mark.parametrize("links", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
def test_ours_is_no_longer_than_the_graphs_own_order(links: str) -> None:
    rows = list(zoo.cases(["random 0"], [links]))
    assert zoo.losses(rows)["spanwise / own"]["worst"] <= zoo.MARGIN
    ours, own = (rows[1]["orders"][name]["makespan"] / rows[1]["bound"] for name in ("spanwise", "own"))
    assert ours <= 1.002 < 1.3 <= own

"""The layout benchmark: every balancer on every mask, the figures of the plan, and the constants beside them."""

from __future__ import annotations

import json

import pytest

from benchmarks import layout


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "new" / "layout.json"
    result = layout.run(out, quick=True)
    assert json.loads(out.read_text()) == result
    return result


def test_every_balancer_on_every_mask(result):
    measured = {(row["mask"], row["balancer"]) for row in result["rows"] if "source" not in row}
    assert measured == {(mask, balancer) for mask in layout.masks() for balancer in layout.BALANCERS}
    assert all(row["recv_mean"] <= row["recv_max"] <= row["gather"] for row in result["rows"] if "source" not in row)


def test_the_figures_that_others_were_measured_against(result):
    # Contiguous layouts have nothing to choose: the masks are the ones on which the constants were measured.
    rows = {(row["mask"], row["balancer"]): row for row in result["rows"]}
    known = {
        "causal": (1.875, 57_344),
        "documents 0": (1.839, 2_206),
        "documents 1": (2.081, 2_445),
        "documents 2": (2.748, 4_270),
        "window": (1.016, 3_584),
    }
    for mask, (imbalance, received) in known.items():
        row = rows[mask, "contiguous"]
        assert (round(row["imbalance"], 3), round(row["recv_mean"])) == (imbalance, received)
        assert row["gather"] == 114_688
        for solver in ("MinHeap", "ToppHeap"):
            other = rows[mask, f"MagiAttention {solver}"]
            assert "MagiAttention" in other["source"]
            if mask != "causal":
                assert rows[mask, "local"]["recv_mean"] < other["recv_mean"]

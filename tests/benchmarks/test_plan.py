"""The layouts of `benchmarks.plan`: every balancer on every mask, and the constants beside their figures."""

from __future__ import annotations

from benchmarks import plan


def test_layouts() -> None:
    found = plan.layouts(quick=True)["rows"]
    rows = {(row["mask"], row["balancer"]): row for row in found}
    measured = {key for key, row in rows.items() if "source" not in row}
    assert measured == {(mask, balancer) for mask in plan.masks() for balancer in plan.BALANCERS}
    assert all(rows[key]["recv_mean"] <= rows[key]["recv_max"] <= rows[key]["gather"] == 114_688 for key in measured)
    # Contiguous layouts have nothing to choose: the masks are the ones on which the constants were measured.
    known = {"causal": (1.875, 57_344), "documents 0": (1.839, 2_206), "window": (1.016, 3_584)}
    for mask, figures in known.items():
        row = rows[mask, "contiguous"]
        assert (round(row["imbalance"], 3), round(row["recv_mean"])) == figures
        for solver in ("MinHeap", "ToppHeap"):
            other = rows[mask, f"MagiAttention {solver}"]
            assert "MagiAttention" in other["source"]
            assert mask == "causal" or rows[mask, "local"]["recv_mean"] < other["recv_mean"]

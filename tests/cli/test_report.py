"""Reports show a plan's own numbers, draw them to scale, and load nothing."""

from __future__ import annotations

import dataclasses
import html
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from spanwise import units
from spanwise.cli.report import pictures
from spanwise.cli.report.page import Bar, Table, pairs
from spanwise.cli.report.plan_page import Report, rank_table
from spanwise.cli.report.svg import Drawing, rectangles
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

DOCUMENTS = np.array([0, 700, 760, 2048, 2100, 4096])
MASKS = {
    "documents": SpanMask.documents(DOCUMENTS),
    "causal": SpanMask.causal(4096),
    "window": SpanMask.sliding_window(4096, 300),
    "global tokens": SpanMask.block_causal(4096, 256, num_previous=1, global_tokens=64),
}
SVG = "{http://www.w3.org/2000/svg}"


def plan_of(mask: SpanMask | dict[str, SpanMask], ranks: int = 4, **options: object) -> Plan:
    shape = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": 64, "block_size": 32} | options
    return make_plan(mask, ranks, **shape)  # type: ignore[arg-type]


# ---------------------------------------------------------------- drawings


def cells_of(path: str, count: int) -> np.ndarray:
    """How often each cell is drawn by a path of rectangles."""
    drawn = np.zeros((count, count), dtype=int)
    for x, y, wide, tall in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path):
        drawn[int(y) : int(y) + int(tall), int(x) : int(x) + int(wide)] += 1
    return drawn


def test_rectangles_cover_the_cells_once() -> None:
    cells = np.random.default_rng(0).random((40, 40)) < 0.6
    np.testing.assert_array_equal(cells_of(rectangles(cells), 40), cells)
    assert rectangles(np.zeros((3, 3), bool)) == ""


@pytest.mark.parametrize("balancer", ["head_tail", "lpt", "local"])
@pytest.mark.parametrize("name", MASKS)
def test_the_picture_is_the_mask(name: str, balancer: str) -> None:
    """Each cell is drawn once, in the colour of the rank that computes it, paler where the rank receives the key."""
    plan = plan_of(MASKS[name].select([[600, 840]], [[600, 840]]), 3, balancer=balancer, block_size=8)
    root = ET.fromstring(str(pictures.draw_mask("0", plan, "default")))
    drawn = np.zeros((240, 240), dtype=int)
    for path in root.iter(f"{SVG}path"):
        kind, color = path.get("class", "").split()
        if path.get("transform", "").startswith("translate(64 18)"):  # not the strips
            drawn += cells_of(path.get("d", ""), 240) * (2 + 2 * int(color[1:]) + (kind == "own"))
    expected = np.zeros((240, 240), dtype=int)
    for rank in range(3):
        own = plan.layout.indices(rank)
        expected[own] = 2 + 2 * rank
        expected[np.ix_(own, own)] += 1
    np.testing.assert_array_equal(drawn, expected * plan.mask().dense()[0])


def test_timeline_is_to_scale_and_marks_waits() -> None:
    hardware = plan_of(MASKS["causal"]).hardware
    slow = dataclasses.replace(hardware, links=(dataclasses.replace(hardware.links[-1], bandwidth=1e9),))
    plan = plan_of(MASKS["causal"], exchange="needed", hardware=slow)
    root = ET.fromstring(str(pictures.draw_timeline("0", plan, "default")))
    labels = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "small"]
    assert labels == ["rank 0", None, "rank 1", None, "rank 2", None, "rank 3", None]
    rects = list(root.iter(f"{SVG}rect"))
    timeline = plan.timeline()
    scale = (pictures.WIDTH - pictures.LEFT - pictures.RIGHT) / timeline.seconds
    for rank in range(4):
        mine = [rect for rect in rects if int(float(rect.get("y", 0))) // 16 == 2 * rank]
        width = {kind: 0.0 for kind in ("local", "remote", "copy", "waited")}
        for rect in mine:
            width[rect.get("class", "").split()[1]] += float(rect.get("width", 0)) / scale
        found = [one for one in timeline.intervals if one.rank == rank and one.stream == "compute"]
        own = sum(one.end - one.start for one in found if "local" in one.name)
        assert width["local"] == pytest.approx(own, abs=1 / scale)
        busy = sum(one.end - one.start for one in found)
        assert sum(width.values()) - width["waited"] == pytest.approx(busy, abs=4 / scale)
        assert sum(width.values()) == pytest.approx(max(one.end for one in found), abs=4 / scale)


# ---------------------------------------------------------------- tables and pages


def test_a_table_is_aligned() -> None:
    table = Table("t", ("name", "bar", "n"), [("a", Bar(0.5, 1.0), "1"), ("longer", Bar(0, 0.25), "22")], 1, "note", 2)
    bars = "█" * 14 + "▒" * 14, "▒" * 7
    assert str(table).splitlines() == [
        "t", f"  name    bar{' ' * 25}   n", f"  a       {bars[0]}   1", f"→ longer  {bars[1]:28}  22", "note",
    ]  # fmt: skip


def test_the_table_of_ranks() -> None:
    plan = plan_of(MASKS["documents"], exchange="needed")
    table = rank_table(plan, "default")
    work, local = plan.work(), plan.local_work()
    assert [row[0] for row in table.rows] == ["0", "1", "2", "3"]
    for rank, row in enumerate(table.rows):
        assert row[1] == Bar(local[rank] / work.max(), work[rank] / work.max())
        assert row[2:] == (
            pairs(work[rank]), f"{local[rank] / work[rank]:.0%}", f"{plan.recv_tokens()[rank]:,}",
            units.num_bytes(plan.recv_bytes()[rank]), f"{plan.traffic().sum(axis=0)[rank]:,}",
        )  # fmt: skip
    assert "16 of 40 ranks" in rank_table(plan_of(MASKS["documents"], 40), "default").note


TWO = {"window": MASKS["window"] & MASKS["documents"], "whole": MASKS["documents"]}
OPTIONS = {"weights": {"window": 3, "whole": 2}, "cu_seqlens": DOCUMENTS, "exchange": "needed"}
POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"


@pytest.fixture(scope="module")
def two() -> tuple[Plan, str]:
    plan = plan_of(TWO, **OPTIONS)
    return plan, Report(plan, "a file", "spanwise plan").html()


def test_page_loads_nothing_and_runs_nothing(two: tuple[Plan, str]) -> None:
    _, text = two
    assert POLICY in text and not re.search(r"<(script|link|img|iframe|object|embed|base)|\b(src|href)=", text)
    assert "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_page_shows_the_plans_numbers(two: tuple[Plan, str]) -> None:
    plan, text = two
    shown = html.unescape(re.sub(r"<[^>]*>", " ", text))
    for name in plan.masks:
        title = f"{pairs(plan.work(name).sum())} pairs, imbalance {plan.imbalance(name):.3f}"
        assert title in shown and f"Mask “{name}”" in shown
        assert all(f"{tokens:,}" in shown for tokens in plan.recv_tokens(name))
    assert plan.candidates and html.unescape(plan.explain()) in shown


HOSTILE = 'x"><script>alert(1)</script> '


def test_page_and_text_show_what_others_wrote() -> None:
    hardware = dataclasses.replace(plan_of(MASKS["causal"]).hardware, name=f"{HOSTILE}hardware")
    masks = {f"{HOSTILE}mask": MASKS["causal"], "my [/cluster] [red]": MASKS["window"]}
    plan = plan_of(masks, hardware=hardware).replace(reason=f"{HOSTILE}reason", balancer=f"{HOSTILE}balancer")
    report = Report(plan, f"{HOSTILE}file", f"{HOSTILE}command")
    text = report.html()
    assert "<script" not in text
    for what in ("hardware", "mask", "reason", "balancer", "file", "command"):
        assert HOSTILE + what in html.unescape(text) and HOSTILE + what in report.text().replace("\\'", "'")
    assert "my [/cluster] [red]" in report.text()
    drawing = Drawing(HOSTILE.strip(), "title", "description", 10, 10)
    drawing.text(0, 0, HOSTILE)
    drawing.rect(0, 0, 1, 1, "bar", HOSTILE)
    title, _, text, rect = ET.fromstring(str(drawing))
    assert (title.get("id"), text.text, rect[0].text) == (f"{HOSTILE.strip()}-title", HOSTILE, HOSTILE)

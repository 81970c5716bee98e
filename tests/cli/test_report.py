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
from spanwise.cli.report.page import Bar, pairs
from spanwise.cli.report.plan_page import Report, rank_table
from spanwise.cli.report.svg import Drawing
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


# ---------------------------------------------------------------- tables and pages


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
        assert f"imbalance {plan.imbalance(name):.3f}" in shown and f"Mask “{name}”" in shown
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

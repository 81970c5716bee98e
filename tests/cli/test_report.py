"""Reports show a plan's own numbers, draw them to scale, and load nothing."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from spanwise.cli.report import grids, plan_charts, units
from spanwise.cli.report.partition import STEPS, closer_look, lines, pairs_below
from spanwise.cli.report.partition_chart import draw_partition
from spanwise.cli.report.plan_figures import Figures, Source, figures, uncovered
from spanwise.cli.report.plan_html import render
from spanwise.cli.report.plan_text import show
from spanwise.cli.report.svg import RANK_COLORS, WIDTH, Drawing, ticks
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.grids import compare_grids
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

DOCUMENTS = np.array([0, 700, 760, 2048, 2100, 4096])
MASKS = {
    "documents": SpanMask.documents(DOCUMENTS),
    "causal": SpanMask.causal(4096),
    "window": SpanMask.sliding_window(4096, 300),
    "bidirectional": SpanMask.documents(DOCUMENTS, causal=False),
    "global tokens": SpanMask.block_causal(4096, 256, num_previous=1, global_tokens=64),
}
SVG = "{http://www.w3.org/2000/svg}"


def plan_of(mask: SpanMask | dict[str, SpanMask], ranks: int = 4, **options: object) -> Plan:
    shape = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": 64, "block_size": 32} | options
    return make_plan(mask, ranks, **shape)  # type: ignore[arg-type]


def figures_of(mask: SpanMask | dict[str, SpanMask], ranks: int = 4, **options: object) -> Figures:
    return figures(plan_of(mask, ranks, **options), Source("a file", "in order", 0, 1), "spanwise plan")


# ---------------------------------------------------------------- who computes what, drawn


def test_pairs_below_counts_cells() -> None:
    dense = MASKS["global tokens"].select([[100, 900]], [[0, 4096]]).dense()[0]
    mask = MASKS["global tokens"]
    keys = np.array([0, 1, 63, 64, 257, 900, 4096])
    counts = pairs_below(mask.start[0][:, 100:900], mask.end[0][:, 100:900], keys)
    assert counts.tolist() == [int(dense[:, :key].sum()) for key in keys]


@pytest.mark.parametrize("balancer", ["head_tail", "lpt", "local"])
@pytest.mark.parametrize("name", MASKS)
def test_a_line_a_row_is_the_mask_itself(name: str, balancer: str) -> None:
    small = MASKS[name].select([[600, 840]], [[600, 840]])
    layout = plan_of(small, 3, balancer=balancer, block_size=8).layout
    drawn = np.zeros((240, 240), dtype=int)  # 0 nothing, 1 received, 2 own
    for row, line in enumerate(lines(small, layout, 240)):
        assert np.isin(row, layout.indices(line.rank))
        for piece in line.pieces:
            assert piece.height == STEPS
            drawn[row, piece.start : piece.stop] = 2 if piece.is_local else 1
    expected = small.dense()[0].astype(int)
    for rank in range(3):
        own = layout.indices(rank)
        expected[np.ix_(own, own)] *= 2
    np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("balancer", ["contiguous", "lpt", "local"])
@pytest.mark.parametrize("name", MASKS)
def test_areas_are_the_work_where_a_line_has_one_owner(name: str, balancer: str) -> None:
    plan = plan_of(MASKS[name], 4, balancer=balancer, exchange="needed")
    cell = 32.0**2
    drawn, local = np.zeros((2, 4))
    for line in lines(plan.mask(), plan.layout, 128):
        drawn[line.rank] += line.area() * cell
        local[line.rank] += line.area(local_only=True) * cell
    # Rounding is carried on, so that a rank misses less than a cell; where the last cells are whole, a little more.
    assert np.abs(drawn - plan.work()).max() < 2 * cell
    assert np.abs(local - plan.local_work()).max() < 4 * cell


@pytest.mark.parametrize("count", [17, 100])
@pytest.mark.parametrize("name", MASKS)
def test_areas_follow_the_work_where_lines_have_several_owners(name: str, count: int) -> None:
    plan = plan_of(MASKS[name], 4, balancer="lpt", block_size=8)
    drawn = lines(plan.mask(), plan.layout, count)
    cell = (4096 / count) ** 2
    areas = np.zeros(4)
    for line in drawn:
        areas[line.rank] += line.area() * cell
    largest = max(line.area() for line in drawn) * cell
    assert np.abs(areas - plan.work()).max() < 2 * largest + cell
    assert abs(areas.sum() - plan.work().sum()) < 2 * largest + cell


def test_drawn_paths_hold_the_areas() -> None:
    plan = plan_of(MASKS["documents"], 4, balancer="local")
    whole, _ = draw_partition("default", plan.mask(), plan.layout, range(4))
    areas = np.zeros((4, 2))
    for path in ET.fromstring(str(whole)).iter(f"{SVG}path"):
        kind, data = path.get("class", ""), path.get("d", "")
        found = re.search(r"k(\d+)", kind)
        assert found
        width = float(path.get("stroke-width", 1))
        areas[int(found[1]), int("own" in kind)] += width * sum(float(h) for h in re.findall(r"h([\d.]+)", data))
    counted = np.zeros((4, 2))
    for line in lines(plan.mask(), plan.layout, 360):
        counted[line.rank] += line.area() - line.area(local_only=True), line.area(local_only=True)
    np.testing.assert_allclose(areas, counted)
    areas *= (4096 / 360) ** 2
    work, own = plan.work(), plan.local_work()
    assert np.abs(areas.sum(axis=1) - work).max() < 0.04 * work.mean()
    assert np.abs(areas[:, 1] - own).max() < 0.04 * work.mean()


def test_a_closer_look_is_taken_where_documents_are_short_and_keys_received() -> None:
    lengths = [64] * 100 + [1000] + [64] * 400
    mask = SpanMask.documents(np.concatenate(([0], np.cumsum(lengths))))
    owner = np.arange(len(np.arange(0, mask.q_len, 8))) * 8 >= 6400 + 500  # the long document is cut in its middle
    from spanwise.layouts.layout import Layout

    layout = Layout.from_owners(owner.astype(int), 2, mask.q_len, 8)
    window = closer_look(mask, layout, lines(mask, layout, 360))
    assert window is not None
    assert window[0] <= 6900 < 7400 <= window[1] and window[1] - window[0] < mask.q_len / 3
    shown = lines(mask, layout, 200, window)
    area = sum(line.area() for line in shown) * ((window[1] - window[0]) / 200) ** 2
    inside = mask.select([window], [window]).area().sum()
    assert area == pytest.approx(inside, rel=0.02)
    causal = SpanMask.causal(mask.q_len)
    assert closer_look(causal, layout, lines(causal, layout, 360)) is None


# ---------------------------------------------------------------- the page


class Page(HTMLParser):
    """What a page names, shows and could load."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.values: list[float] = []
        self.tips: list[str] = []
        self.text = text
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_title = tag == "title"
        if tag == "data":
            self.values.append(float(dict(attrs)["value"] or "nan"))

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.tips.append(data)


TWO = {"window": MASKS["window"] & MASKS["documents"], "whole": MASKS["documents"]}
OPTIONS = {"weights": {"window": 3, "whole": 2}, "cu_seqlens": DOCUMENTS, "exchange": "needed"}


@pytest.fixture(scope="module")
def two() -> Figures:
    return figures_of(TWO, **OPTIONS)


@pytest.fixture(scope="module")
def page(two: Figures) -> Page:
    return Page(render(two))


def test_page_loads_nothing(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "xlink:href", "srcset", "action", "data"} & attributes.keys(), (tag, attributes)
    assert "url(" not in page.text and "@import" not in page.text
    assert set(re.findall(r"https?://[^\s\"'<]+", page.text)) <= {"http://www.w3.org/2000/svg"}
    assert ("meta", "Content-Security-Policy") in [(tag, a.get("http-equiv")) for tag, a in page.tags]
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def test_page_says_the_plans_numbers(two: Figures, page: Page) -> None:
    plan = two.plan
    for name in plan.masks:
        for value in (plan.imbalance(name), plan.recv_tokens(name).mean(), plan.recv_bytes(name).max()):
            assert float(value) in page.values
        for rank, (work, own) in enumerate(zip(plan.work(name), plan.local_work(name), strict=True)):
            tip = f"rank {rank}: {work:,} pairs, {own:,} on its own keys, {work - own:,} on received ones"
            assert tip in page.tips
        traffic = plan.traffic(name)
        for receiver, sender in itertools.product(range(4), range(4)):
            tip = f"rank {receiver} receives {traffic[receiver, sender]:,} tokens from rank {sender}"
            assert (tip in page.tips) == (traffic[receiver, sender] > 0)
    assert set(plan.predict().values()) <= {*page.values, 0.0}
    assert {candidate.seconds["total"] for candidate in plan.candidates} <= set(page.values)
    assert plan.candidates and plan.fingerprint in page.text


def test_every_drawing_has_a_title_and_a_description(two: Figures, page: Page) -> None:
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) >= 2 * 5 + 1
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in drawings:
        assert attributes["role"] == "img"
        assert set((attributes["aria-labelledby"] or "").split()) <= set(ids)


HOSTILE = 'x"><script>alert(1)</script> '


def test_page_escapes_what_others_wrote() -> None:
    hardware = dataclasses.replace(plan_of(MASKS["causal"]).hardware, name=f"{HOSTILE}hardware")
    masks = {f"{HOSTILE}mask": MASKS["causal"], "local layers": MASKS["window"]}
    plan = plan_of(masks, hardware=hardware).replace(reason=f"{HOSTILE}reason", balancer=f"{HOSTILE}balancer")
    source = Source(f"{HOSTILE}file", f"{HOSTILE}packing", 0, 1)
    notes = dict.fromkeys(masks, f"{HOSTILE}note")
    text = render(figures(plan, source, f"{HOSTILE}command", notes=notes))
    assert "<script>alert" not in text
    page = Page(text)
    assert page.tags.count(("script", {})) == 1
    shown = html.unescape(text)
    for what in ("hardware", "mask", "reason", "balancer", "file", "packing", "note", "command"):
        assert HOSTILE[1:] + what in shown  # the first letter of a note becomes a capital
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and len(drawings) >= 2 * 5
    for attributes in drawings:
        named = (attributes["aria-labelledby"] or "").split()
        assert len(named) == 2 and set(named) <= set(ids)


def test_a_drawing_escapes_its_name() -> None:
    drawing = Drawing(HOSTILE.strip(), "title", "description", 10, 10)
    assert ET.fromstring(str(drawing))[0].get("id") == f"{HOSTILE.strip()}-title"


def test_terminal_shows_what_others_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("my [/cluster]", "a[red]b", ":x: c")
    plan = plan_of({names[0]: MASKS["causal"], names[1]: MASKS["window"]}).replace(reason=f"why {names[1]}")
    plan = plan.replace(hardware=dataclasses.replace(plan.hardware, name=names[2]))
    show(figures(plan, Source(f"file {names[0]}", "in order", 0, 1), "spanwise plan"))
    printed = capsys.readouterr().out
    for text in (f"Mask {names[0]!r}, ", f"Mask {names[1]!r}, ", f"why: why {names[1]}\n", f"on {names[2]}\n"):
        assert text in printed
    assert f"from file {names[0]}: in order\n" in printed


@pytest.mark.parametrize("ranks", [1, 2, 40, 100])
def test_any_number_of_ranks_is_drawn(ranks: int) -> None:
    result = figures_of(MASKS["documents"], ranks, balancer="local", exchange="needed", cu_seqlens=DOCUMENTS)
    text = render(result)
    root = ET.fromstring(re.findall(r'<svg role="img" aria-labelledby="work-0.*?</svg>', text, re.DOTALL)[0])
    assert len({tip.text for tip in root.iter(f"{SVG}title")}) == ranks + 1
    bars = root.findall(f"{SVG}rect")
    heights = np.array([float(bar.get("height", "nan")) for bar in bars]).reshape(ranks, 2)
    np.testing.assert_allclose(heights.sum(axis=1) / 150, result.plan.work() / result.plan.work().max(), atol=2e-4)
    assert len(text) < 1_000_000


def test_timeline_is_to_scale_and_marks_waits() -> None:
    slow = dataclasses.replace(plan_of(MASKS["causal"]).hardware, links=(plan_of(MASKS["causal"]).hardware.links[-1],))
    slow = dataclasses.replace(slow, links=(dataclasses.replace(slow.links[0], bandwidth=1e9),))
    result = figures_of(MASKS["causal"], exchange="needed", hardware=slow)
    mask = result.masks[0]
    assert mask.exposed.max() > 0
    drawing = plan_charts.timeline("default", mask, result.plan.timeline().forward.seconds)
    rects = list(ET.fromstring(str(drawing)).iter(f"{SVG}rect"))
    scale = (WIDTH - 80) / mask.end
    for rank in range(4):
        mine = [rect for rect in rects if f"k{rank}" in (rect.get("class") or "").split()]
        for kind, seconds in (
            ({"local", "remote", "copy"}, mask.compute[rank]),
            ({"exchange"}, mask.exchange[rank]),
            ({"exposed"}, mask.exposed[rank]),
        ):
            width = sum(float(r.get("width", 0)) for r in mine if set((r.get("class") or "").split()) & kind)
            assert width == pytest.approx(seconds * scale, abs=0.1)
    # Of the busiest rank, all that is not compute is waiting for an exchange: what predict() calls exposed.
    parts = result.plan.predict()
    busiest = int(np.argmax(mask.compute))
    assert mask.end == pytest.approx(parts["total"])
    assert mask.exposed[busiest] <= parts["exposed_forward"] + parts["exposed_backward"] + 1e-12


def test_bars_of_grids_end_at_three_times_one_plan() -> None:
    lengths = [30_000, *[100] * 20]
    compared = compare_grids(lengths, 8, linear_flops=1e6, num_q_heads=8, num_kv_heads=4, head_dim=64)
    root = ET.fromstring(str(grids.draw(compared)))
    bars = [bar for bar in root.iter(f"{SVG}rect")]
    tall = {bar.get("class"): [] for bar in bars}
    for bar in bars:
        tall[bar.get("class")].append(float(bar.get("height", "nan")))
    assert compared[-1].seconds > 3 * compared[0].seconds
    assert max(tall["local"]) == 40 and 10 < tall["local"][0] < 40 / 3 + 0.01  # of one plan: at most a third


def test_traffic_between_hosts_is_told() -> None:
    hardware = plan_of(MASKS["causal"]).hardware
    hardware = dataclasses.replace(
        hardware, links=(dataclasses.replace(hardware.links[0], ranks=2), hardware.links[-1])
    )
    result = figures_of(MASKS["documents"], 4, hardware=hardware, exchange="needed", balancer="lpt")
    traffic = result.plan.traffic()
    crossing = traffic[:2, 2:].sum() + traffic[2:, :2].sum()
    text = render(result)
    assert f"{100 * crossing / traffic.sum():.1f}% of them leave groups of 2 ranks" in text
    drawing = re.findall(r'<svg role="img" aria-labelledby="traffic-0.*?</svg>', text, re.DOTALL)[0]
    assert len(ET.fromstring(drawing).findall(f"{SVG}line")) == 2


def test_uncovered() -> None:
    cover = np.array([[1.0, 2.0], [3.0, 5.0]])
    assert uncovered(np.array([[0.0, 4.0], [4.5, 6.0]]), cover) == [(0, 1), (2, 3), (5, 6)]
    assert uncovered(np.array([[1.2, 1.8]]), cover) == []
    assert uncovered(np.array([[0.0, 1.0]]), np.empty((0, 2))) == [(0, 1)]


def test_figures_refuse_batches() -> None:
    with pytest.raises(ValueError, match="one sequence, and the plan has 2 batch rows"):
        figures_of(SpanMask.stack([MASKS["causal"], MASKS["documents"]]))


# ---------------------------------------------------------------- colours, units

_LMS = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
_OKLAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
# Machado, Oliveira and Fernandes (2009), severity 1, in linear RGB.
_SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "deuteranopia": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "tritanopia": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}


def test_neighbours_have_different_colors_where_there_are_enough() -> None:
    assert plan_charts.colors_of(plan_of(MASKS["causal"], 8, balancer="lpt").layout) == tuple(range(8))
    layout = plan_of(MASKS["causal"], 32, balancer="head_tail").layout
    colors = plan_charts.colors_of(layout)
    owners = layout.pieces()[np.argsort(layout.pieces()[:, 1]), 0].tolist()
    assert len(set(colors)) == len(RANK_COLORS) and len(colors) == 32
    assert all(a == b or colors[a] != colors[b] for a, b in itertools.pairwise(owners))


@pytest.mark.parametrize("sight", _SIGHT)
def test_colors_of_ranks_differ_for_everyone(sight: str) -> None:
    srgb = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in RANK_COLORS])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ _SIGHT[sight].T, 0, 1)
    lab = np.cbrt(seen @ _LMS.T) @ _OKLAB.T
    distance = np.linalg.norm(lab[:, None] - lab, axis=-1) + 9 * np.eye(len(lab))
    assert distance.min() >= 0.14


def test_units() -> None:
    assert [units.seconds(x) for x in (0, 1.234e-6, 0.9996e-3, 0.0123, 9.74, 120.0)] == [
        "0", "1.23 µs", "1.00 ms", "12.3 ms", "9.74 s", "120 s",
    ]  # fmt: skip
    assert [units.num_bytes(x) for x in (0, 512, 999.6, 41_230_000)] == ["0 B", "512 B", "1.00 kB", "41.2 MB"]
    assert [units.pairs(x) for x in (7, 12_053, 1_070_000_000)] == ["7", "12.1 k", "1.07 G"]
    assert ticks(131_072, 8) == [0, 20_000, 40_000, 60_000, 80_000, 100_000, 120_000]
    assert ticks(0, 8) == [0]

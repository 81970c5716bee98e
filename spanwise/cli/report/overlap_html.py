"""The HTML page of optimized graphs: figures, and a timeline of every order; see `page`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from spanwise.cli.report import overlap_charts
from spanwise.cli.report.overlap_figures import GraphFigures, Page
from spanwise.cli.report.overlap_text import COUNTED, describe_collective, describe_counts
from spanwise.cli.report.page import render_page
from spanwise.overlap.explain.reasons import reasons
from spanwise.overlap.explain.report import summary

#: Most rows of a table of exposed collectives.
MOST = 40


def render(page: Page) -> str:
    """The page as text."""
    drawings = [_drawings(str(index), one, page.labels) for index, one in enumerate(page.graphs)]
    return render_page(
        "overlap",
        styles=("overlap.css",),
        page=page,
        command=page.command,
        groups=page.groups,
        graphs=list(zip(page.graphs, drawings, strict=True)),
        summary=summary,
        counted=describe_counts,
        counted_are=COUNTED,
        named=describe_collective,
        most=MOST,
    )


def _drawings(key: str, one: GraphFigures, labels: Mapping[str, str]) -> dict[str, Any]:
    """Drawings of all orders to one scale, and their bars for the page's script."""
    most = max(timeline.makespan for timeline in one.timelines)
    drawn: list[dict[str, Any]] = []
    data = []
    known = {collective.start: collective.reason for collective in one.figures.collectives if collective.reason}
    for order, timeline in zip(one.orders, one.timelines, strict=True):
        ours = timeline is one.result.timeline
        why = known if ours else reasons(timeline, budget=one.result.budget)
        lanes = overlap_charts.lanes(timeline, labels, why)
        svg = overlap_charts.draw(f"{key}-{len(drawn)}", f"{one.name}, {order.name}", lanes, most)
        drawn.append({"svg": Markup(str(svg)), "name": order.name, "end": timeline.makespan})
        data.append([lane.as_list() for lane in lanes])
    # A "<" in a name could end the script that holds the names.
    text = json.dumps({"most": most, "timelines": data}, separators=(",", ":")).replace("<", "\\u003c")
    return {"timelines": drawn, "data": Markup(text)}

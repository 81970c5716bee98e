"""The HTML page of a plan: figures, drawings, and how they were made; see `page`."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup

from spanwise.cli.report import document_chart, grids, plan_charts, plan_text, units, wording
from spanwise.cli.report.page import render_page
from spanwise.cli.report.partition_chart import draw_partition
from spanwise.cli.report.plan_figures import Figures, MaskFigures
from spanwise.cli.report.svg import RANK_COLORS, Drawing
from spanwise.planning.plan import Plan


def render(result: Figures) -> str:
    """The page as text."""
    plan = result.plan
    return render_page(
        "plan",
        result=result,
        plan=plan,
        command=result.command,
        comparison=result.comparison,
        grids=[(grid, grids.name(grid)) for grid in result.grids],
        grids_summary=grids.summary(result.grids) if result.grids else "",
        grids_drawing=_svg(grids.draw(result.grids)) if result.grids else None,
        heading=plan_text.heading(result),
        heads_line=plan_text.heads_line(plan) if plan.inner > 1 else None,
        colors=RANK_COLORS,
        masks=[_mask(result, mask, str(index)) for index, mask in enumerate(result.masks)],
        candidates=[(one, plan_text.is_chosen(plan, one)) for one in plan_text.ranked(result)],
        layers=sum(plan.weights.values()),
        documents=_documents(result),
        chosen=wording.describe_way(plan),
        link_names=[
            f"{units.num_bytes(link.bandwidth)}/s, {units.seconds(link.latency)}"
            + (f" among {link.ranks} ranks" if link.ranks else "")
            for link in plan.hardware.links
        ],
    )


def _svg(drawing: Drawing) -> Markup:
    return Markup(str(drawing))  # its texts are escaped one by one


def _mask(result: Figures, mask: MaskFigures, key: str) -> dict[str, Any]:
    """Variables of one mask for the template. `key` is in the ids of its drawings; a mask's name may hold blanks."""
    plan = result.plan
    gathered = float((plan.seq_len - plan.layout.tokens_per_rank).mean())
    groups = [link.ranks for link in plan.hardware.links if link.ranks and link.ranks < plan.num_ranks]
    colors = plan_charts.colors_of(plan.layout)
    whole, closer = draw_partition(key, plan.mask(mask.name), plan.layout, colors)
    return {
        "figures": mask,
        "title": f"Mask “{mask.name}”" if len(result.masks) > 1 else "Mask",
        "share": float(mask.recv_tokens.mean()) / gathered if gathered else 0.0,
        "gathered": gathered,
        "local_share": float(mask.local.sum()) / mask.pairs if mask.pairs else 1.0,
        "filled": mask.pairs / plan.seq_len**2,
        "chunks": plan.num_chunks(mask.name),
        "received_words": _received(plan, mask),
        "crossing": [(group, _crossing(mask.traffic, group)) for group in groups],
        "partition": _svg(whole),
        "closer": closer and _svg(closer),
        "work": _svg(plan_charts.work(key, mask, colors)),
        "received": _svg(plan_charts.received(key, mask, colors)),
        "traffic": _svg(plan_charts.traffic(key, mask, groups)),
        "timeline": _svg(plan_charts.timeline(key, mask, plan.timeline(mask.name).forward.seconds)),
    }


def _received(plan: Plan, mask: MaskFigures) -> Markup:
    read = mask.needed_tokens.mean().item()
    number = Markup('<data value="{}">{}</data>').format(read, units.count(read))
    return Markup.escape(wording.describe_received(plan)).format(number)


def _crossing(traffic: np.ndarray, group: int) -> float:
    """Share of the tokens that leave groups of `group` consecutive ranks."""
    of = np.arange(len(traffic)) // group
    return float(traffic[of[:, None] != of].sum()) / max(float(traffic.sum()), 1.0)


def _documents(result: Figures) -> Markup | None:
    if len(result.lengths) < 2:
        return None
    plan = result.plan
    ends = np.concatenate(([0], np.cumsum(result.lengths)))
    area = sum(weight * plan.mask(name).area()[0] for name, weight in plan.weights.items())
    below = np.concatenate(([0], np.cumsum(area)))
    return _svg(document_chart.draw_documents(result.lengths, np.diff(below[ends])))

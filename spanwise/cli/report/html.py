"""One self-contained HTML page of a plan: the figures, the drawings, and how they came about. No network, no libraries.

The page may load nothing: its content security policy says so to the browser.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from spanwise.cli.report import charts, text, units
from spanwise.cli.report.figures import Figures, MaskFigures
from spanwise.cli.report.svg import RANK_COLORS, Drawing


def render(result: Figures) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        seconds=units.seconds, bytes=units.num_bytes, pairs=units.pairs, count=lambda n: f"{n:,.0f}", times=units.times
    )
    template = environment.from_string(
        resources.files("spanwise.cli.report").joinpath("plan.html.jinja").read_text("utf-8")
    )
    plan = result.plan
    return template.render(
        result=result,
        plan=plan,
        heading=text.heading(result),
        traded=text.traded(result) if plan.inner > 1 else None,
        colors=RANK_COLORS,
        style=Markup(resources.files("spanwise.cli.report").joinpath("plan.css").read_text("utf-8")),
        script=Markup(resources.files("spanwise.cli.report").joinpath("plan.js").read_text("utf-8")),
        masks=[_mask(result, mask, str(index)) for index, mask in enumerate(result.masks)],
        candidates=[(one, text.is_chosen(result, one)) for one in text.ranked(result)],
        layers=sum(plan.weights.values()),
        documents=_documents(result),
        chosen=text.chosen(plan),
        link_names=[
            f"{units.num_bytes(link.bandwidth)}/s, {units.seconds(link.latency)}"
            + (f" among {link.ranks} ranks" if link.ranks else "")
            for link in plan.hardware.links
        ],
    )


def _svg(drawing: Drawing) -> Markup:
    return Markup(str(drawing))  # its texts are escaped one by one


def _mask(result: Figures, mask: MaskFigures, key: str) -> dict[str, Any]:
    """What the template says of a mask; ``key`` is in the ids of its drawings, which a mask's own name may not suit."""
    plan = result.plan
    gathered = float((plan.seq_len - plan.layout.tokens_per_rank).mean())
    groups = [link.ranks for link in plan.hardware.links if link.ranks and link.ranks < plan.num_ranks]
    colors = charts.colors_of(plan.layout)
    whole, closer = charts.partition(key, plan.mask(mask.name), plan.layout, colors)
    return {
        "figures": mask,
        "title": f"Mask “{mask.name}”" if len(result.masks) > 1 else "Mask",
        "share": float(mask.recv_tokens.mean()) / gathered if gathered else 0.0,
        "gathered": gathered,
        "local_share": float(mask.local.sum()) / mask.pairs if mask.pairs else 1.0,
        "filled": mask.pairs / plan.seq_len**2,
        "pieces": plan.num_chunks(mask.name),
        "crossing": [(group, _crossing(mask.traffic, group)) for group in groups],
        "partition": _svg(whole),
        "closer": closer and _svg(closer),
        "work": _svg(charts.work(key, mask, colors)),
        "received": _svg(charts.received(key, mask, colors)),
        "traffic": _svg(charts.traffic(key, mask, groups)),
        "timeline": _svg(charts.timeline(key, mask, plan.timeline(mask.name).forward.seconds)),
    }


def _crossing(traffic: np.ndarray, group: int) -> float:
    """Share of the tokens that leave groups of ``group`` consecutive ranks."""
    of = np.arange(len(traffic)) // group
    return float(traffic[of[:, None] != of].sum()) / max(float(traffic.sum()), 1.0)


def _documents(result: Figures) -> Markup | None:
    if len(result.lengths) < 2:
        return None
    plan = result.plan
    ends = np.concatenate(([0], np.cumsum(result.lengths)))
    area = sum(weight * plan.mask(name).area()[0] for name, weight in plan.weights.items())
    below = np.concatenate(([0], np.cumsum(area)))
    return _svg(charts.documents(result.lengths, np.diff(below[ends])))

"""Draws docs/overlap.svg: the backward of four layers on 64 ranks as it was captured, by PyTorch's pass, and by ours.

python docs/draw_overlap.py
"""

from __future__ import annotations

from pathlib import Path

from spanwise.cli.report import pictures
from spanwise.cli.report.svg import Drawing
from spanwise.hardware import H100
from spanwise.overlap import CostModel, optimize, simulate
from spanwise.overlap.engine import Timeline
from spanwise.overlap.fx.capture import CaptureConfig, capture
from spanwise.overlap.pytorch_pass import pytorch_order

LAYERS = CaptureConfig(layers=4, dim=4096, heads=32, kv_heads=8, ffn=14336, seq_len=8192, batch=2, dp=8, tp=8)
COLORS = {"local": "#2f5d94", "exchange": "#e8a33d", "waited": "#c2255c"}
TITLE = 30


def main() -> None:
    graphs = capture(LAYERS)
    axes = {axis.name: axis for axis in graphs.axes.values() if axis.name}
    cost = CostModel(H100, ranks={name: axis.ranks for name, axis in axes.items()})
    theirs, _ = pytorch_order(graphs.backward, cost, cost.latency, ranks=cost.ranks, bucket=True)
    timelines = {
        "as captured": simulate(graphs.backward, cost),
        "PyTorch's overlap pass, with buckets": theirs,
        "spanwise": optimize(graphs.backward, cost).timeline,
    }
    labels = {name: axis for axis, of in graphs.axes.items() if (name := of.name)}
    most = max(timeline.makespan for timeline in timelines.values())
    panels = [panel(title, timeline, labels, most) for title, timeline in timelines.items()]
    height = sum(TITLE + drawing.height for _, drawing in panels)
    style = [
        "text { font: 12px sans-serif; fill: #555 } .title { font-weight: bold; fill: #222 } .tiny { font-size: 10px }",
        ".grid { stroke: #ddd } " + " ".join(f".{kind} {{ fill: {color} }}" for kind, color in COLORS.items()),
    ]
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{pictures.WIDTH}" height="{height:g}">',
        f"<style>{' '.join(style)}</style>",
        f'<rect width="{pictures.WIDTH}" height="{height:g}" fill="white"/>',
    ]
    top = 0.0
    for title, drawing in panels:
        shapes = "\n".join(drawing.shapes)
        body.append(f'<text x="{pictures.LEFT}" y="{top + 20:g}" class="title">{title}</text>')
        body.append(f'<g transform="translate(0 {top + TITLE:g})">\n{shapes}\n</g>')
        top += TITLE + drawing.height
    Path(__file__).with_name("overlap.svg").write_text("\n".join([*body, "</svg>", ""]))


def panel(title: str, timeline: Timeline, labels: dict[str, str], most: float) -> tuple[str, Drawing]:
    told = f"{title}: {timeline.makespan:.1f} ms, compute waits for {timeline.exposed_ms:.1f} ms"
    return told, pictures.draw(title, title, pictures.lanes(timeline, labels), most)


if __name__ == "__main__":
    main()

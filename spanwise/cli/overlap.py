"""``spanwise overlap``: captured or saved graphs ─► orders that hide their collectives ─► text, HTML, JSON.

Graphs are captured on fake process groups and fake tensors. This module is not part of `overlap`, because the other
half of the package plans the exchange of K/V in a captured graph.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention.attention import context_parallel_attention
from spanwise.attention.kernels import sdpa, varlen  # noqa: F401  # loaded graphs call their operators
from spanwise.cli.options import OverlapOptions
from spanwise.cli.output import check_writable, load_hardware, working, write, write_text
from spanwise.cli.report.overlap_page import Graph, Report, list_ranks
from spanwise.hardware import Hardware
from spanwise.masks.span_mask import SpanMask
from spanwise.overlap.costs.roofline import TENSOR_CORES, VECTOR_UNITS, CostModel
from spanwise.overlap.dag import GraphError
from spanwise.overlap.engine import Timeline
from spanwise.overlap.explain.reasons import reasons
from spanwise.overlap.explain.report import OrderFigures, figures, order_figures
from spanwise.overlap.explain.trace import trace_events
from spanwise.overlap.fx.capture import Attention, CaptureConfig, capture
from spanwise.overlap.fx.files import SavedGraphs, group_sizes, load_graphs, save_graphs
from spanwise.overlap.fx.sizes import assumed
from spanwise.overlap.optimize import Result, optimize
from spanwise.overlap.pytorch_pass import pytorch_order
from spanwise.planning.make_plan import make_plan

#: Most layers to capture; beyond, capturing alone takes minutes.
_LAYERS_LIMIT = 256

#: Options that only a captured model has; --load refuses them.
_MODEL = ("layers", "dim", "heads", "kv_heads", "ffn", "vocab", "seq_len", "batch", "dp", "cp", "tp", "exchange")


def overlap(options: OverlapOptions, command: str = "spanwise overlap") -> int:
    """Schedule graphs; print the gain, what is exposed, and why."""
    check_writable(options.trace, options.html, options.json, options.save)
    hardware = load_hardware(options.hardware)
    given = parse_groups(options.group)
    if options.dynamic_size < 1:
        raise ValueError(f"--dynamic-size must be at least 1, got {options.dynamic_size}")
    if given and options.load is None:
        raise ValueError("--group is for groups of --load: the groups of a captured model are known")
    source, what = _graphs(options, hardware)
    _check_groups(given, source)
    ranks = {**source.ranks, **given}
    chosen = _chosen(options, source)
    on_cpu = "cpu" in (options.device, options.hardware.lower())
    model = CostModel(hardware, rates=VECTOR_UNITS if on_cpu else TENSOR_CORES, ranks=ranks)
    found = []
    for name, gm in chosen.items():
        with assumed(gm, options.dynamic_size):
            found.append(_figures(name, gm, model, source.labels, options))
    report = Report(what, command, hardware, ranks, source.labels, tuple(found))
    print(report.text())
    write_text(options.json, lambda: json.dumps(report.as_dict(), indent=1) + "\n")
    write_text(options.trace, lambda: _trace(found, source.labels))
    write_text(options.html, report.html)
    write(options.save, lambda path: save_graphs(path, source.graphs, ranks=ranks, labels=source.labels))
    return 0


def parse_groups(given: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Ranks of groups by name; "0-56:8" is every eighth.

    >>> parse_groups(["1=0,8,16", "2=0-3", "3=0-56:8"])
    {'1': (0, 8, 16), '2': (0, 1, 2, 3), '3': (0, 8, 16, 24, 32, 40, 48, 56)}

    Raises:
        ValueError: a text is of another form, or repeats a rank.
    """
    found = {}
    for one in given:
        name, _, listed = one.partition("=")
        ranks: list[int] = []
        try:
            for part in listed.split(","):
                first, _, rest = part.partition("-")
                last, _, step = rest.partition(":")
                ranks += range(int(first), int(last or first) + 1, int(step or 1))
        except ValueError:
            ranks = []
        if not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks):
            raise ValueError(f"--group takes NAME=RANKS such as 1=0-7, 2=0,8,16 or 2=0-56:8, got {one!r}")
        found[name] = tuple(sorted(ranks))
    return found


def plan_attention(
    config: CaptureConfig, hardware: Hardware, exchange: str
) -> Callable[[DeviceMesh], tuple[Attention, Any]]:
    """Causal attention of shards of the sequence, for `capture`; a plan exchanges K/V over cp."""
    plan = make_plan(
        SpanMask.causal(config.seq_len),
        config.cp,
        exchange=exchange,
        num_q_heads=config.heads // config.tp,
        num_kv_heads=config.kv_heads // config.tp,
        head_dim=config.head_dim,
        dtype=config.dtype,
        hardware=hardware,
    )

    def make(mesh: DeviceMesh) -> tuple[Attention, Any]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: Any) -> torch.Tensor:
            return context_parallel_attention(q, k, v, local, mesh, kernel="sdpa")

        return attend, plan.local(mesh, "cpu", kernel="sdpa")

    return make


def _graphs(options: OverlapOptions, hardware: Hardware) -> tuple[SavedGraphs, str]:
    """The graphs to schedule, and their description."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    if options.load is not None:
        given = [name for name in _MODEL if getattr(options, name) != defaults[name]]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"{flags} say what model to capture, and --load {options.load} is captured already")
        if not options.trust:
            raise ValueError(f"--load {options.load} may run code as it is read: add --trust if you trust its author")
        with working(f"loading {options.load}"):
            try:
                return load_graphs(options.load), f"Graphs of {options.load}"
            except OSError as error:
                raise ValueError(f"cannot read --load {options.load}: {error.strerror or error}") from error
    if not 1 <= options.layers <= _LAYERS_LIMIT:
        raise ValueError(f"--layers must be between 1 and {_LAYERS_LIMIT}, got {options.layers}")
    if options.vocab < 0:
        raise ValueError(f"--vocab must be 0, for layers alone, or more, got {options.vocab}")
    sizes = {name: getattr(options, name) for name in _MODEL if name != "exchange"}
    config = CaptureConfig(**{**sizes, "vocab": options.vocab or None}, device=options.device)
    what = (
        f"Llama-like, {config.layers} layers of dim {config.dim:,}, {config.heads} heads ({config.kv_heads} of K/V), "
        f"FFN {config.ffn:,}, {f'vocabulary {config.vocab:,}' if config.vocab else 'no embedding and no loss'}; "
        f"{config.batch} x {config.seq_len:,} tokens; {config.num_ranks} ranks = {config.dp} data x {config.cp} "
        f"context x {config.tp} tensor parallel"
    )
    with working(f"capturing {config.layers} layers of {config.num_ranks} ranks"):
        attention = plan_attention(config, hardware, options.exchange) if config.cp > 1 else None
        graphs = capture(config, attention)
    axes = {name: axis for name, axis in graphs.axes.items() if axis.name}
    return SavedGraphs(
        {"forward": graphs.forward, "backward": graphs.backward},
        {axis.name: axis.ranks for axis in axes.values()},
        {axis.name: "cp (K/V)" if name == "cp" else name for name, axis in axes.items()},
    ), what


def _check_groups(given: Mapping[str, Sequence[int]], source: SavedGraphs) -> None:
    """Refuse groups that the graphs do not have, or have with another size."""
    known = group_sizes(source.graphs.values()) if given else {}
    for name, ranks in given.items():
        if name not in known or known[name].keys() - {len(ranks)}:
            have = ", ".join(f"{one} ({source.labels.get(one, one)}) of {sorted(known[one])}" for one in sorted(known))
            raise ValueError(f"--group {name}={list_ranks(ranks)}: the groups of the graphs are {have or 'none'} ranks")


def _chosen(options: OverlapOptions, source: SavedGraphs) -> Mapping[str, fx.GraphModule]:
    if options.graph == "both":
        return source.graphs
    if options.graph not in source.graphs:
        raise ValueError(f"--graph must be both or one of {', '.join(source.graphs)}, got {options.graph!r}")
    return {options.graph: source.graphs[options.graph]}


def _figures(
    name: str, gm: fx.GraphModule, model: CostModel, labels: Mapping[str, str], options: OverlapOptions
) -> Graph:
    try:
        with working(f"scheduling the {name}: {len(gm.graph.nodes):,} nodes"):
            result = optimize(
                gm, model, memory_budget=options.budget, bucket=not options.no_bucket, split=options.split
            )
    except GraphError as error:
        hint = "; say which ranks it has with --group NAME=RANKS" if "no process group" in str(error) else ""
        raise ValueError(f"{name}: {error}{hint}") from error
    peers, note = _peers(name, gm, model, result, labels, options) if options.torch else ([], "")
    return Graph(name, len(gm.graph.nodes), result, figures(result, labels), tuple(peers), note)


def _peers(
    name: str, gm: fx.GraphModule, model: CostModel, result: Result, labels: Mapping[str, str], options: OverlapOptions
) -> tuple[list[tuple[OrderFigures, Timeline]], str]:
    """Orders to compare with, and a remark if one of PyTorch's is missing.

    PyTorch's own pass at the same costs, with and without buckets, and ours without: orders without buckets all have
    the same launches.
    """
    found: dict[str, Timeline] = {}
    note = ""
    for bucket in (False, True):
        what = "PyTorch, buckets" if bucket else "PyTorch, reorder"
        with working(f"{what}: {name}"):
            try:
                found[what], _ = pytorch_order(gm, model, model.latency, ranks=model.ranks, bucket=bucket)
            except Exception as error:  # raised by PyTorch's graph code; ours goes on
                note = f"{what} cannot run here: {type(error).__name__}: {error}"
                break
    if not options.no_bucket:
        with working(f"scheduling the {name} without buckets"):
            plain = optimize(gm, model, memory_budget=options.budget, bucket=False, split=options.split)
        found["spanwise, reorder"] = plain.timeline
    return [
        (order_figures(what, timeline, reasons(timeline, budget=result.budget), labels), timeline)
        for what, timeline in found.items()
    ], note


def _trace(found: Sequence[Graph], labels: Mapping[str, str]) -> str:
    """Chrome's trace events of all graphs, one process for each order; see `trace_events`."""
    events: list[dict[str, Any]] = []
    orders = [(one, order, timeline) for one in found for order, timeline in one.orders]
    for process, (one, order, timeline) in enumerate(orders):
        events += trace_events(timeline, f"{one.name}, {order.name}", process, budget=one.result.budget, groups=labels)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"

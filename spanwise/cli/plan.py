"""``spanwise plan``: document lengths ─► masks ─► plans ─► text, HTML and JSON.

Plans are made exactly as in a training step, without a process group or an accelerator. Nothing is measured.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from spanwise.advice.advise import advise
from spanwise.cli.lengths import SEQ_LIMIT, choose_sequence
from spanwise.cli.options import PlanOptions
from spanwise.cli.output import check_sizes, check_writable, load_hardware, working, write_text
from spanwise.cli.report.plan_page import Report
from spanwise.hardware import Hardware
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan

#: Most ranks: reports hold tables of ranks × ranks, and draw one.
RANKS_LIMIT = 1024

#: Largest values of other options. With the limits above, every number of bytes and pairs stays below 2**63.
_LARGEST = {
    "layers": 2**16, "heads": 1024, "kv_heads": 1024, "head_dim": 4096, "block_size": SEQ_LIMIT,
    "memory_budget": 2**63 - 1,
}  # fmt: skip


def plan(options: PlanOptions, command: str = "spanwise plan") -> int:
    """Plan one sequence; print the plan, and write the report and its figures."""
    check_sizes(options, **_LARGEST)
    check_writable(options.html, options.json)
    hardware = load_hardware(options.hardware)
    cu_seqlens, source = choose_sequence(options)
    tokens = int(cu_seqlens[-1])
    ranks, most = min(8, tokens) if options.ranks is None else options.ranks, min(RANKS_LIMIT, tokens)
    if not 1 <= ranks <= most:
        raise ValueError(f"--ranks must be between 1 and {most:,} for a sequence of {tokens:,} tokens, got {ranks:,}")
    if options.advise is not None:
        return _advise(options.advise, options, hardware, np.diff(cu_seqlens))
    inner = options.inner
    if inner < 1 or ranks % inner or options.heads % inner:
        raise ValueError(
            f"--inner must divide the ranks and --heads, got {inner}, {ranks} ranks and {options.heads} heads"
        )
    masks, weights = build_masks(options, cu_seqlens)
    shared: dict[str, Any] = {
        "weights": weights, "hardware": hardware, "balancer": options.balancer, "exchange": options.exchange,
        "block_size": options.block_size, "num_q_heads": options.heads, "num_kv_heads": options.kv_heads,
        "head_dim": options.head_dim, "dtype": options.dtype,
    }  # fmt: skip
    with working(f"planning {tokens:,} tokens"):
        mesh = ranks if inner == 1 else (ranks // inner, inner)
        chosen = make_plan(masks, mesh, cu_seqlens=cu_seqlens, memory_budget=options.memory_budget, **shared)
    report = Report(chosen, source, command)
    print(report.text())
    write_text(options.json, lambda: json.dumps(report.as_dict(), indent=1) + "\n")
    write_text(options.html, report.html)
    return 0


def _advise(config: str, options: PlanOptions, hardware: Hardware, lengths: np.ndarray) -> int:
    """Print degrees of parallelism for a model, and write their figures."""
    if options.html is not None or options.ranks is None:
        raise ValueError("--advise needs --ranks, and writes --json, not --html")
    with working(f"planning {int(lengths.sum()):,} tokens"):
        found = advise(config, lengths, options.ranks, hardware=hardware, memory=options.memory_budget)
    print(found)
    figures = dataclasses.asdict(found)
    for choice, one in zip(figures["choices"], found.choices, strict=True):
        choice |= {"seconds": one.seconds, "interval": one.interval}
    write_text(options.json, lambda: json.dumps(figures, indent=1) + "\n")
    return 0


def build_masks(options: PlanOptions, cu_seqlens: np.ndarray) -> tuple[dict[str, SpanMask], dict[str, float]]:
    """Masks by name, and the number of layers that use each. A single mask is called "default", as in `make_plan`."""
    whole = SpanMask.documents(cu_seqlens, causal=not options.bidirectional)
    windowed = options.window_layers if options.window_layers is not None else options.layers
    if options.window is None:
        if options.window_layers is not None:
            raise ValueError(f"--window-layers {windowed} needs --window: how far do these layers read?")
        return {"default": whole}, {"default": options.layers}
    if not 0 < windowed <= options.layers:
        raise ValueError(f"--window-layers must be between 1 and --layers {options.layers}, got {windowed}")
    left, right = (*options.window, 0)[:2]
    if left < 0 or right < 0:
        raise ValueError(f"--window takes tokens of at least 0, got {left} and {right}")
    if right and not options.bidirectional:
        raise ValueError(
            f"--window {left} {right}: no causal row reads a key to its right; add --bidirectional, or leave RIGHT out"
        )
    near = SpanMask.documents(cu_seqlens, causal=not options.bidirectional, window=(left, right))
    if windowed == options.layers:
        return {"default": near}, {"default": options.layers}
    return {"window": near, "whole": whole}, {"window": windowed, "whole": options.layers - windowed}

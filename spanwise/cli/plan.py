"""``spanwise plan``: document lengths ─► masks ─► plans ─► text, HTML and JSON.

Plans are made exactly as in a training step, without a process group or an accelerator. Nothing is measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from spanwise.cli.command import BALANCERS, choices, command_line
from spanwise.cli.hardware import load_hardware
from spanwise.cli.output import check_writable, json_text, write_text
from spanwise.cli.report import plan_text
from spanwise.cli.report.compare import compare
from spanwise.cli.report.plan_figures import figures
from spanwise.cli.report.plan_html import render
from spanwise.cli.report.terminal import working
from spanwise.cli.sequence import SEQ_LIMIT, choose_sequence
from spanwise.hardware import Hardware
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.grids import Grid, compare_grids
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan
from spanwise.routes.exchanges import EXCHANGES

#: Most ranks: reports hold tables of ranks × ranks, and draw one.
RANKS_LIMIT = 1024

#: Largest values of other options. With the limits above, every number of bytes and pairs stays below 2**63.
_LARGEST = {
    "layers": 2**16,
    "heads": 1024,
    "kv_heads": 1024,
    "head_dim": 4096,
    "block_size": SEQ_LIMIT,
    "hidden_dim": 2**22,
    "max_tokens": SEQ_LIMIT,
    "memory_budget": 2**63 - 1,
}


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of ``spanwise plan``.

    Attributes:
        documents: JSON or CSV file of document lengths, or of cu_seqlens; a sequence's documents.
        column: key or column of --documents that holds the lengths.
        data: files and folders, every file one document; several may follow.
        seq_len: tokens at which packed documents are cut; alone: one document of that length.
        sequence: which of the packed sequences to plan, from 0.
        window: tokens that a row reads to each side.
        window_layers: layers that use --window; the others read whole documents. Default: all.
        bidirectional: rows read later tokens, too.
        heads: query heads.
        kv_heads: heads of K and V.
        head_dim: width of a head.
        dtype: of K and V.
        layers: attention layers of a step.
        ranks: size of the cp axis. Default: the recommendation of --compare-ranks, else 8.
        inner: ranks that trade heads for tokens (Ulysses); --exchange works between groups of so many.
        memory_budget: most that a rank may hold for exchanges, all layers; brings in the ring.
        hardware: preset h100, h200, b200 or cpu, or a file that calibrate wrote.
        balancer: how blocks are assigned to ranks.
        exchange: how K/V travel.
        block_size: tokens that are assigned together.
        compare_ranks: also compare sizes of the cp axis, and recommend one.
        global_batch: also compare the plan over all --ranks with fixed dp × cp grids, where each replica has other
            documents.
        hidden_dim: width inside the feed-forward layers, for the linear layers of --global. Default: 3.5 times --heads
            times --head-dim.
        max_tokens: most tokens of a rank: --global then also compares a plan in which ranks hold unequal numbers of
            tokens and take equal seconds.
        html: file for the report: drawings and all figures, one page.
        json: file for all figures.
    """

    documents: str | None = None
    column: str | None = None
    data: tuple[str, ...] = ()
    seq_len: int | None = None
    sequence: int = 0
    window: str | None = dataclasses.field(default=None, metadata={"metavar": "LEFT[,RIGHT]"})
    window_layers: int | None = None
    bidirectional: bool = False
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    layers: int = 1
    ranks: int | None = None
    inner: int = 1
    memory_budget: int | None = dataclasses.field(default=None, metadata={"metavar": "BYTES"})
    hardware: str = "h100"
    balancer: str = dataclasses.field(default="auto", metadata=choices("auto", *BALANCERS))
    exchange: str = dataclasses.field(default="auto", metadata=choices("auto", *EXCHANGES))
    block_size: int = 128
    compare_ranks: str | None = dataclasses.field(default=None, metadata={"metavar": "2,4,8,…"})
    global_batch: bool = dataclasses.field(default=False, metadata={"flag": "global"})
    hidden_dim: int | None = None
    max_tokens: int | None = None
    html: str | None = None
    json: str | None = None

    def command(self) -> str:
        """The shell command that gives these options, without the files to write."""
        return command_line("plan", self, ("html", "json"))


def plan(options: PlanOptions) -> None:
    """Plan one sequence and predict its step. Shows who computes and receives what, and why. Runs anywhere."""
    for name, largest in _LARGEST.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= largest:
            raise ValueError(f"--{name.replace('_', '-')} must be between 1 and {largest:,}, got {value:,}")
    if options.heads % options.kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {options.heads} and {options.kv_heads}")
    _check_global(options)
    check_writable(options.html, options.json)
    hardware = load_hardware(options.hardware)
    degrees = parse_ranks(options.compare_ranks) if options.compare_ranks is not None else ()
    cu_seqlens, source = choose_sequence(
        options.documents, options.column, options.data, options.seq_len, options.sequence
    )
    tokens = int(cu_seqlens[-1])
    _check_ranks("--ranks", () if options.ranks is None else (options.ranks,), tokens)
    _check_ranks("--compare-ranks", degrees, tokens)
    masks, weights = build_masks(options, cu_seqlens)

    @functools.cache
    def plan_for(num_ranks: int) -> Plan:
        return _make_plan(options, masks, weights, num_ranks, hardware, cu_seqlens)

    with working(f"planning {tokens:,} tokens"):
        comparison = compare(plan_for, degrees) if degrees else None
        ranks = options.ranks if options.ranks is not None else comparison.best if comparison else min(8, tokens)
        result = figures(plan_for(ranks), source, options.command(), comparison, describe_masks(options, masks))
        if options.global_batch:
            result = dataclasses.replace(result, grids=_grids(options, plan_for(ranks), cu_seqlens))
    plan_text.show(result)
    write_text(options.json, lambda: json_text(result.as_dict()))
    write_text(options.html, lambda: render(result))


def _check_global(options: PlanOptions) -> None:
    """``ValueError`` for options that --global does not take, and for those of --global without it."""
    if options.global_batch and options.inner > 1:
        raise ValueError(f"--global compares plans without --inner, got --inner {options.inner}; leave it out")
    if options.global_batch and options.memory_budget is not None:
        raise ValueError(
            f"--global compares plans without --memory-budget, got {options.memory_budget:,}; leave it out and read "
            f'the column "held"'
        )
    for name in ("hidden_dim", "max_tokens"):
        if not options.global_batch and (value := getattr(options, name)) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value:,} is for --global; add that")


def _check_ranks(flag: str, numbers: Iterable[int], tokens: int) -> None:
    for number in numbers:
        if not 1 <= number <= min(RANKS_LIMIT, tokens):
            raise ValueError(
                f"{flag} must be between 1 and {min(RANKS_LIMIT, tokens):,} for a sequence of {tokens:,} tokens "
                f"({RANKS_LIMIT:,} ranks at most, a token for each), got {number:,}"
            )


def _make_plan(
    options: PlanOptions,
    masks: dict[str, SpanMask],
    weights: dict[str, float],
    num_ranks: int,
    hardware: Hardware,
    cu_seqlens: np.ndarray,
) -> Plan:
    """The plan of the options on `num_ranks` ranks. One rank, which others are compared with, trades no heads."""
    inner = options.inner if num_ranks > 1 else 1
    if inner < 1 or num_ranks % inner or options.heads % inner:
        numbers = f"{options.inner}, {num_ranks} ranks and {options.heads} heads"
        raise ValueError(f"--inner must divide the ranks and --heads, got {numbers}")
    if options.exchange == "ulysses" and (inner > 1 or options.heads % num_ranks):
        numbers = f"{num_ranks} ranks, {options.heads} heads and --inner {inner}"
        raise ValueError(f"--exchange ulysses needs ranks that divide --heads, without --inner; got {numbers}")
    return make_plan(
        masks,
        num_ranks if inner == 1 else (num_ranks // inner, inner),
        weights=weights,
        hardware=hardware,
        cu_seqlens=cu_seqlens,
        memory_budget=options.memory_budget,
        **_shared(options),
    )


def _shared(options: PlanOptions) -> dict[str, Any]:
    """Arguments of `make_plan` that one plan and the plans of grids have alike."""
    return {
        "balancer": options.balancer,
        "exchange": options.exchange,
        "block_size": options.block_size,
        "num_q_heads": options.heads,
        "num_kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "dtype": options.dtype,
    }


def _grids(options: PlanOptions, whole: Plan, cu_seqlens: np.ndarray) -> tuple[Grid, ...]:
    """The plan over all ranks, and every grid of as many."""
    if options.max_tokens is not None and options.max_tokens * whole.num_ranks < whole.seq_len:
        raise ValueError(
            f"{whole.seq_len:,} tokens do not fit on {whole.num_ranks} ranks of --max-tokens {options.max_tokens:,}; "
            f"give at least {-(-whole.seq_len // whole.num_ranks):,}"
        )
    return compare_grids(
        np.diff(cu_seqlens),
        whole.num_ranks,
        linear_flops=options.layers * _linear_flops(options),
        mask=lambda offsets: build_masks(options, offsets)[0],
        whole=whole,
        max_tokens=options.max_tokens,
        weights=whole.weights,
        hardware=whole.hardware,
        **_shared(options),
    )


def _linear_flops(options: PlanOptions) -> float:
    """Operations of a token in one layer's linear layers: 2 a parameter in the forward, 4 in the backward.

    A Llama layer: q, k, v and output projections, and a feed-forward of three matrices.
    """
    queries, keys = options.heads * options.head_dim, options.kv_heads * options.head_dim
    hidden = options.hidden_dim if options.hidden_dim is not None else 3.5 * queries
    return 6.0 * (2 * queries * queries + 2 * queries * keys + 3 * queries * hidden)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of a list with commas, ascending.

    >>> parse_ranks("8,2,4")
    (2, 4, 8)
    """
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise ValueError(f"--compare-ranks takes numbers of ranks such as 2,4,8, got {text!r}")
    return tuple(ranks)


def parse_window(text: str, bidirectional: bool) -> tuple[int, int]:
    """(LEFT, RIGHT) in tokens, of "LEFT" or "LEFT,RIGHT".

    >>> parse_window("4096", bidirectional=False)
    (4096, 0)

    Raises:
        ValueError: a text of another form, or a right side for causal rows.
    """
    try:
        left, right = (int(part) for part in (text if "," in text else f"{text},0").split(","))
    except ValueError:
        left = right = -1
    if left < 0 or right < 0:
        raise ValueError(f"--window takes LEFT or LEFT,RIGHT, tokens of at least 0, got {text!r}")
    if right and not bidirectional:
        raise ValueError(
            f"--window {text}: no causal row reads a key to its right; add --bidirectional, or leave RIGHT out"
        )
    return left, right


def build_masks(options: PlanOptions, cu_seqlens: np.ndarray) -> tuple[dict[str, SpanMask], dict[str, float]]:
    """Masks by name, and the number of layers that use each. A single mask is called "default", as in `make_plan`."""
    causal = not options.bidirectional
    windowed = options.window_layers if options.window_layers is not None else options.layers
    if options.window is None:
        if options.window_layers is not None:
            raise ValueError(f"--window-layers {windowed} needs --window: how far do these layers read?")
        return {"default": SpanMask.documents(cu_seqlens, causal=causal)}, {"default": options.layers}
    if not 0 < windowed <= options.layers:
        raise ValueError(f"--window-layers must be between 1 and --layers {options.layers}, got {windowed}")
    window = parse_window(options.window, options.bidirectional)
    near = SpanMask.documents(cu_seqlens, causal=causal, window=window)
    if windowed == options.layers:
        return {"default": near}, {"default": options.layers}
    whole = SpanMask.documents(cu_seqlens, causal=causal)
    return {"window": near, "whole": whole}, {"window": windowed, "whole": options.layers - windowed}


def describe_masks(options: PlanOptions, names: Iterable[str]) -> dict[str, str]:
    """The keys that a row reads under each mask, in words."""
    whole = "each row reads its whole document" if options.bidirectional else "each row reads its document up to itself"
    notes = dict.fromkeys(names, whole)
    if options.window is not None:
        left, right = parse_window(options.window, options.bidirectional)
        after = f" and up to {right:,} after it" if options.bidirectional else ""
        near = f"each row reads itself, up to {left:,} tokens before it{after}, of its own document"
        notes |= {name: near for name in names if name != "whole"}
    return notes

"""What ``spanwise plan`` runs: document lengths -> masks -> plans -> text, HTML and JSON.

Plans are made exactly as a training step makes them, without a process group or an accelerator; nothing is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from spanwise import hardware as cost
from spanwise.cli.report import text
from spanwise.cli.report.compare import compare
from spanwise.cli.report.figures import Source, figures
from spanwise.cli.report.lengths import read_lengths
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan
from spanwise.train.data import DocumentStream, find_documents

#: Tokens of a sequence at most: masks and reports keep some arrays of one entry a token.
SEQ_LIMIT = 2**26

#: Ranks at most: reports hold tables of ranks × ranks, and draw one.
RANKS_LIMIT = 1024

#: The largest values of other options. Together with those above, every count of bytes and pairs stays below 2**63.
_LARGEST = {"layers": 2**16, "heads": 1024, "kv_heads": 1024, "head_dim": 4096, "block_size": SEQ_LIMIT}

_PRESETS = ("h100", "h200", "b200", "cpu")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The options of ``spanwise plan``, by the names they have there.

    Attributes:
        documents: file of document lengths; see :func:`spanwise.cli.report.lengths.read_lengths`.
        column: its key or column.
        data: files and folders, every file one document, as ``spanwise train --data`` takes them.
        seq_len: tokens of a sequence. Documents are laid end to end and cut there, as ``spanwise train`` does; without
            documents, one document of that length.
        sequence: which of the sequences is planned, from 0.
        window: ``LEFT`` or ``LEFT,RIGHT`` in tokens.
        window_layers: layers that use the window; the others read the whole document. Default: all.
        bidirectional: rows also read what follows them.
        layers: attention layers, for the seconds of a step.
        ranks: size of the cp axis. Default: what the comparison recommends, else 8.
        inner: ranks that trade heads (Ulysses); ``exchange`` works between groups of so many.
        memory_budget: bytes that a rank may hold for exchanges, as `make_plan` counts them.
        hardware: name of a preset, or a file of ``spanwise calibrate``.
        compare_ranks: sizes of the cp axis to compare, "2,4,8".
        html, json: files to write.
    """

    documents: str | None = None
    column: str | None = None
    data: tuple[str, ...] = ()
    seq_len: int | None = None
    sequence: int = 0
    window: str | None = None
    window_layers: int | None = None
    bidirectional: bool = False
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    layers: int = 1
    ranks: int | None = None
    inner: int = 1
    memory_budget: int | None = None
    hardware: str = "h100"
    balancer: str = "auto"
    exchange: str = "auto"
    block_size: int = 128
    compare_ranks: str | None = None
    html: str | None = None
    json: str | None = None

    def command(self) -> str:
        """The command line that gives these options, for a shell; what is written where is left out."""
        return command_line("plan", self, ("html", "json"))


def command_line(name: str, options: Any, files: Collection[str]) -> str:
    """What gives the `options` of a command that are not their defaults, all fields but those called `files`."""
    words = ["spanwise", name]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in files or value == field.default:
            continue
        flag = field.name.replace("_", "-")
        for one in value if isinstance(value, tuple) else (value,):
            words += [f"--{flag}"] if one is True else [f"--no-{flag}"] if one is False else [f"--{flag}", str(one)]
    return shlex.join(words)


def run(options: PlanOptions) -> dict[str, Any]:
    """Plan, print the summary, write what was asked for; returns the figures.

    Raises:
        ValueError: an option or an input file is wrong, or an output cannot be written.
        NotImplementedError: a balancer or exchange that does not exist yet.
    """
    for name, largest in _LARGEST.items():
        value = getattr(options, name)
        if not 1 <= value <= largest:
            raise ValueError(f"--{name.replace('_', '-')} must be between 1 and {largest:,}, got {value:,}")
    for path in (options.html, options.json):
        if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise ValueError(f"cannot write {path}: name a file in a folder that exists")
    hardware = load_hardware(options.hardware)
    degrees = parse_ranks(options.compare_ranks) if options.compare_ranks is not None else ()
    cu_seqlens, source = choose_sequence(options)
    tokens = int(cu_seqlens[-1])
    for flag, numbers in (("--ranks", (options.ranks,)), ("--compare-ranks", degrees)):
        for number in numbers:
            if number is not None and not 1 <= number <= min(RANKS_LIMIT, tokens):
                raise ValueError(
                    f"{flag} must be between 1 and {min(RANKS_LIMIT, tokens):,} for a sequence of {tokens:,} tokens "
                    f"({RANKS_LIMIT:,} ranks at most, a token for each), got {number:,}"
                )
    masks, weights = build_masks(options, cu_seqlens)

    @functools.cache
    def plan_for(num_ranks: int) -> Plan:
        inner = options.inner if num_ranks > 1 else 1  # one rank is what the others are compared with
        if inner < 1 or num_ranks % inner:
            raise ValueError(f"--inner must divide the number of ranks, got --inner {options.inner}, {num_ranks} ranks")
        return make_plan(
            masks,
            num_ranks if inner == 1 else (num_ranks // inner, inner),
            weights=weights,
            balancer=options.balancer,
            exchange=options.exchange,
            block_size=options.block_size,
            num_q_heads=options.heads,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            dtype=options.dtype,
            hardware=hardware,
            cu_seqlens=cu_seqlens,
            memory_budget=options.memory_budget,
        )

    with text.working(f"planning {tokens:,} tokens"):
        comparison = compare(plan_for, degrees) if degrees else None
        ranks = options.ranks if options.ranks is not None else comparison.best if comparison else min(8, tokens)
        result = figures(plan_for(ranks), source, options.command(), comparison, describe_masks(options, masks))
    text.show(result)
    for path, write in ((options.json, _write_json), (options.html, _write_html)):
        if path is not None:
            try:
                write(Path(path), result)
            except OSError as error:
                raise ValueError(f"cannot write {path}: {error.strerror or error}; name another file") from error
            text.wrote(path)
    return result.as_dict()


def load_hardware(name: str) -> cost.Hardware:
    """A preset by name, else what the file ``name`` holds."""
    if name.lower() in _PRESETS:
        return {"h100": cost.H100, "h200": cost.H200, "b200": cost.B200, "cpu": cost.CPU_HOST}[name.lower()]
    try:
        return cost.Hardware.load(name)
    except OSError as error:
        raise ValueError(
            f"cannot read --hardware {name!r}: {error.strerror or error}; name a file that spanwise calibrate wrote, "
            f"or one of {', '.join(_PRESETS)}"
        ) from error


def parse_ranks(text: str) -> tuple[int, ...]:
    """ "2,4,8" as ascending numbers."""
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise ValueError(f"--compare-ranks takes numbers of ranks such as 2,4,8, got {text!r}")
    return tuple(ranks)


def parse_window(text: str, bidirectional: bool) -> tuple[int, int]:
    """ "LEFT" or "LEFT,RIGHT" in tokens."""
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
    """Masks by name, and the layers that use each. A single mask is called "default", as in :func:`make_plan`."""
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
    """What a row reads under each mask, in words."""
    whole = "each row reads its whole document" if options.bidirectional else "each row reads its document up to itself"
    notes = dict.fromkeys(names, whole)
    if options.window is not None:
        left, right = parse_window(options.window, options.bidirectional)
        after = f" and up to {right:,} after it" if options.bidirectional else ""
        near = f"each row reads itself, up to {left:,} tokens before it{after}, of its own document"
        notes |= {name: near for name in names if name != "whole"}
    return notes


def choose_sequence(options: PlanOptions) -> tuple[np.ndarray, Source]:
    """Document offsets ``[num_docs + 1]`` of the sequence to plan, and where it comes from."""
    length, index = options.seq_len, options.sequence
    if length is not None and not 1 <= length <= SEQ_LIMIT:
        raise ValueError(f"--seq-len must be between 1 and {SEQ_LIMIT:,} tokens, got {length:,}")
    if options.documents is not None and options.data:
        raise ValueError("--documents and --data both say which documents there are; give one of them")
    if options.column is not None and options.documents is None:
        raise ValueError(f"--column {options.column} names a part of a --documents file; there is none")
    count: int | None
    if options.documents is not None:
        rows = read_lengths(options.documents, options.column)
        origin = options.documents
        if length is None:
            count, how = len(rows), "the documents in the order of the file"
            cu = _offsets(rows[_in_range(index, count, origin)])
        elif len(rows) > 1:
            raise ValueError(
                f"{origin} holds {len(rows)} sequences that are packed already, and --seq-len would pack them again; "
                f"leave --seq-len out and choose one with --sequence, or write one list of lengths"
            )
        else:
            offsets = _offsets(rows[0])
            count = -(-int(offsets[-1]) // length)
            how = f"documents in the order of the file, laid end to end and cut every {length:,} tokens"
            begin = _in_range(index, count, f"{origin} with --seq-len {length}") * length
            end = min(begin + length, int(offsets[-1]))
            cu = np.unique(np.concatenate(([begin, end], offsets[(offsets > begin) & (offsets < end)]))) - begin
    elif options.data:
        corpus = find_documents(options.data)
        origin = f"{', '.join(options.data)}: {corpus.describe()}"
        if length is None:
            count, how = 1, "every file one document, in the order of their names"
            cu = _offsets(np.array([document.num_tokens for document in corpus.documents], dtype=np.int64))
            _in_range(index, count, "--data without --seq-len")
        else:
            stream = DocumentStream(corpus.documents, 0, length)
            count = -(-stream.epoch_tokens // length)
            how = f"every file one document, shuffled (seed 0), cut every {length:,} tokens: train --held-out 0"
            cu = stream.cu_seqlens(_in_range(index, count, f"an epoch of --seq-len {length}") * length, length)
    elif length is not None:
        origin, count, how = "--seq-len", 1, "one document that fills the sequence"
        cu = np.array([0, length])
        _in_range(index, count, "--seq-len without documents")
    else:
        raise ValueError(
            "nothing to plan: name document lengths with --documents, files with --data, or give --seq-len"
        )
    if int(cu[-1]) > SEQ_LIMIT:
        raise ValueError(
            f"a sequence of {int(cu[-1]):,} tokens is more than one plan takes ({SEQ_LIMIT:,}); cut it with --seq-len"
        )
    return cu.astype(np.int64), Source(origin, how, index, count)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def _in_range(index: int, count: int, where: str) -> int:
    if not 0 <= index < count:
        raise ValueError(f"--sequence {index} does not exist: {where} gives {count:,}, counted from 0")
    return index


def _write_json(path: Path, result: Any) -> None:
    path.write_text(json.dumps(result.as_dict(), indent=1) + "\n", encoding="utf-8")


def _write_html(path: Path, result: Any) -> None:
    from spanwise.cli.report.html import render

    path.write_text(render(result), encoding="utf-8")

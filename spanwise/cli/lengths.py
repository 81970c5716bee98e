"""The sequence that ``spanwise plan`` plans: document lengths of a JSON or CSV file, or one length.

A file holds one sequence (its documents in order) or, as a JSON list of lists, several.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from spanwise.cli.options import PlanOptions

#: Most tokens of a sequence: a plan keeps a few arrays of one entry a token.
SEQ_LIMIT = 2**26

#: Names of columns or keys; names of offsets come last.
LENGTH_NAMES = ("lengths", "length", "seqlens", "num_tokens", "tokens")
OFFSET_NAMES = ("cu_seqlens", "offsets")


def choose_sequence(options: PlanOptions) -> tuple[np.ndarray, str]:
    """Document offsets int64 ``[num_docs + 1]`` of one sequence, and its source in words.

    Raises:
        ValueError: the options contradict one another, name no sequence, or a file is wrong.
    """
    path, seq_len = options.documents, options.seq_len
    if seq_len is not None and not 1 <= seq_len <= SEQ_LIMIT:
        raise ValueError(f"--seq-len must be between 1 and {SEQ_LIMIT:,} tokens, got {seq_len:,}")
    if path is None and seq_len is None:
        raise ValueError("nothing to plan: name document lengths with --documents, or give --seq-len")
    if path is None:
        rows, source = [np.array([seq_len])], "--seq-len: one document that fills the sequence"
    else:
        rows, source = read_lengths(path), f"{path}: the documents in the order of the file"
        if seq_len is not None:
            rows, source = _cut(rows, seq_len, path), f"{source}, laid end to end and cut every {seq_len:,} tokens"
    if not 0 <= options.sequence < len(rows):
        raise ValueError(f"--sequence {options.sequence} does not exist: there are {len(rows):,}, counted from 0")
    cu_seqlens = np.append(0, np.cumsum(rows[options.sequence])).astype(np.int64)
    if cu_seqlens[-1] > SEQ_LIMIT:
        raise ValueError(f"{cu_seqlens[-1]:,} tokens are more than one plan takes ({SEQ_LIMIT:,}); cut with --seq-len")
    which = f"; sequence {options.sequence} of {len(rows):,}, counted from 0" if len(rows) > 1 else ""
    return cu_seqlens, source + which


def _cut(rows: list[np.ndarray], seq_len: int, path: str) -> list[np.ndarray]:
    """The documents, end to end, in sequences of `seq_len` tokens."""
    if len(rows) > 1:
        raise ValueError(f"{path} holds {len(rows)} sequences that are packed already; choose one with --sequence")
    ends = np.cumsum(rows[0])
    cuts = np.arange(seq_len, ends[-1], seq_len)
    edges = np.unique(np.concatenate(([0], ends, cuts)))
    return np.split(np.diff(edges), np.searchsorted(edges, cuts))


def read_lengths(path: str | Path) -> list[np.ndarray]:
    """Document lengths in the file `path`, int64 ``[num_docs]`` for each sequence; ``ValueError`` names a wrong value.

    Args:
        path: ``.json``: a list of lengths, a list of such lists (one a sequence), or an object that holds one under
            a key. Anything else is CSV (commas, semicolons or tabs): one length a line, or a column of a table with a
            header.
            The key or column is the only one, or the first that is named like one of `LENGTH_NAMES` or `OFFSET_NAMES`.
            Names that begin with ``cu_`` or are in `OFFSET_NAMES` hold offsets ``0 = cu[0] <= …``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        value = json.loads(text) if Path(path).suffix.lower() == ".json" else _table(text, path)
    except OSError as error:
        raise ValueError(f"cannot read --documents {path}: {error.strerror} (seen from {Path.cwd()})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} is neither a JSON nor a CSV file of document lengths: {error}") from error
    name = ""
    if isinstance(value, dict):
        names = [key for key, entry in value.items() if isinstance(entry, list)]
        known = names if len(names) == 1 else [name for name in (*LENGTH_NAMES, *OFFSET_NAMES) if name in names]
        if not known:
            raise ValueError(f"{path}: which of {names} holds the lengths? Name it {LENGTH_NAMES[0]!r}")
        name = known[0]
        value = value[name]
    if not isinstance(value, list):
        raise ValueError(f"{path}: expected a list of document lengths, found {value!r:.60}")
    several = bool(value) and all(isinstance(entry, list) for entry in value)
    offsets, where = name in OFFSET_NAMES or name.startswith("cu_"), f"{path}, {name!r}" if name else str(path)
    if several:
        return [_lengths(entry, f"{where}[{i}]", offsets) for i, entry in enumerate(value)]
    return [_lengths(value, where, offsets)]


def _table(text: str, path: str | Path) -> Any:
    """The cells of one column, or columns by the names of a header."""
    lines = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=text[:4096].count), strict=True)
    rows = [row for row in ([cell.strip() for cell in line] for line in lines) if any(row)]
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(f"{path} has lines of {sorted(widths)} columns")
    if rows and not any(map(_is_number, rows[0])):
        return {name: list(cells) for name, *cells in zip(*rows, strict=True)}
    if widths - {1}:
        raise ValueError(f"{path} has no header line that names its columns; line 1 is {rows[0]!r:.60}")
    return [row[0] for row in rows]


def _lengths(values: list[Any], where: str, offsets: bool) -> np.ndarray:
    """The lengths of one sequence."""
    found = np.array([_whole(value, f"{where}[{i}]") for i, value in enumerate(values)], dtype=np.int64)
    if offsets and len(found) and found[0] != 0:
        raise ValueError(f"{where}[0]: offsets start at 0, found {found[0]}")
    lengths = np.diff(found) if offsets else found
    for i in np.flatnonzero(lengths < 0)[:1] + offsets:
        raise ValueError(f"{where}[{i}]: lengths are at least 0 and offsets ascend, got {found[i]}")
    if not 0 < lengths.sum() < 2**31:
        raise ValueError(f"{where} holds {lengths.sum():,} tokens; a sequence has between 1 and {2**31 - 1:,}")
    return lengths


def _whole(value: Any, place: str) -> int:
    """`value` as an int: 12, "12" and 12.0 are whole numbers, True and "12k" are not."""
    if not isinstance(value, bool) and _is_number(value) and float(value).is_integer() and abs(float(value)) < 2**31:
        return int(float(value))
    raise ValueError(f"{place}: expected a whole number of tokens, found {value!r:.60}")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (ValueError, OverflowError, TypeError):
        return False
    return True

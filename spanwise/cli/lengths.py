"""Reads document lengths from a JSON or CSV file, for ``spanwise plan --documents``.

A file holds one sequence (its documents in order) or, as a JSON list of lists, several. Errors name the file, the place
and the value.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

#: Names of a column or key that is found without --column; names of offsets come last.
LENGTH_NAMES = ("lengths", "length", "seqlens", "num_tokens", "tokens")
OFFSET_NAMES = ("cu_seqlens", "offsets")


def read_lengths(path: str | Path, column: str | None = None) -> list[np.ndarray]:
    """Document lengths in the file `path`, int64 ``[num_docs]`` for each sequence; ``ValueError`` names a wrong value.

    Args:
        path: ``.json``: a list of lengths, a list of such lists (one a sequence), or an object that holds one under
            a key. Anything else is CSV (commas, semicolons or tabs): one length a line, or a column of a table with a
            header.
        column: the key or column. Default: the only one, or the first that is named like one of `LENGTH_NAMES` or
            `OFFSET_NAMES`. Names that begin with ``cu_`` or are in `OFFSET_NAMES` hold offsets ``0 = cu[0] <= …``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if Path(path).suffix.lower() == ".json":
            return _from_json(json.loads(text), str(path), column)
        return [_from_csv(text, str(path), column)]
    except OSError as error:
        raise ValueError(f"cannot read --documents {path}: {error.strerror} (seen from {Path.cwd()})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} is neither a JSON nor a CSV file of document lengths: {error}") from error


def _from_json(value: Any, where: str, column: str | None) -> list[np.ndarray]:
    offsets = False
    if isinstance(value, dict):
        key = _choose([key for key, entry in value.items() if isinstance(entry, list)], column, where)
        value, offsets, where = value[key], _holds_offsets(key), f"{where}, {key!r}"
    elif column is not None:
        raise ValueError(f"{where} holds no object with keys, so --column {column} names nothing; leave it out")
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list of document lengths, found {_short(value)}")
    sequences = {f"{where}[{i}]": one for i, one in enumerate(value)} if _nested(value) else {where: value}
    return [
        _lengths({f"{place}[{i}]": one for i, one in enumerate(values)}, place, offsets)
        for place, values in sequences.items()
    ]


def _nested(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(entry, list) for entry in value)


def _from_csv(text: str, where: str, column: str | None) -> np.ndarray:
    lines = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=text[:4096].count), strict=True)
    numbered = ((lines.line_num, [cell.strip() for cell in row]) for row in lines)
    rows = {line: row for line, row in numbered if any(row)}
    header = next(iter(rows.values()), [])
    at, offsets = 0, False
    if header and not any(_is_number(cell) for cell in header):
        name = _choose(header, column, where)
        at, offsets = header.index(name), _holds_offsets(name)
        del rows[next(iter(rows))]
    elif column is not None or len(header) > 1:
        raise ValueError(f"{where} has no header line that names its columns; line 1 is {_short(header)}")
    for line, row in rows.items():
        if at >= len(row):
            raise ValueError(f"{where}, line {line}: {len(row)} columns, the header has {len(header)}")
    return _lengths({f"{where}, line {line}": row[at] for line, row in rows.items()}, where, offsets)


def _choose(names: list[str], column: str | None, where: str) -> str:
    """The key or column that holds the lengths."""
    if column is not None and column not in names:
        raise ValueError(f"{where} has no lengths under {column!r}; it has {names}")
    known = [name for name in (*LENGTH_NAMES, *OFFSET_NAMES) if name in names]
    if column is None and len(names) != 1 and not known:
        raise ValueError(f"{where}: which of {names} holds the document lengths? name it with --column")
    return column or (names if len(names) == 1 else known)[0]


def _holds_offsets(name: str) -> bool:
    return name in OFFSET_NAMES or name.startswith("cu_")


def _lengths(entries: dict[str, Any], where: str, offsets: bool) -> np.ndarray:
    """The lengths of one sequence, of the values by their places."""
    values = [_whole(value, place) for place, value in entries.items()]
    lengths = [after - before for before, after in itertools.pairwise(values)] if offsets else values
    if offsets and values and values[0] != 0:
        raise ValueError(f"{next(iter(entries))}: offsets start at 0, found {values[0]}")
    for place, length, value in zip(list(entries)[offsets:], lengths, values[offsets:], strict=True):
        if length < 0:
            raise ValueError(
                f"{place}: expected {'offsets that do not fall' if offsets else 'a length'}, found {value}"
            )
    if not 0 < sum(lengths) < 2**31:
        raise ValueError(f"{where} holds {sum(lengths):,} tokens; a sequence has between 1 and {2**31 - 1:,}")
    return np.array(lengths, dtype=np.int64)


def _whole(value: Any, place: str) -> int:
    """`value` as an int: 12, "12" and 12.0 are whole numbers, True and "12k" are not."""
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError, TypeError):
        pass
    raise ValueError(f"{place}: expected a whole number of tokens, found {_short(value)}")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"

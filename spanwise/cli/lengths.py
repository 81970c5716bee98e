"""Reads document lengths from a JSON or CSV file, for ``spanwise plan --documents``.

A file holds one sequence (its documents in order) or, as a JSON list of lists, several. Every error names the file,
the place and the value.
"""

from __future__ import annotations

import csv
import io
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
    except FileNotFoundError:
        raise ValueError(
            f"{str(path) or repr(path)} does not exist; --documents takes a JSON or CSV file (seen from {Path.cwd()})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read --documents {path}: {reason}") from error
    if Path(path).suffix.lower() == ".json":
        return _from_json(text, str(path), column)
    return [_from_csv(text, str(path), column)]


def _from_json(text: str, where: str, column: str | None) -> list[np.ndarray]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from error
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply; lengths are a list of numbers") from None
    except ValueError:  # Python's limit of digits
        raise ValueError(f"{where} holds a number of thousands of digits; lengths are numbers of tokens") from None
    offsets = False
    if isinstance(value, dict):
        lists = [key for key, entry in value.items() if isinstance(entry, list)]
        key = _choose(lists, column, where, "key")
        value, offsets, where = value[key], _holds_offsets(key), f"{where}, {key!r}"
    elif column is not None:
        raise ValueError(f"{where} holds no object with keys, so --column {column} names nothing; leave it out")
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list of document lengths, found {_short(value)}")
    if value and all(isinstance(entry, list) for entry in value):
        return [_check(entry, f"{where}[{i}]", offsets) for i, entry in enumerate(value)]
    return [_check(value, where, offsets)]


def _from_csv(text: str, where: str, column: str | None) -> np.ndarray:
    sample = text[:4096]
    delimiter = max(",;\t", key=sample.count)
    lines = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    try:
        rows = [(lines.line_num, [cell.strip() for cell in row]) for row in lines if any(cell.strip() for cell in row)]
    except csv.Error as error:  # an open quote, a cell larger than the reader takes
        raise ValueError(f"{where}, line {lines.line_num}: not CSV: {error}") from error
    if not rows:
        raise ValueError(f"{where} is empty; write one document length a line")
    header = rows[0][1]
    at, offsets = 0, False
    if not any(_is_number(cell) for cell in header):
        name = _choose(header, column, where, "column")
        at, offsets = header.index(name), _holds_offsets(name)
        rows = rows[1:]
    elif column is not None:
        raise ValueError(f"{where} has no header line, so --column {column} names nothing; line 1 is {_short(header)}")
    elif len(header) > 1:
        raise ValueError(
            f"{where}, line {rows[0][0]}: {len(header)} columns and no header that names them; write one document "
            f"length a line, or a header and --column"
        )
    values: list[Any] = []
    for line, row in rows:
        if at >= len(row):
            raise ValueError(f"{where}, line {line}: {len(row)} columns, the header has {len(header)}")
        values.append(_whole(row[at], f"{where}, line {line}"))
    return _lengths(values, [f"{where}, line {line}" for line, _ in rows], where, offsets)


def _choose(names: list[str], column: str | None, where: str, what: str) -> str:
    if column is not None:
        if column not in names:
            raise ValueError(f"{where} has no {what} {column!r} with lengths; it has {names}")
        return column
    if len(names) == 1:
        return names[0]
    for known in (*LENGTH_NAMES, *OFFSET_NAMES):
        if known in names:
            return known
    raise ValueError(f"{where}: which {what} of {names} holds the document lengths? name it with --column")


def _holds_offsets(name: str) -> bool:
    return name in OFFSET_NAMES or name.startswith("cu_")


def _check(values: list[Any], where: str, offsets: bool) -> np.ndarray:
    places = [f"{where}[{i}]" for i in range(len(values))]
    return _lengths([_whole(value, place) for value, place in zip(values, places, strict=True)], places, where, offsets)


def _lengths(values: list[int], places: list[str], where: str, offsets: bool) -> np.ndarray:
    if not values or (offsets and len(values) < 2):
        raise ValueError(f"{where} holds no document; a sequence needs at least one token")
    if offsets and values[0] != 0:
        raise ValueError(f"{places[0]}: offsets start at 0, found {values[0]}")
    for i, value in enumerate(values):
        before = values[i - 1] if offsets and i else 0
        if value < before:
            expected = f"offsets that do not fall (the one before is {before})" if before else "no negative number"
            raise ValueError(f"{places[i]}: expected {expected}, found {value}")
    total = values[-1] if offsets else sum(values)
    if not 0 < total < 2**31:
        raise ValueError(f"{where} holds {total:,} tokens; a sequence has between 1 and {2**31 - 1:,}")
    array = np.array(values, dtype=np.int64)
    return np.diff(array) if offsets else array


def _whole(value: Any, place: str) -> int:
    """`value` as an int: 12, "12" and 12.0 are whole numbers, True and "12k" are not."""
    try:
        number = float("nan") if isinstance(value, (bool, list, dict)) or value is None else float(value)
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

"""What a step gets, and the rows of figures that it writes: lines of JSON, appended one by one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Context(NamedTuple):
    """What a step gets.

    Attributes:
        device: "cuda", or "cpu" in a dry run: then sizes are tiny.
        rows: file for `write_row`.
        seconds: time that the step has.
    """

    device: str
    rows: Path
    seconds: float

    @property
    def dry(self) -> bool:
        return self.device == "cpu"


def write_row(file: Path, **row: Any) -> None:
    """Append a row; a crash afterwards cannot lose it."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def attempt(file: Path, **row: Any) -> Iterator[Row]:
    """Write a row with what the body puts into the dict; an error makes it a failed row, and goes no further."""
    found: Row = {}
    try:
        yield found
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()[:400]}"
        write_row(file, **row, **found, status="failed", error=text)
    else:
        write_row(file, **row, **found, status="ok")


def read_rows(file: Path) -> list[Row]:
    """The rows of a file; none if there is no file. A line that a killed process left unfinished is left out."""
    rows = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows

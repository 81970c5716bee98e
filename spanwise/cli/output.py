"""Files that commands write: checked before the work, written after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spanwise.cli.report.terminal import console


def check_writable(*paths: str | None) -> None:
    """Raise ``ValueError`` for a path that is a folder, or whose folder does not exist."""
    for path in paths:
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ValueError(f"cannot write {path}: name a file in a folder that exists")


def write(path: str | None, writer: Callable[[Path], object]) -> None:
    """Let `writer` write the file `path`, if one is given, and report it; ``ValueError`` if it cannot be written."""
    if path is None:
        return
    try:
        writer(Path(path))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}; name another file") from error
    console().print(f"wrote {path}", highlight=False)


def write_text(path: str | None, text: Callable[[], str]) -> None:
    """Write ``text()``, which is called only if `path` is given; see `write`."""
    write(path, lambda file: file.write_text(text(), encoding="utf-8"))


def json_text(figures: Any) -> str:
    """`figures` as a JSON file holds them."""
    return json.dumps(figures, indent=1) + "\n"

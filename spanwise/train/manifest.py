"""Digests of a checkpoint's files: written last, compared before anything is read from the files.

    OUT/checkpoints/step-00000030/manifest.json     {"files": {"run.json": {"bytes": 412, "blake2b": "…"}, …}}

A file that was truncated, overwritten or hit by a flipped bit has another digest. A checkpoint without a manifest was
not written to its end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from spanwise.train.metrics import write_json

NAME = "manifest.json"
_CHUNK = 2**20


def add_content(found: Any, file: BinaryIO) -> int:
    """Feed what is left of an open file to a hash of `hashlib`. Returns the number of bytes."""
    size = 0
    while data := file.read(_CHUNK):
        found.update(data)
        size += len(data)
    return size


def describe(path: Path) -> dict[str, Any]:
    """Size and digest of a file."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        size = add_content(found, file)
    return {"bytes": size, "blake2b": found.hexdigest()}


def names(folder: Path) -> list[str]:
    """Files of a checkpoint, sorted, without the manifest."""
    return sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != NAME)


def write(folder: Path, files: Mapping[str, dict[str, Any]]) -> None:
    """Write the manifest of `files`, each described by `describe`."""
    write_json(folder / NAME, {"files": dict(files)})


def check(folder: Path) -> None:
    """Compare all files with the manifest; ``OSError`` or ``ValueError`` names a file that is missing or damaged."""
    try:
        files = json.loads((folder / NAME).read_text())["files"]
        stated = {str(name): (int(entry["bytes"]), str(entry["blake2b"])) for name, entry in files.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} is damaged: {type(error).__name__}: {error}") from error
    for name, (size, digest) in stated.items():
        if Path(name).name != name:
            raise ValueError(f"{NAME} is damaged: {name!r} is no file of the checkpoint")
        if (found := (folder / name).stat().st_size) != size:
            raise ValueError(f"{name} is damaged: {found:,} bytes of {size:,}")
        if describe(folder / name)["blake2b"] != digest:
            raise ValueError(f"{name} is damaged: its content is not what was written")
    for name in names(folder):
        if name not in stated:
            raise ValueError(f"{name} is not in {NAME}")

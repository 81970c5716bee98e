"""Checks that commands share, files that they read and write, and the line that is shown during long work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spanwise.hardware import B200, CPU_HOST, H100, H200, Hardware

PRESETS = {"h100": H100, "h200": H200, "b200": B200, "cpu": CPU_HOST}


def load_hardware(name: str) -> Hardware:
    """The preset `name`, else the `Hardware` in the file `name`; ``ValueError`` if that cannot be read."""
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    try:
        return Hardware.load(name)
    except OSError as error:
        raise ValueError(
            f"cannot read --hardware {name!r}: {error.strerror or error}; name a file that spanwise calibrate wrote, "
            f"or one of {', '.join(PRESETS)}"
        ) from error


def check_sizes(options: Any, **largest: int) -> None:
    """Raise ``ValueError`` for an option outside 1 to its largest value, or for heads in unequal groups."""
    for name, most in largest.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} must be between 1 and {most:,}, got {value:,}")
    if options.heads % (options.kv_heads or options.heads):
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {options.heads} and {options.kv_heads}")


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
    print(f"wrote {path}")


def write_text(path: str | None, text: Callable[[], str]) -> None:
    """Write ``text()``, which is called only if `path` is given; see `write`."""
    write(path, lambda file: file.write_text(text(), encoding="utf-8"))


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show `text` on a terminal while the body runs."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{text} …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(f"\r{' ' * (len(text) + 2)}\r", end="", file=sys.stderr, flush=True)

"""Run a command in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

from spanwise.cli.app import main


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command printed, without line breaks in `said`, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return " ".join((self.out + self.err).replace("│", " ").split())


def run(*arguments: object) -> Done:
    """Run ``spanwise ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


def figures_of(path: Path, *arguments: object) -> tuple[Done, Any]:
    """Run ``spanwise ARGUMENTS`` with ``--json``; what it printed and the figures."""
    done = run(*arguments, "--json", path)
    assert done.status == 0, done.said
    return done, json.loads(path.read_text())


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)

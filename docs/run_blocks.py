"""Run the code blocks of Markdown pages, in order, as a reader would.

    python docs/run_blocks.py docs/tutorial.md            # fails where an output differs
    python docs/run_blocks.py --write docs/tutorial.md    # writes the outputs into the page

- ``python``: runs in the page's namespace. With ``title="name.py"`` it is saved under that name instead.
- ``bash``: runs in the folder of the saved files.
- ``text title="output"`` (``output`` for tables, which do not wrap): what the block above it printed.
- Other languages are shown and not run: ``console`` for commands of other machines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class PageError(AssertionError):
    """A block failed, or printed another output than its page shows."""


def run_command(command: str, folder: Path, place: str) -> str:
    """What the command printed; torch.distributed is kept to one thread a process and the loopback interface."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "100",
    }
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise PageError(f"{place}: {command} failed\n{done.stdout}\n{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def run_page(path: Path, folder: Path, run_command: Callable[[str, Path, str], str] = run_command) -> str:
    """Run the blocks of the page at `path`; the page with the outputs that they printed.

    Args:
        path: the page.
        folder: where files are saved and commands run.
        run_command: runs the ``bash`` blocks.

    Raises:
        PageError: a command failed.
    """
    scope: dict[str, Any] = {"__name__": "page"}
    output = ""
    page = path.read_text()

    def run(match: re.Match[str]) -> str:
        nonlocal output
        language, title, text = match[1], match[2] or "", match[3]
        line = page.count("\n", 0, match.start()) + 1
        if language == "python" and title:
            (folder / title).write_text(text)
        elif language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), working_in(folder):
                # The blank lines make line numbers in tracebacks those of the page.
                exec(compile("\n" * line + text, str(path), "exec"), scope)
            output = printed.getvalue()
        elif language == "bash":
            output = run_command(text, folder, f"{path.name}:{line}")
        elif title == "output":
            return f'```{language} title="output"\n{output.strip()}\n```'
        return match[0]

    return FENCE.sub(run, page)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the code blocks of pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write the outputs into the pages")
    given = parser.parse_args()
    for path in given.pages:
        with tempfile.TemporaryDirectory() as folder:
            page = run_page(path, Path(folder))
        if given.write:
            path.write_text(page)
        elif page != path.read_text():
            raise PageError(f"{path} shows other outputs than its blocks print; write them with --write")


if __name__ == "__main__":
    main()

"""Wrong options of every command: exit status 2, no traceback, and the option or value that is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import run, write

_SMALL = "overlap --layers 1 --dim 256 --heads 8 --kv-heads 4 --ffn 512 --vocab 512 --seq-len 512 --dp 2 --tp 2"

#: A command line, and a pattern of what it says.
REFUSED = [
    ("plan --balancer best", "best"), ("plan --window 1 2 3", "3"), ("plan --nonsense", "nonsense"), ("train", "train"),
    ("overlap --exchange ring", "ring"), ("calibrate --kernel fast", "fast"), ("verify --dtype int8", "int8"),
    ("plan", "nothing to plan"), ("plan --documents {tmp}/d.csv", r"d\.csv\[1\]: .* 'x'"),
    ("plan --seq-len 99999999999", "--seq-len .* 99,999,999,999"), ("plan --documents {tmp}/long.json", "99,999,999"),
    ("plan --seq-len 99 --window 5 5", "add --bidirectional"),
    ("plan --seq-len 99 --window 5 --window-layers 3 --layers 2", "--window-layers .* --layers 2, got 3"),
    ("plan --seq-len 99 --ranks 6 --inner 3", "--inner .* got 3, 6 ranks and 32 heads"),
    ("plan --seq-len 9999 --ranks 200000", "1 and 1,024 .* got 200,000"),
    ("plan --seq-len 99 --hardware h1000", "--hardware 'h1000': No such file.* or one of h100, h200"),
    ("plan --seq-len 99 --json /proc/none.json", "cannot write /proc/none.json: No such file"),
    (f"{_SMALL} --tp 3", "tp = 3, got 4"), (f"{_SMALL} --dp 3", "must be a multiple of"),
    (f"{_SMALL} --group dp", "NAME=RANKS .* 'dp'"), (f"{_SMALL} --group 1=0-3", "--group is for groups of --load"),
    ("overlap --load x --dp 4", "--dp say what"),
    ("verify --seq-len 5000", "--seq-len .* 4,096, got 5,000"), ("verify --inner 3", "--inner .* got 3 and 4"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "error"), REFUSED, ids=[line[:50] for line, _ in REFUSED])
def test_wrong_options(line: str, error: str, tmp_path: Path) -> None:
    write(tmp_path / "d.csv", "3\nx\n")
    write(tmp_path / "long.json", "[99999999]")
    done = run(*line.format(tmp=tmp_path).split())
    assert done.status == 2 and "Traceback" not in done.said
    assert re.search(error, done.said), done.said

"""Wrong options of every command: exit status 2, no traceback, and the option or value that is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import run, write

_SMALL = "overlap --layers 1 --dim 256 --heads 8 --kv-heads 4 --ffn 512 --vocab 512 --seq-len 512 --dp 2 --tp 2"

#: A command line, and a pattern of what it says.
REFUSED = [
    # No value of the option's type, or no option.
    ("plan --balancer best", "best"), ("plan --exchange pigeon", "pigeon"), ("plan --dtype int8", "int8"),
    ("plan --window 1 2 3", "3"), ("plan --seq-len 5.5", r"5\.5"), ("plan --nonsense", "nonsense"), ("train", "train"),
    ("overlap --device tpu", "tpu"), ("overlap --exchange ring", "ring"), ("calibrate --kernel fast", "fast"),
    ("verify --dtype int8", "int8"), ("verify --balancer best", "best"),
    # plan
    ("plan", "nothing to plan"), ("plan --documents {tmp}/d.csv", r"d\.csv\[1\]: .* 'x'"),
    ("plan --seq-len 99999999999", "--seq-len .* 99,999,999,999"), ("plan --documents {tmp}/long.json", "99,999,999"),
    ("plan --seq-len 99 --window -3", "--window .* -3"), ("plan --seq-len 99 --window 5 5", "add --bidirectional"),
    ("plan --seq-len 99 --window-layers 1", "--window-layers 1 needs --window"),
    ("plan --seq-len 99 --window 5 --window-layers 3 --layers 2", "--window-layers .* --layers 2, got 3"),
    (f"plan --seq-len 99 --layers {10**400}", "--layers .* got 10,000,"),
    ("plan --seq-len 99 --heads 3 --kv-heads 2", "--heads .* --kv-heads, got 3 and 2"),
    ("plan --seq-len 99 --ranks 6 --inner 3", "--inner .* got 3, 6 ranks and 32 heads"),
    ("plan --seq-len 99 --exchange ulysses --ranks 6", "32.* 6"), ("plan --seq-len 99 --ranks 0", "1 and 99 .* got 0"),
    ("plan --seq-len 9999 --ranks 200000", "1 and 1,024 .* got 200,000"),
    ("plan --seq-len 99 --hardware h1000", "--hardware 'h1000': No such file.* or one of h100, h200"),
    ("plan --seq-len 99 --hardware {tmp}/d.csv", r"d\.csv is not a file written by Hardware\.save"),
    ("plan --seq-len 99 --json /proc/none.json", "cannot write /proc/none.json: No such file"),
    # overlap
    (f"{_SMALL} --tp 3", "tp = 3, got 4"), (f"{_SMALL} --dp 3", "must be a multiple of"),
    (f"{_SMALL} --layers 0", "--layers .* got 0"), (f"{_SMALL} --vocab -1", "--vocab .* got -1"),
    (f"{_SMALL} --hardware abacus", "--hardware 'abacus'"), (f"{_SMALL} --group dp", "NAME=RANKS .* 'dp'"),
    (f"{_SMALL} --group 1=0-3", "--group is for groups of --load"), ("overlap --dynamic-size 0", "--dynamic-size .* 0"),
    ("overlap --load x --dp 4", "--dp say what"), (f"{_SMALL} --html /no/such/o.html", "cannot write /no/such/o.html"),
    # verify
    ("verify --ranks 0", "--ranks .* got 0"), ("verify --seq-len 5000", "--seq-len .* 4,096, got 5,000"),
    ("verify --heads 4 --kv-heads 3", "--heads .* --kv-heads, got 4 and 3"), ("verify --head-dim 0", "--head-dim .* 0"),
    ("verify --inner 3", "--inner .* got 3 and 4"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "error"), REFUSED, ids=[line[:50] for line, _ in REFUSED])
def test_wrong_options(line: str, error: str, tmp_path: Path) -> None:
    write(tmp_path / "d.csv", "3\nx\n")
    write(tmp_path / "long.json", "[99999999]")
    done = run(*line.format(tmp=tmp_path).split())
    assert done.status == 2 and "Traceback" not in done.said
    assert re.search(error, done.said), done.said

"""Each example runs as its docstring says, and the README shows the first one as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import torchrun

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples/decoder.py"})
# A line that the example prints only after its own checks.
PRINTED = {
    "attend.py": r"rank 1: \d+ tokens, reads \d+ elsewhere",
    "global_batch.py": r"token \d+: loss \S+, imbalance 1\.\d+",
    "huggingface.py": r"rank 1: loss \S+, verified",
    "overlap_graph.py": r"--- backward ---\nmakespan +\S+ ms, was \S+ ms",
    "overlap_step.py": r"makespan +\S+ ms, was \S+ ms[^$]*; were \d+ of 16 launches",
    "own_balancer.py": r"WholeDocuments: imbalance \S+, tokens received \[0, 0\], verified",
    "train_packed.py": r"the same as one device +│ proved",
}


def check(path: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[path.name], done.stdout), done.stdout
    assert "Warning" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in EXAMPLES])
def test_it_runs_on_two_ranks(path: Path, tmp_path: Path) -> None:
    assert f"torchrun --nproc-per-node 2 examples/{path.name}" in path.read_text().split('"""')[1]
    # --standalone takes a free port, so that tests can run side by side.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    command += ["--seq-len", "256", "--steps", "2", "--out", str(tmp_path)] if path.stem == "train_packed" else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    check(path, subprocess.run(command, env=environment, capture_output=True, text=True))


@pytest.mark.parametrize("name", ["huggingface", "own_balancer"])
def test_it_runs_on_two_forked_ranks(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / f"{name}.py"
    check(path, torchrun(path, 2, tmp_path))


def test_they_are_short() -> None:
    long = {path.name: lines for path in EXAMPLES if (lines := len(path.read_text().splitlines())) >= 60}
    assert list(long) == ["train_packed.py"]


def test_the_readme_shows_the_first_example() -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)
    assert blocks[0] == (ROOT / "examples/huggingface.py").read_text()
    assert "torchrun --nproc-per-node 2 examples/huggingface.py" in readme
    assert len(readme.splitlines()) <= 90

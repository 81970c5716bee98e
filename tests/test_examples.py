"""Each example runs as its docstring says, and the README shows the first one as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
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


def test_it_runs_on_two_forked_ranks(tmp_path: Path) -> None:
    for path in (ROOT / "examples/huggingface.py", ROOT / "examples/own_balancer.py"):
        check(path, torchrun(path, 2, tmp_path))


def test_the_readme_shows_the_first_example() -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)
    assert blocks[0] == (ROOT / "examples/huggingface.py").read_text()
    assert "torchrun --nproc-per-node 2 examples/huggingface.py" in readme
    assert len(readme.splitlines()) <= 90


# ---------------------------------------------------------------- train_packed.py, which `make demo` runs

EXAMPLE = ROOT / "examples" / "train_packed.py"


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Documents of 1 to 400 bytes."""
    random = np.random.default_rng(0)
    files = [tmp_path / f"document-{index:02}" for index in range(12)]
    for index, file in enumerate(files):
        size = int(random.integers(1, 400)) if index else 1
        file.write_bytes(bytes(random.integers(97, 105, size).astype(np.uint8)))
    return [str(file) for file in files]


def train(ranks: int, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    sizes = ("--seq-len", "252", "--layers", "1", "--dtype", "float64")
    return torchrun(EXAMPLE, ranks, folder, arguments=[*sizes, *options])


def steps(folder: Path) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = json.loads((folder / "metrics.json").read_text())["steps"]
    return rows


def proved(done: subprocess.CompletedProcess[str], count: int) -> bool:
    """Whether the table says that `count` steps are the same as on one device."""
    compared = re.search(rf"one device, steps compared +│ {count}$", done.stdout, re.MULTILINE)
    return bool(compared and re.search(r"the same as one device +│ proved", done.stdout))


def test_it_is_the_same_as_one_device_and_resumes_on_other_ranks(tmp_path: Path, data: list[str]) -> None:
    """Three steps of a dp × cp grid of 2 × 2; then the last step again on 2 × 1 ranks."""
    options = ["--dp", "2", "--out", "run", "--data", *data]
    done = train(4, tmp_path, "--steps", "3", "--save-every", "2", *options)
    assert done.returncode == 0 and proved(done, 3), (done.stdout, done.stderr)
    whole = steps(tmp_path / "run")
    assert any(row["recv_tokens"] for row in whole)
    (tmp_path / "run/step-000003/.metadata").unlink()  # as if the run had been killed while it saved
    again = train(2, tmp_path, "--steps", "3", "--resume", "--prove", "1", *options)
    assert again.returncode == 0 and proved(again, 3), (again.stdout, again.stderr)
    assert "step 1/3" not in again.stdout and "step 3/3" in again.stdout
    rows = steps(tmp_path / "run")
    assert len(rows) == 3 and rows[:2] == whole[:2]
    assert rows[2]["loss"] == pytest.approx(whole[2]["loss"], rel=1e-11)
    assert rows[2]["gradient_error"] <= 1e-10


def test_a_global_batch_is_the_same_as_one_device(tmp_path: Path, data: list[str]) -> None:
    done = train(2, tmp_path, "--steps", "2", "--dp", "2", "--global-batch", "--exchange", "ring", "--data", *data)
    assert done.returncode == 0 and proved(done, 2), (done.stdout, done.stderr)
    assert re.search(r"ranks +│ 2 \(dp 1 × cp 2\)", done.stdout)


def test_a_wrong_result_fails(tmp_path: Path, data: list[str]) -> None:
    """Rank 1 cuts its gradients in half: the table says so, and the exit status is 1."""
    wrong = tmp_path / "train_packed.py"
    text = EXAMPLE.read_text().replace("loss.backward()\n        figures", "(loss * 0.5).backward()\n        figures")
    assert text != EXAMPLE.read_text()
    wrong.write_text(text)
    (tmp_path / "decoder.py").write_text((ROOT / "examples/decoder.py").read_text())
    options = ["--seq-len", "252", "--layers", "1", "--steps", "1", "--data", *data]
    done = torchrun(wrong, 2, tmp_path, arguments=options)
    assert done.returncode == 1 and re.search(r"the same as one device +│ FAILED", done.stdout), done.stderr

"""Examples in docstrings run, those of internal functions too."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages of integrations that may be missing.
NEEDS = {"transformers": "transformers", "torchtitan": "torchtitan"}
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted(ROOT.glob("spanwise/**/*.py"))
    if "    >>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in name.split("."):
        if part in NEEDS:
            pytest.importorskip(NEEDS[part], reason=f"{NEEDS[part]} is not installed")
    monkeypatch.chdir(tmp_path)  # an example may write a file
    assert doctest.testmod(importlib.import_module(name)).failed == 0

"""Examples in the docstrings of public names run."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path
from types import ModuleType

import pytest

import spanwise
from spanwise import overlap


def modules() -> list[ModuleType]:
    """The modules that define the public names, and the two that export them."""
    public = [getattr(package, name) for package in (spanwise, overlap) for name in package.__all__]
    names = {spanwise.__name__, overlap.__name__}
    names |= {getattr(value, "__module__", type(value).__module__) for value in public}
    return [sys.modules[name] for name in sorted(names) if name.startswith("spanwise")]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write a file
    assert doctest.testmod(module).failed == 0

"""The wheel holds all of the package, its command and what it requires."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spanwise"
DEPENDENCIES = {"numba", "numpy", "torch", "tyro"}


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def test_what_the_archives_hold(dist: Path) -> None:
    """The wheel every file of the package, the sdist what a checkout needs."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    paths = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
        commands = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "spanwise = spanwise.cli.app:main" in commands
    required = {re.split(r"[^\w-]", text)[0] for text in re.findall("Requires-Dist: (?!.*extra ==)(.+)", metadata)}
    assert required == DEPENDENCIES
    assert held == {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}
    assert {Path(name).suffix for name in held} == {".py", ".css", ".typed"}
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"LICENSE", "Makefile", "README.md", "constraints.txt", "examples/attend.py", "tests/conftest.py"} <= names
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders <= {"benchmarks", "docs", "examples", "spanwise", "tests"}


def test_every_import_is_a_declared_dependency() -> None:
    """Extras are imported with their own integration."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"spanwise"}
    assert others == DEPENDENCIES | {"transformers", "accelerate", "typing_extensions"}  # the last for type checkers

"""The wheel holds all of the package: it is installed into a fresh environment and its command runs there."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import venv
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


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those of this one, found by a path file.

    Folders that a path file names are not searched for path files, so an editable install stays out of it.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python"]
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    found = {str(importlib.metadata.distribution(name).locate_file("")) for name in DEPENDENCIES}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(found)) + "\n")
    return folder


def test_what_the_archives_hold(dist: Path) -> None:
    """The wheel every file of the package, the sdist what a checkout needs."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    paths = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
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


def test_the_command_runs_from_another_folder(environment: Path, tmp_path: Path) -> None:
    facts = """
        import importlib.metadata, importlib.util, json
        package = importlib.util.find_spec("spanwise").origin
        print(json.dumps([package, importlib.metadata.version("spanwise"), importlib.metadata.requires("spanwise")]))
    """
    python = environment / "bin/python"
    module, version, requirements = json.loads(run(python, "-c", textwrap.dedent(facts), cwd=tmp_path))
    assert Path(module).is_relative_to(environment)
    assert (Path(module).parent / "py.typed").exists()
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    required = {re.split(r"[^\w-]", text)[0] for text in requirements if "extra ==" not in text}
    assert required == DEPENDENCIES

    (tmp_path / "lengths.json").write_text("[600, 200, 1000, 248]")
    command = environment / "bin/spanwise", "plan", "--documents", "lengths.json", "--ranks", "4"
    assert "2,048 tokens" in run(*command, "--balancer", "head_tail", "--html", "report.html", cwd=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert (PACKAGE / "cli/report/page.css").read_text().strip() in page and page.count("<svg") >= 2

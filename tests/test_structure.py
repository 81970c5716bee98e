"""Rules of the code base that no linter holds: what documents name exists, private torch names stay in one file."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_requirements_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "tests/requirements.md").read_text())
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"\ndef {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == []


def test_documents_link_to_files_that_exist() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def private_torch_names(module: ast.Module) -> list[str]:
    """Imports of, and attributes along, names of torch that begin with an underscore."""
    names = []
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    return sorted({name for name in names if re.match(r"torch\.(?!_check\b)(\w+\.)*_[a-z]\w*", name)})


def test_private_torch_names_are_in_one_file() -> None:
    assert private_torch_names(ast.parse("import torch\ntorch.ops._c10d_functional.wait_tensor(x)")) != []
    found = {
        str(path.relative_to(ROOT)): names
        for path in ROOT.glob("spanwise/**/*.py")
        if path.name != "_torch.py" and (names := private_torch_names(tree(path)))
    }
    assert found == {}


PACKAGE = ROOT / "spanwise"
LONG_FUNCTIONS: dict[str, str] = {}  # with the reason for each


def test_files_and_functions_are_short() -> None:
    """Files up to 400 lines; functions up to 60 below their docstring, but for those listed with a reason."""
    long = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if len(path.read_text().split("\n")) > 401}
    assert long == set()
    functions = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                if (node.end_lineno or 0) - first.lineno >= 60:
                    functions.add(f"{path.relative_to(PACKAGE)}::{node.name}")
    assert functions == set(LONG_FUNCTIONS)


def test_planted_defects_fit_the_code() -> None:
    from tests.mutants.__main__ import mutants

    listed = mutants()
    assert len({(mutant.folder, mutant.name) for mutant in listed}) == len(listed)
    for mutant in listed:
        assert ast.parse(mutant.planted((ROOT / mutant.file).read_text()))
        assert all((ROOT / word).exists() for word in mutant.tests.split() if word.startswith("tests/")), mutant.name


def test_public_names_are_imported_when_used() -> None:
    import spanwise

    names = set(spanwise.__all__)
    assert names | {"hf"} == set(spanwise._MODULE_OF) and names <= set(dir(spanwise))
    assert all(getattr(spanwise, name) is not None for name in names) and spanwise.overlap.optimize
    typed = {alias.name for node in ast.walk(tree(PACKAGE / "__init__.py")) if isinstance(node, ast.ImportFrom)
             for alias in node.names if node.module != "typing"}  # fmt: skip
    assert typed == names
    with pytest.raises(AttributeError, match="module 'spanwise' has no attribute 'nothing'"):
        spanwise.nothing  # noqa: B018


def test_help_imports_no_torch() -> None:
    code = "import sys, spanwise.__main__ as m\ntry: m.main(['--help'])\nfinally:\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("False\n") and "calibrate" in done.stdout, done

"""Rules of the code base that no linter holds: what documents name exists, private torch names stay in one file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def private_torch_names(source: str) -> list[str]:
    """Imports of, and attributes along, names of torch that begin with an underscore."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    return sorted({name for name in names if re.match(r"torch\.(?!_check\b)(\w+\.)*_[a-z]\w*", name)})


def test_private_torch_names_are_in_one_file() -> None:
    assert private_torch_names("import torch\ntorch.ops._c10d_functional.wait_tensor(x)") != []
    found = {
        str(path.relative_to(ROOT)): names
        for path in ROOT.glob("spanwise/**/*.py")
        if path.name != "_torch.py" and (names := private_torch_names(path.read_text()))
    }
    assert found == {}

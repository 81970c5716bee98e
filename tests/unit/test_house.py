"""Rules of the house that no linter holds: what documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_requirements_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/requirements.md").read_text())
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

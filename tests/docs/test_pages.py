"""The pages of the site: their code runs, and what scripts write into them is up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import spanwise
from spanwise import SpanMask, overlap, recurrence
from tests.scripts import torchrun

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import draw_gallery  # noqa: E402
import make_benchmarks  # noqa: E402
import make_gpu  # noqa: E402
import make_models  # noqa: E402
import make_versions  # noqa: E402
import run_blocks  # noqa: E402

PAGES = sorted(path for path in DOCS.rglob("*.md") if re.search(r"^```(python|bash)$", path.read_text(), re.MULTILINE))
# draw_gallery runs the code of the gallery; the tests of own exchanges and kernels run that of their pages.
ELSEWHERE = ("gallery", "add-an-exchange", "add-a-kernel")
# Packages that pages import and that may be missing.
NEEDS = {
    "huggingface": ["transformers"],
    "lightning": ["pytorch_lightning", "transformers"],
    "megatron": ["megatron.core.packed_seq_params"],
    "rl": ["transformers"],
}


def with_forked_ranks(command: str, folder: Path, place: str) -> str:
    """`run_blocks.run_command`, with ranks that start faster."""
    found = re.fullmatch(r"torchrun --standalone --nproc-per-node (\d+) (\S+\.py)\s*", command)
    if found is None:
        return run_blocks.run_command(command, folder, place)
    done = torchrun(folder / found[2], int(found[1]), folder)
    assert done.returncode == 0, f"{place}: {done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", ["index", "tutorial"])
def test_code_blocks_run_and_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    page = DOCS / f"{name}.md"
    assert run_blocks.run_page(page, tmp_path, with_forked_ranks) == page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if page.stem not in ELSEWHERE])
def test_code_blocks_run_as_a_reader_runs_them(page: Path, tmp_path: Path) -> None:
    for name in NEEDS.get(page.stem, ()):
        pytest.importorskip(name, reason=f"{name} is not installed")
    assert run_blocks.run_page(page, tmp_path) == page.read_text()


def test_gallery_is_what_the_script_draws(tmp_path: Path) -> None:
    draw_gallery.draw(target=tmp_path)
    drawn = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*")}
    assert len(drawn) > 50
    assert drawn == {path: (DOCS / path).read_text() for path in drawn}
    assert {path.name for path in (DOCS / "gallery").iterdir()} == {
        path.name for path in drawn if path.suffix == ".svg"
    }


@pytest.mark.parametrize(
    ("script", "name"),
    [(make_benchmarks, "benchmarks"), (make_versions, "status"), (make_models, "guides/huggingface")],
)
def test_tables_are_what_the_script_writes(script: Any, name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    assert script.page(page) == page


def test_gpu_page_is_what_the_script_writes() -> None:
    page = (DOCS / "gpu.md").read_text()
    assert make_gpu.page(page, make_gpu.load()) == page


def test_decisions_are_few() -> None:
    assert len(re.findall("^### ", (DOCS / "decisions.md").read_text(), re.MULTILINE)) <= 40


def test_gallery_shows_every_constructor() -> None:
    page = (DOCS / "gallery.md").read_text()
    constructors = [
        name for cls in SpanMask.__mro__ for name, value in vars(cls).items() if isinstance(value, classmethod)
    ]
    assert {"documents", "from_attention_mask", "stack"} <= set(constructors)
    assert [name for name in constructors if not name.startswith("_") and f"SpanMask.{name}(" not in page] == []


def test_reference_lists_every_public_name() -> None:
    listed = re.findall(r"^::: ([\w.]+)$", "\n".join(p.read_text() for p in DOCS.glob("reference/*.md")), re.MULTILINE)
    public = {f"spanwise.{name}" for name in spanwise.__all__}
    public |= {f"spanwise.overlap.{name}" for name in overlap.__all__}
    public |= {f"spanwise.recurrence.{name}" for name in recurrence.__all__}
    torchtitan = ("PlannedMask", "apply_cp_to_forward", "prepare_context_parallel_input")
    public |= {f"spanwise.integrations.torchtitan.{name}" for name in torchtitan}
    hf = pytest.importorskip("spanwise.integrations.transformers", reason="transformers is not installed")
    public |= {f"spanwise.integrations.transformers.{name}" for name in hf.__all__}
    # Three functions hide the modules that define them, and are listed by their place in these.
    assert sorted(re.sub(r"\.(optimize|backend|graph_pass)\.\1$", r".\1", name) for name in listed) == sorted(public)

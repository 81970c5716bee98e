"""advise: degrees that fit, the simplest within 5 %, intervals of the table of published measurements."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import spanwise
from spanwise.advice import advise as advice
from spanwise.advice.model import Model, Step, apart, read_model

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "published.json"


def test_short_documents_need_no_cp() -> None:
    found = spanwise.advise(CONFIG, [4096] * 64, 8)
    assert (found.best.cp, found.best.exchange, found.best.dp * found.best.tp) == (1, "none", 8)
    assert "no CP" in str(found)


def test_a_document_that_fits_on_no_rank_is_shared() -> None:
    found = spanwise.advise(CONFIG, [131072] * 2, 8)
    best = found.best
    assert best.cp > 1 and best.exchange != "none" and best.dp * best.cp * best.tp == 8
    assert best.memory <= 0.9 * spanwise.H100.memory and best.cp * best.tokens >= 131072
    assert all(choice.seconds >= best.seconds / 1.05 for choice in found.choices)


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="nothing fits into 20 GB"):
        spanwise.advise(CONFIG, [131072], 8, memory=20_000_000_000)


@pytest.mark.parametrize(
    "changes",
    [{"num_experts": 8}, {"layer_types": ["linear_attention"] * 32}, {"vocab_size": None}, {"hidden_size": "4096"}],
)
def test_models_that_it_does_not_know(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        spanwise.advise(CONFIG | changes, [4096], 8)


def test_configs_are_read_from_files_with_windows_and_text_models(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    config = {"text_config": CONFIG | {"layer_types": kinds, "sliding_window": 1024, "head_dim": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path / "config.json")
    assert model.windows == (1024, None) * 16 and (model.kv_heads, model.head_dim) == (8, 64)
    shorter = spanwise.advise(model, [65536] * 4, 8)
    assert shorter.best.parts["attention"] < spanwise.advise(CONFIG, [65536] * 4, 8).best.parts["attention"]
    assert shorter.kernel == "flex"


def test_intervals_are_those_of_the_table() -> None:
    found = json.loads(RESULTS.read_text())
    assert [round(x, 2) for x in found["steps"]["nominal"]] == list(advice.NOMINAL)
    assert [round(x, 2) for x in found["steps"]["fitted"]] == list(advice.MEASURED)
    assert [round(x, 2) for x in found["memory"]][::2] == list(advice.MEMORY)


def test_a_step_of_parts() -> None:
    llama = read_model(CONFIG)
    assert llama.parameters == pytest.approx(8.03e9 - 128256 * 4096, rel=2e-3)  # without the embedding
    assert Step(llama, spanwise.H100, 8).memory(0) > 16 * 8.03e9 / 8
    model = Model(layers=2, dim=512, heads=8, kv_heads=2, head_dim=64, ffn=1024, vocab=1000)
    alone, recomputed = (Step(model, spanwise.H100, 1, recomputed=part) for part in (0.0, 1.0))
    products = [step.compute(1000)["matrix products"] for step in (alone, recomputed)]
    assert products[0] == pytest.approx(6 * model.parameters * 1000 / spanwise.H100.matmul_flops)
    assert products[1] == pytest.approx(products[0] * 4 / 3)
    assert alone.memory(100) > recomputed.memory(100) > recomputed.memory(0)
    assert Step(model, spanwise.H100, 64).memory(0) < alone.memory(0)
    assert [link.ranks for link in apart(spanwise.H100, 4).links] == [2, None]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 3))
def test_longest_first_is_within_grahams_bound_of_the_best(work: list[int], bins: int) -> None:
    owner = advice._longest_first(np.array(work, float), bins)
    busiest = np.bincount(owner, work, minlength=bins).max()
    every = itertools.product(range(bins), repeat=len(work))
    best = min(np.bincount(np.array(each), work, minlength=bins).max() for each in every)
    assert best <= busiest <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9

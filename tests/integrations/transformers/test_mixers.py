"""Hugging Face models with layers that carry a state along the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.integrations.transformers.test_exact import MIXERS

DOCUMENTS = tiny.documents_of((23, 41, 7, 30, 1))
BATCH = tiny.packed(DOCUMENTS)


def test_plans_price_states() -> None:
    config = tiny.config_of("qwen3_next")
    (each,) = (hf.make_plan(BATCH, config, 2).recurrences or {}).values()
    assert (each.layers, each.heads, each.key_dim, each.value_dim) == (2, 4, 8, 12)
    assert hf.make_plan(BATCH, config, 2, recurrences=None).recurrences is None
    for name in (*MIXERS, "llama"):
        priced = hf.make_plan(BATCH, tiny.config_of(name), 2).recurrences
        assert (priced is not None) == (name not in ("minimax", "llama")), name


def test_plans_price_latents() -> None:
    """Beside the states of other layers, too."""
    for name, row in (("deepseek_v3", 24), ("kimi_linear", 24), ("llama", None)):
        plan = hf.make_plan(BATCH, tiny.config_of(name), 2, num_q_heads=4, head_dim=24, v_head_dim=16)
        sent = plan.recv_tokens("full_attention") * 2 * (row or 4 * (24 + 16))
        assert plan.kv_row_dim == row and (plan.recv_bytes("full_attention") == sent).all() and sent.any(), name
    both = [tiny.config_of(name) for name in ("deepseek_v3", "llama")]
    assert hf.make_plan(BATCH, both, 2).kv_row_dim is None


def test_a_model_without_attention_is_cut_into_runs() -> None:
    """Nothing speaks against one run a rank, and the fewest states travel."""
    plan = hf.make_plan(BATCH, tiny.config_of("mamba2"), 4)
    assert sorted(plan.masks) == ["linear_attention"]
    assert [len(plan.layout.runs(rank)) for rank in range(4)] == [1] * 4
    assert plan.layout.tokens_per_rank.max() <= 26


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba2", "mamba"])
def test_bfloat16_rounds_no_more_than_on_one_device(name: str) -> None:
    model = tiny.model_of(name).bfloat16()
    want = tiny.reference(copy.deepcopy(model).float(), DOCUMENTS)
    alone, cut = tiny.reference(model, DOCUMENTS), tiny.mean_over_ranks(tiny.train(model, BATCH))

    def rounding(got: Any) -> float:
        return sum((got[1][n].float() - x).norm().item() / x.norm().item() for n, x in want[1].items()) / len(want[1])

    assert rounding(cut) <= 1.2 * rounding(alone)

"""Models of PEFT under context parallelism."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
import torch

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads what transformers deprecates
DOCUMENTS = tiny.documents_of((23, 41, 7))


def _lora(model: Any, modules: tuple[str, ...] = ("q_proj", "v_proj"), **options: Any) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=list(modules), task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("given", ["the PEFT model", "its base model"])
def test_lora(given: str) -> None:
    models = [_lora(tiny.model_of("llama"), modules_to_save=["lm_head"]) for _ in range(2)]
    # The same modules without PEFT's wrapper: its base model holds the adapters.
    loss, grads = tiny.reference(copy.deepcopy(models[0]).get_base_model(), DOCUMENTS)
    want = loss, {f"base_model.model.{name}": x for name, x in grads.items()}

    def on_rank(rank: int, mesh: Any) -> Any:
        model = models[rank]
        hf.context_parallel(model if given == "the PEFT model" else model.get_base_model(), mesh)
        return tiny.step(model, tiny.packed(DOCUMENTS))

    tiny.check(run_ranks(2, on_rank), want)


def test_lora_after_context_parallel() -> None:
    model = tiny.model_of("llama")
    loss, grads = tiny.reference(_lora(copy.deepcopy(model)).get_base_model(), DOCUMENTS)

    def on_rank(rank: int, mesh: Any) -> Any:
        return tiny.step(_lora(hf.context_parallel(model, mesh)), tiny.packed(DOCUMENTS))

    tiny.check(run_ranks(1, on_rank), (loss, {f"base_model.model.{name}": x for name, x in grads.items()}))


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("qwen3_next", ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")),
        ("falcon_h1", ("q_proj", "in_proj")),
        ("mamba2", ("in_proj",)),
        ("mamba", ("in_proj", "x_proj")),
    ],
)
def test_lora_in_layers_with_a_state(name: str, modules: tuple[str, ...]) -> None:
    models = [_lora(tiny.model_of(name), modules) for _ in range(2)]
    loss, grads = tiny.reference(copy.deepcopy(models[0]).get_base_model(), DOCUMENTS)

    def on_rank(rank: int, mesh: Any) -> Any:
        hf.context_parallel(models[rank], mesh)
        return tiny.step(models[rank], tiny.packed(DOCUMENTS))

    tiny.check(run_ranks(2, on_rank), (loss, {f"base_model.model.{n}": x for n, x in grads.items()}))


def _virtual(kind: Any) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(tiny.model_of("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).train()


def test_prompt_tuning() -> None:
    """The prompt stands before the padding of a row, so documents are padded on the right."""
    models = [_virtual(peft.PromptTuningConfig) for _ in range(2)]
    batch = tiny.padded(DOCUMENTS, "right")
    want = tiny.step(copy.deepcopy(models[0]), batch)

    def on_rank(rank: int, mesh: Any) -> Any:
        hf.context_parallel(models[rank], mesh)
        return tiny.step(models[rank], batch)

    tiny.check(run_ranks(2, on_rank), want)


def test_prefix_tuning() -> None:
    model = _virtual(peft.PrefixTuningConfig)

    def on_rank(rank: int, mesh: Any) -> None:
        hf.context_parallel(model, mesh)
        model(**tiny.padded(DOCUMENTS, "right"))

    with pytest.raises(ValueError, match="as with prefix tuning"):
        run_ranks(1, on_rank)

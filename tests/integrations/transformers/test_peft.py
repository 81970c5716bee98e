"""Models of PEFT under context parallelism."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads what transformers deprecates
_SAVED: dict[str, Any] = dict(modules_to_save=["lm_head"])
DOCUMENTS = tiny.documents_of((23, 41, 7))


def _lora(model: Any, modules: tuple[str, ...] = ("q_proj", "v_proj"), **options: Any) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=list(modules), task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("given", ["its base model", "a model before"])
def test_lora(given: str) -> None:
    models = [tiny.model_of("llama") for _ in range(2)]
    # The same modules without PEFT's wrapper: its base model holds the adapters.
    want = tiny.reference(_lora(copy.deepcopy(models[0]), **_SAVED).get_base_model(), DOCUMENTS)

    def on_rank(rank: int, mesh: Any) -> Any:
        model = models[rank] if given == "a model before" else _lora(models[rank], **_SAVED)
        hf.context_parallel(model if given == "a model before" else model.get_base_model(), mesh)
        model = _lora(model, **_SAVED) if given == "a model before" else model
        return tiny.step(model, tiny.packed(DOCUMENTS))

    tiny.check(run_ranks(1, on_rank), _named(want))  # one rank: threads draw from one generator


def _named(want: Any) -> Any:
    return want[0], {f"base_model.model.{name}": x for name, x in want[1].items()}


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama", ("q_proj", "v_proj")),
        ("qwen3_next", ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")),
        ("falcon_h1", ("q_proj", "in_proj")),
        ("mamba2", ("in_proj",)),
        ("mamba", ("in_proj", "x_proj")),
    ],
)
def test_lora_given(name: str, modules: tuple[str, ...]) -> None:
    model = _lora(tiny.model_of(name), modules, **(_SAVED if name == "llama" else {}))
    want = tiny.reference(copy.deepcopy(model).get_base_model(), DOCUMENTS)
    tiny.check(tiny.train(model, tiny.packed(DOCUMENTS)), _named(want))


def _virtual(kind: Any) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(tiny.model_of("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).train()


def test_virtual_tokens() -> None:
    """The prompt stands before the padding of a row, so documents are padded on the right; prefixes are refused."""
    model, batch = _virtual(peft.PromptTuningConfig), tiny.padded(DOCUMENTS, "right")
    tiny.check(tiny.train(model, batch), tiny.step(copy.deepcopy(model), batch))
    with pytest.raises(ValueError, match="as with prefix tuning"):
        tiny.train(_virtual(peft.PrefixTuningConfig), batch, 1)

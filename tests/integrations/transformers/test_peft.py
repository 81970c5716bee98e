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
DOCUMENTS = tiny.documents_of((23, 41, 7))


def _adapted(model: Any, kind: Any = peft.LoraConfig, **options: Any) -> Any:
    torch.manual_seed(3)
    if kind is peft.LoraConfig:
        options = dict(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]) | options
        options |= dict(r=4, init_lora_weights=False)
    return peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **options)).train()


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama", None), ("qwen3_next", "q_proj in_proj_qkvz in_proj_ba out_proj"), ("falcon_h1", "q_proj in_proj"),
        ("mamba2", "in_proj"), ("mamba", "in_proj x_proj"),
    ],
)  # fmt: skip
def test_lora(name: str, modules: str | None) -> None:
    """Adapters around a model before `context_parallel`; of a Llama also after it, and in its base model."""
    plain, options = tiny.model_of(name), dict(target_modules=modules.split(), modules_to_save=None) if modules else {}
    model, batch = _adapted(copy.deepcopy(plain), **options), tiny.packed(DOCUMENTS)
    # The same modules without PEFT's wrapper: its base model holds the adapters.
    loss, gradients = tiny.reference(copy.deepcopy(model).get_base_model(), DOCUMENTS)
    want = loss, {f"base_model.model.{n}": x for n, x in gradients.items()}
    tiny.check(tiny.train(model, batch), want)
    if modules is not None:
        return

    def on_rank(rank: int, mesh: Any) -> Any:
        hf.context_parallel(model.get_base_model(), mesh)
        return tiny.step(model, batch), tiny.step(_adapted(hf.context_parallel(plain, mesh)), batch)

    for result in run_ranks(1, on_rank)[0]:  # one rank: threads draw from one generator
        tiny.check([result], want)


def test_virtual_tokens() -> None:
    """The prompt stands before the padding of a row, so documents are padded on the right; prefixes are refused."""
    model, prefixed = (
        _adapted(tiny.model_of("llama"), kind, num_virtual_tokens=4)
        for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig)
    )
    batch = tiny.padded(DOCUMENTS, "right")
    tiny.check(tiny.train(model, batch), tiny.step(copy.deepcopy(model), batch))
    with pytest.raises(ValueError, match="as with prefix tuning"):
        tiny.train(prefixed, batch, 1)

"""Trainers of trl under context parallelism: what they log and learn is what they do on one process a cp group."""

from __future__ import annotations

from typing import Any

import pytest
import trl
from transformers import ProcessorMixin

from tests.integrations.transformers import images, runs
from tests.integrations.transformers.runs import EVALUATED, compare, run

OF_SFT = (*runs.LOGGED, "num_tokens", "entropy", "mean_token_accuracy")
OF_PREFERENCES = (*runs.LOGGED, "logps/chosen", "logits/rejected", "num_tokens", "entropy")
OF_DPO = (*OF_PREFERENCES, "rewards/margins", "rewards/accuracies", "mean_token_accuracy")
OF_KTO = (*OF_PREFERENCES, "kl", "rewards/chosen")
OF_GRPO = ("loss", "grad_norm", "reward", "reward_std", "entropy", "num_input_tokens_seen")
NAMES = {"SFT": OF_SFT, "DPO": OF_DPO, "KTO": OF_KTO, "GRPO": OF_GRPO}
EVALUATED_NAMES = {"SFT": ("eval_loss", "eval_entropy"), "GRPO": ("eval_loss", "eval_reward")}
EXPERTS = dict(model="qwen3_moe, auxiliary loss")
FOLLOWS = dict(sync_ref_model=True, ref_model_sync_steps=2)
# Each option at least once, with others beside it.
RUNS: dict[str, list[dict[str, Any]]] = {
    "SFT": [
        dict(dp=2, gradient_accumulation_steps=2, **EVALUATED),
        dict(packing=True, packing_strategy="wrapped", lora="made", gradient_checkpointing=False),
        dict(padding_free=True, max_length=None, loss_type="dft"),
        dict(data=runs.completions, packing=True, max_length=48, label_smoothing_factor=0.1),
        dict(data=runs.conversations, assistant_only_loss=True, max_length=16, **EXPERTS),
        dict(dp=2, data=runs.streamed, lora="given"),
        dict(shard=True, packing=True, packing_strategy="bfd_split", max_length=24),
        dict(loss_type="chunked_nll", dp=2, gradient_accumulation_steps=2),
        dict(EVALUATED, packing=True, eval_packing=True, loss_type="chunked_nll"),
        dict(lora="given", bf16=True, max_grad_norm=0.0, learning_rate=1e-4, close=5e-3),
        *(dict(model=model, **(EVALUATED if model == "llava" else {})) for model in ("llava", "gemma3", "paligemma")),
    ],
    "DPO": [
        dict(dp=2, **EVALUATED),
        dict(loss_type=["sigmoid", "ipo", "sft"], max_length=16),
        dict(lora="given", ld_alpha=0.5, use_weighting=True),
        dict(padding_free=True, **EXPERTS),
        dict(shard=True, f_divergence_type="js_divergence"),
        dict(dp=2, loss_type=["bco_pair"]),
        dict(model="llava", dp=2),
        dict(model="gemma3"),
        FOLLOWS,
    ],
    "KTO": [
        dict(dp=2, **EVALUATED),
        dict(loss_type="apo_zero_unpaired", gradient_accumulation_steps=2, **EXPERTS),
        dict(lora="given"),
        dict(shard=True),
        FOLLOWS,
    ],
    "GRPO": [
        dict(loss_type="dapo", beta=0.1),
        dict(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=2, beta=0.1),
        dict(shard=True, dp=2, per_device_train_batch_size=2, top_entropy_quantile=0.5),
        dict(use_adaptive_entropy=True, entropy_coef=0.01, dp=2, per_device_train_batch_size=2, scale_rewards="batch"),
        dict(loss_type="luspo", importance_sampling_level="sequence"),
        dict(loss_type="vespo", gradient_accumulation_steps=3),
        dict(loss_type="cispo", epsilon_high=2.0, lora="given", beta=0.1),
        dict(eval_count=4, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4, loss_type="grpo"),
        dict(gradient_checkpointing=True, **EXPERTS),
    ],
}
CASES = [pytest.param(kind, row, id=f"{kind}, {row}"[:80]) for kind, rows in RUNS.items() for row in rows]


@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_sft_packed(gloo_pool: Any, steps: int) -> None:
    """Packed by bfd."""
    got = compare(gloo_pool, runs.train, *OF_SFT, kind="SFT", packing=True, max_steps=steps)
    assert got[0]["logs"][steps - 1]["num_tokens"] > 25 * steps


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "row"), CASES)
def test_equal(gloo_pool: Any, tmp_path: Any, kind: str, row: dict[str, Any]) -> None:
    """GRPO on fixed rollouts."""
    options = (dict(per_device_train_batch_size=4) if kind == "KTO" else {}) | row
    if kind == "GRPO" and options.get("beta") and "lora" not in options:
        runs.model_of("llama").save_pretrained(tmp_path)  # the reference model is loaded from there
        options |= {"saved": str(tmp_path)}
    names = NAMES[kind] + (EVALUATED_NAMES.get(kind, ("eval_loss",)) if "eval_count" in row else ())
    got = compare(gloo_pool, runs.train, *names, kind=kind, **options)
    assert kind != "GRPO" or max(log.get("grad_norm", 0) for log in got[0]["logs"]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_log_probabilities_made_before(gloo_pool: Any, tmp_path: Any, kind: str) -> None:
    runs.preferences(22).save_to_disk(str(tmp_path / "data"))
    options = dict(kind=kind, precompute_ref_log_probs=True, saved=str(tmp_path / "data"))
    options |= dict(per_device_train_batch_size=4) if kind == "KTO" else {}
    compare(gloo_pool, runs.train, *NAMES[kind], dp=2, **options)


@pytest.mark.slow
def test_grpo_generates(gloo_pool: Any) -> None:
    """The ranks of a cp group go on with the same completions, other groups with others."""
    axes = dict(mesh_shape=(2, 2), mesh_dim_names=("dp_shard", "cp"))
    options = dict(kind="GRPO", sampled=True, per_device_train_batch_size=2, num_iterations=2, temperature=1.0)
    got = gloo_pool.run(4, run, runs.train, **axes, **options)
    for result in got[1:]:
        runs.check(result, got[0], *OF_GRPO, "num_tokens", "completions/mean_length", close=1e-7)


def test_refuses_other_trainers_of_trl() -> None:
    """Also those that trl derives from trainers that are right."""
    from spanwise.integrations import transformers as hf

    class Own(trl.SFTTrainer):
        pass

    class OfTrl(trl.SFTTrainer):
        __module__ = "trl.experimental.gkd.gkd_trainer"

    mesh: Any = None
    assert hf.trainer(Own, mesh).__name__ == "ContextParallelOwn"
    for base in (trl.RewardTrainer, trl.RLOOTrainer, OfTrl):
        with pytest.raises(ValueError, match=f"takes SFTTrainer, .* got {base.__name__} of trl"):
            hf.trainer(base, mesh)


class OfImages(ProcessorMixin):
    """What models of text and images have in place of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)


def grpo_refusals(cls: Any) -> list[str]:
    errors = []
    shape = dict(per_device_train_batch_size=4, num_generations=4)
    names = ("log_completions", "use_vllm", "use_transformers_continuous_batching")
    for changes in (dict(per_device_train_batch_size=2), *({name: True} for name in names), dict()):
        with pytest.raises(ValueError) as caught:
            cls(trl.GRPOTrainer)(
                runs.model_of("llama") if changes else images.model_of("llava"),
                reward_funcs=runs.digits,
                args=runs.arguments(trl.GRPOConfig, **shape | changes),
                train_dataset=runs.prompts(4),
                processing_class=runs.tokenizer() if changes else OfImages(runs.tokenizer()),
            )
        errors.append(str(caught.value))
    return errors


@pytest.mark.slow
def test_grpo_refusals(gloo_pool: Any) -> None:
    half, completions, vllm, batching, of_images = gloo_pool.run(2, run, grpo_refusals)[0]
    assert "generation_batch_size" in half and "num_generations=4" in half
    assert "log_completions does not go with hf.trainer" in completions
    assert "use_vllm" in vllm and "use_transformers_continuous_batching" in batching
    assert "takes GRPOTrainer with a tokenizer, for prompts of text" in of_images

"""Trainers of trl under context parallelism: what they log and learn is what they do on one process a cp group."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("trl", reason="trl is not installed; it needs Python 3.11")
pytest.importorskip("peft", reason="peft is not installed")

from tests.integrations.transformers import trainer_runs as runs
from tests.integrations.transformers.test_trainer import EVALUATED, compare, start

pytestmark = pytest.mark.timeout(600)

SFT: dict[str, dict[str, Any]] = {
    "padded": dict(max_steps=20),
    "replicas, accumulated": dict(dp=2, gradient_accumulation_steps=2),
    "replicas, evaluated": dict(dp=2, **EVALUATED),
    "wrapped": dict(packing=True, packing_strategy="wrapped"),
    "padding-free": dict(padding_free=True, max_length=None),
    "completions": dict(data=runs.completions),
    "assistant": dict(data=runs.conversations, assistant_only_loss=True),
    "stream": dict(dp=2, data=runs.streamed),
    "label smoothing": dict(label_smoothing_factor=0.1),
    "DFT": dict(loss_type="dft"),
    "experts": dict(model="qwen3_moe, auxiliary loss"),
    "adapters given": dict(lora="given"),
    "adapters made": dict(lora="made", packing=True, gradient_checkpointing=False),
    "FSDP": dict(shard=True, packing=True),
}
DPO: dict[str, dict[str, Any]] = {
    "padded": dict(),
    "replicas, evaluated": dict(dp=2, **EVALUATED),
    "several losses": dict(loss_type=["sigmoid", "ipo", "sft"]),
    "weighted": dict(use_weighting=True),
    "adapters": dict(lora="given"),
    "experts": dict(model="qwen3_moe, auxiliary loss"),
    "FSDP": dict(shard=True),
}
GRPO: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo"),
    "dapo, reference": dict(loss_type="dapo", beta=0.1),
    "groups over replicas": dict(dp=2, per_device_train_batch_size=2),
    "reused": dict(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=2, beta=0.1),
    "entropy": dict(top_entropy_quantile=0.5),
}
OF_DPO = ("logps/chosen", "logits/rejected", "rewards/margins", "rewards/accuracies", *runs.OF_TRL)
OF_GRPO = ("loss", "grad_norm", "reward", "reward_std", "entropy", "num_input_tokens_seen")


def test_sft_packed(gloo_pool: Any) -> None:
    """Twenty steps, packed by bfd."""
    got = compare(gloo_pool, runs.sft, *runs.LOGGED, *runs.OF_TRL, packing=True, max_steps=20)
    assert got[0]["logs"][19]["num_tokens"] > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", SFT)
def test_sft(gloo_pool: Any, name: str) -> None:
    names = (*runs.LOGGED, *runs.OF_TRL, *(["eval_loss", "eval_entropy"] if "eval_count" in SFT[name] else []))
    compare(gloo_pool, runs.sft, *names, **SFT[name])


@pytest.mark.slow
def test_sft_bf16(gloo_pool: Any) -> None:
    for lora in ("", "given"):
        options = dict(lora=lora, bf16=True, max_grad_norm=0.0, learning_rate=1e-4)
        compare(gloo_pool, runs.sft, *runs.LOGGED, "entropy", close=5e-3, **options)


@pytest.mark.slow
def test_sft_resumes(gloo_pool: Any, tmp_path: Any) -> None:
    options: dict[str, Any] = dict(
        max_steps=20, save_strategy="steps", save_steps=7, folder=str(tmp_path), packing=True, lora="given"
    )
    whole = start(gloo_pool, 2, runs.sft, **options)
    again = start(gloo_pool, 2, runs.sft, resume=str(tmp_path / "checkpoint-7"), **options)
    for a, b in zip(again, whole, strict=True):
        runs.check(a | {"logs": a["logs"][7:20]}, b | {"logs": b["logs"][7:20]}, "loss", "grad_norm", close=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", DPO)
def test_dpo(gloo_pool: Any, name: str) -> None:
    names = (*runs.LOGGED, *OF_DPO, *(["eval_loss"] if "eval_count" in DPO[name] else []))
    compare(gloo_pool, runs.dpo, *names, **DPO[name])


@pytest.mark.slow
def test_dpo_with_log_probabilities_made_before(gloo_pool: Any, tmp_path: Any) -> None:
    runs.preferences(22).save_to_disk(str(tmp_path / "data"))
    options = dict(precompute_ref_log_probs=True, saved=str(tmp_path / "data"))
    compare(gloo_pool, runs.dpo, *runs.LOGGED, *OF_DPO, dp=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRPO)
def test_grpo(gloo_pool: Any, tmp_path: Any, name: str) -> None:
    """Loss and gradients on fixed rollouts."""
    options = GRPO[name]
    if options.get("beta"):
        runs.model_of("llama").save_pretrained(tmp_path)  # the reference model is loaded from there
        options = options | {"saved": str(tmp_path)}
    got = compare(gloo_pool, runs.grpo, *OF_GRPO, **options)
    assert max(log.get("grad_norm", 0) for log in got[0]["logs"]) > 0.1


@pytest.mark.slow
def test_grpo_generates(gloo_pool: Any) -> None:
    """The ranks of a cp group go on with the same completions, other groups with others."""
    axes = dict(mesh_shape=(2, 2), mesh_dim_names=("dp_shard", "cp"))
    options = dict(sampled=True, per_device_train_batch_size=2, num_iterations=2, temperature=1.0)
    got = start(gloo_pool, 4, runs.grpo, **axes, **options)
    for result in got[1:]:
        runs.check(result, got[0], *OF_GRPO, "num_tokens", "completions/mean_length", close=1e-7)


def grpo_refusals(cls: Any) -> list[str]:
    import trl

    errors = []
    shape = dict(per_device_train_batch_size=4, num_generations=4)
    for changes in (dict(per_device_train_batch_size=2), dict(log_completions=True)):
        with pytest.raises(ValueError) as caught:
            cls(trl.GRPOTrainer)(
                runs.model_of("llama"),
                reward_funcs=runs.digits,
                args=runs.arguments(trl.GRPOConfig, **shape | changes),
                train_dataset=runs.preferences(4).select_columns(["prompt"]),
                processing_class=runs.tokenizer(),
            )
        errors.append(str(caught.value))
    return errors


@pytest.mark.slow
def test_grpo_refusals(gloo_pool: Any) -> None:
    half, completions = start(gloo_pool, 2, grpo_refusals)[0]
    assert "leaves 2 completions for the 1 cp groups, which must be a multiple of num_generations=4" in half
    assert "log_completions does not go with hf.trainer" in completions

"""Trainers of trl under context parallelism: what they log and learn is what they do on one process a cp group."""

from __future__ import annotations

from typing import Any

import pytest
import trl
from transformers import ProcessorMixin

from tests.integrations.transformers import images, trl_runs
from tests.integrations.transformers import trainer_runs as runs
from tests.integrations.transformers.test_trainer import EVALUATED, compare, start

SFT: dict[str, dict[str, Any]] = {
    "padded": dict(max_steps=20),
    "replicas, accumulated": dict(dp=2, gradient_accumulation_steps=2),
    "replicas, evaluated": dict(dp=2, **EVALUATED),
    "wrapped": dict(packing=True, packing_strategy="wrapped"),
    "padding-free": dict(padding_free=True, max_length=None),
    "completions": dict(data=trl_runs.completions),
    "assistant": dict(data=trl_runs.conversations, assistant_only_loss=True),
    "stream": dict(dp=2, data=runs.streamed),
    "label smoothing": dict(label_smoothing_factor=0.1),
    "DFT": dict(loss_type="dft"),
    "experts": dict(model="qwen3_moe, auxiliary loss"),
    "adapters given": dict(lora="given"),
    "adapters made": dict(lora="made", packing=True, gradient_checkpointing=False),
    "FSDP": dict(shard=True, packing=True),
    "chunks of logits": dict(loss_type="chunked_nll", packing=True),
    "chunks of logits, replicas": dict(loss_type="chunked_nll", dp=2, gradient_accumulation_steps=2),
    "pieces of documents": dict(packing=True, packing_strategy="bfd_split", max_length=24),
    "completions, packed": dict(data=trl_runs.completions, packing=True, max_length=48),
    "assistant, packed": dict(data=trl_runs.conversations, assistant_only_loss=True, packing=True),
    "truncated": dict(max_length=16),
    "evaluated in packs": dict(EVALUATED, packing=True, eval_packing=True),
    "bfloat16": dict(lora="given", bf16=True, max_grad_norm=0.0, learning_rate=1e-4, close=5e-3),
}
DPO: dict[str, dict[str, Any]] = {
    "padded": dict(),
    "replicas, evaluated": dict(dp=2, **EVALUATED),
    "several losses": dict(loss_type=["sigmoid", "ipo", "sft"]),
    "weighted": dict(use_weighting=True),
    "adapters": dict(lora="given"),
    "experts": dict(model="qwen3_moe, auxiliary loss"),
    "FSDP": dict(shard=True),
    "padding-free": dict(padding_free=True),
    "truncated": dict(max_length=16),
    "by length": dict(ld_alpha=0.5),
    "a mean over batches": dict(dp=2, loss_type=["bco_pair"]),
    "another divergence": dict(f_divergence_type="js_divergence"),
    "images": dict(model="llava", dp=2),
    "blocks of images": dict(model="gemma3"),
    "reference follows": dict(sync_ref_model=True, ref_model_sync_steps=2),
}
KTO: dict[str, dict[str, Any]] = {
    "padded": dict(),
    "replicas, evaluated": dict(dp=2, **EVALUATED),
    "without a reference point": dict(loss_type="apo_zero_unpaired", gradient_accumulation_steps=2),
    "adapters": dict(lora="given"),
    "experts": dict(model="qwen3_moe, auxiliary loss"),
    "FSDP": dict(shard=True),
    "reference follows": dict(sync_ref_model=True, ref_model_sync_steps=2),
}
GRPO: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo"),
    "dapo, reference": dict(loss_type="dapo", beta=0.1),
    "groups over replicas": dict(dp=2, per_device_train_batch_size=2),
    "reused": dict(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=2, beta=0.1),
    "entropy": dict(top_entropy_quantile=0.5),
    "FSDP": dict(shard=True, dp=2, per_device_train_batch_size=2),
    "adaptive entropy": dict(use_adaptive_entropy=True, entropy_coef=0.01, dp=2, per_device_train_batch_size=2),
    "by sequence": dict(loss_type="luspo", importance_sampling_level="sequence"),
    "vespo": dict(loss_type="vespo"),
    "cispo": dict(loss_type="cispo", epsilon_high=2.0),
    "accumulated": dict(gradient_accumulation_steps=3),
    "evaluated": dict(eval_count=4, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4),
    "scaled by batch": dict(scale_rewards="batch", dp=2, per_device_train_batch_size=2),
    "adapters": dict(lora="given", beta=0.1),
    "experts, checkpointed": dict(model="qwen3_moe, auxiliary loss", gradient_checkpointing=True),
}
OF_PREFERENCES = ("logps/chosen", "logits/rejected", "num_tokens", "entropy")
OF_GRPO = ("loss", "grad_norm", "reward", "reward_std", "entropy", "num_input_tokens_seen")
# For each trainer: its run, what it logs, what it logs in evaluations, and options of all of its runs.
TRAINERS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "SFT": (trl_runs.sft, (*runs.LOGGED, *trl_runs.OF_TRL), ("eval_loss", "eval_entropy"), {}),
    "DPO": (
        trl_runs.dpo,
        (*runs.LOGGED, *OF_PREFERENCES, "rewards/margins", "rewards/accuracies", "mean_token_accuracy"),
        ("eval_loss",), {},
    ),
    "KTO": (
        trl_runs.dpo, (*runs.LOGGED, *OF_PREFERENCES, "kl", "rewards/chosen"), ("eval_loss",),
        dict(kind="KTO", per_device_train_batch_size=4),
    ),
    "GRPO": (trl_runs.grpo, OF_GRPO, ("eval_loss", "eval_reward"), {}),
}  # fmt: skip
EQUAL = [
    (trainer, name)
    for trainer, rows in (("SFT", SFT), ("DPO", DPO), ("KTO", KTO), ("GRPO", GRPO)) for name in rows
]  # fmt: skip


@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_sft_packed(gloo_pool: Any, steps: int) -> None:
    """Packed by bfd."""
    got = compare(gloo_pool, trl_runs.sft, *runs.LOGGED, *trl_runs.OF_TRL, packing=True, max_steps=steps)
    assert got[0]["logs"][steps - 1]["num_tokens"] > 25 * steps


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "name"), EQUAL)
def test_equal(gloo_pool: Any, tmp_path: Any, trainer: str, name: str) -> None:
    """GRPO on fixed rollouts."""
    made, names, evaluated, options = TRAINERS[trainer]
    options = options | {"SFT": SFT, "DPO": DPO, "KTO": KTO, "GRPO": GRPO}[trainer][name]
    if options.get("beta") and "lora" not in options:
        runs.model_of("llama").save_pretrained(tmp_path)  # the reference model is loaded from there
        options |= {"saved": str(tmp_path)}
    got = compare(gloo_pool, made, *names, *(evaluated if "eval_count" in options else ()), **options)
    assert trainer != "GRPO" or max(log.get("grad_norm", 0) for log in got[0]["logs"]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llava", "gemma3", "paligemma"])
def test_sft_with_images(gloo_pool: Any, model: str) -> None:
    """Batches of a collator of one's own; trl's needs a processor of files."""
    more = EVALUATED if model == "llava" else {}
    names = (*runs.LOGGED, *trl_runs.OF_TRL, *(["eval_loss"] if more else []))
    compare(gloo_pool, runs.with_images, *names, model=model, trl=True, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_log_probabilities_made_before(gloo_pool: Any, tmp_path: Any, kind: str) -> None:
    trl_runs.preferences(22).save_to_disk(str(tmp_path / "data"))
    options = dict(kind=kind, precompute_ref_log_probs=True, saved=str(tmp_path / "data"))
    compare(gloo_pool, trl_runs.dpo, *TRAINERS[kind][1], dp=2, **options)


@pytest.mark.slow
def test_grpo_generates(gloo_pool: Any) -> None:
    """The ranks of a cp group go on with the same completions, other groups with others."""
    axes = dict(mesh_shape=(2, 2), mesh_dim_names=("dp_shard", "cp"))
    options = dict(sampled=True, per_device_train_batch_size=2, num_iterations=2, temperature=1.0)
    got = start(gloo_pool, 4, trl_runs.grpo, **axes, **options)
    for result in got[1:]:
        runs.check(result, got[0], *OF_GRPO, "num_tokens", "completions/mean_length", close=1e-7)


def test_refuses_other_trainers_of_trl() -> None:
    """Also those that trl derives from trainers that are right."""
    from trl import RewardTrainer, RLOOTrainer

    from spanwise.integrations import transformers as hf

    class Own(trl.SFTTrainer):
        pass

    class OfTrl(trl.SFTTrainer):
        __module__ = "trl.experimental.gkd.gkd_trainer"

    mesh: Any = None
    assert hf.trainer(Own, mesh).__name__ == "ContextParallelOwn"
    for base, remedy in ((RewardTrainer, "load the model by AutoModel"), (RLOOTrainer, "call hf"), (OfTrl, "call hf")):
        with pytest.raises(ValueError, match=f"takes SFTTrainer, .* got {base.__name__} of trl.*; .*{remedy}"):
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
                reward_funcs=trl_runs.digits,
                args=runs.arguments(trl.GRPOConfig, **shape | changes),
                train_dataset=trl_runs.preferences(4).select_columns(["prompt"]),
                processing_class=runs.tokenizer() if changes else OfImages(runs.tokenizer()),
            )
        errors.append(str(caught.value))
    return errors


@pytest.mark.slow
def test_grpo_refusals(gloo_pool: Any) -> None:
    half, completions, vllm, batching, of_images = start(gloo_pool, 2, grpo_refusals)[0]
    assert "leaves 2 completions for all cp groups, which must be a multiple of num_generations=4" in half
    assert "log_completions does not go with hf.trainer" in completions
    for text in (vllm, batching):
        assert "leave it False: each cp group generates with the model, or by a rollout_func" in text
    assert "takes GRPOTrainer with a tokenizer, for prompts of text" in of_images

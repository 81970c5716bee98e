"""Trainers of transformers and trl under context parallelism log and learn what they do on one process a cp group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trl
from accelerate import Accelerator, ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import runs, tiny
from tests.integrations.transformers.runs import EVALUATED, compare, run

pytestmark = pytest.mark.timeout(600)

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
GROUPS: dict[str, Any] = dict(mesh_shape=(2, 2), mesh_dim_names=("dp_shard", "cp"))


def picked(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    scores = outputs.logits[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]


def squared_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that is no sum of cross-entropies."""
    valid = labels[:, 1:] != -100
    total = (picked(outputs, labels).square() * valid).sum()
    return total / (valid.sum() if num_items_in_batch is None else num_items_in_batch)


def accuracy(prediction: Any) -> dict[str, float]:
    """A metric of labels and logits; logits at padding are not compared."""
    valid = prediction.label_ids[:, 1:] != -100
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    scores = np.abs(prediction.predictions[prediction.label_ids != -100])
    return {"accuracy": (hits & valid).sum() / valid.sum(), "scores": float(scores.sum())}


EXPERTS = dict(model="qwen3_moe, auxiliary loss")
IN_BFLOAT16: dict[str, Any] = dict(bf16=True, max_grad_norm=0.0, learning_rate=1e-4, close=5e-3)
CHECKPOINTED, REENTRANT = (
    dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": x}) for x in (False, True)
)
# What reaches the model, its outputs or its groups of ranks, by trainer; at least once, with others beside it. The
# first row of two trainers is not slow.
RUNS: dict[str, tuple[dict[str, Any], ...]] = {
    "": (
        dict(EVALUATED, gradient_accumulation_steps=2, max_steps=7),
        dict(CHECKPOINTED, gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=3, model="qwen2, sliding",
             data_seed=9, dataloader_drop_last=True),
        dict(EXPERTS, dp=2, average_tokens_across_devices=False),
        dict(dp=2, gradient_accumulation_steps=3, train_sampling_strategy="group_by_length", model="falcon_h1"),
        dict(REENTRANT, cp=4, model="qwen3_next"),
        dict(EVALUATED, cp=1),
        dict(dp=2, label_smoothing_factor=0.1, include_num_input_tokens_seen="non_padding"),
        dict(dp=2, more=dict(compute_loss_func=squared_loss), accelerator_config={"split_batches": True},
             per_device_train_batch_size=4),
        dict(EVALUATED, dp=2, shard=True, gradient_accumulation_steps=2),
        dict(dp=2, collator=runs.flattened),
        dict(EVALUATED, eval_on_start=True, collator=runs.pack_labelled),
        dict(EVALUATED, bf16_full_eval=True, model="mamba2"),
        IN_BFLOAT16,
    ),
    "SFT": (
        dict(packing=True),
        dict(EVALUATED, dp=2, gradient_accumulation_steps=2),
        dict(packing=True, packing_strategy="wrapped", lora="made", gradient_checkpointing=False),
        dict(EXPERTS, padding_free=True, max_length=None, loss_type="dft"),
        dict(data=runs.completions, packing=True, max_length=48, label_smoothing_factor=0.1),
        dict(shard=True, packing=True, packing_strategy="bfd_split", max_length=24),
        dict(EVALUATED, packing=True, eval_packing=True, loss_type="chunked_nll", dp=2),
        dict(IN_BFLOAT16, lora="given"),
    ),
    "DPO": (
        dict(EVALUATED, dp=2),
        dict(loss_type=["sigmoid", "ipo", "sft"], max_length=16),
        dict(lora="given", ld_alpha=0.5, use_weighting=True),
        dict(shard=True, f_divergence_type="js_divergence"),
        dict(EXPERTS, sync_ref_model=True, ref_model_sync_steps=2),
    ),
    "KTO": (
        dict(EVALUATED, dp=2, per_device_train_batch_size=4),
        dict(EXPERTS, loss_type="apo_zero_unpaired", per_device_train_batch_size=4, gradient_accumulation_steps=2),
        dict(per_device_train_batch_size=4, shard=True),
    ),
    "GRPO": (
        dict(loss_type="dapo", num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=2, beta=0.1),
        dict(shard=True, dp=2, per_device_train_batch_size=2, top_entropy_quantile=0.5),
        dict(use_adaptive_entropy=True, entropy_coef=0.01, dp=2, per_device_train_batch_size=2, scale_rewards="batch"),
        dict(loss_type="luspo", importance_sampling_level="sequence", lora="given", beta=0.1),
        dict(eval_count=4, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4, loss_type="grpo"),
        dict(EXPERTS, gradient_checkpointing=True),
    ),
}  # fmt: skip
FAST = RUNS[""][0], RUNS["SFT"][0]
CASES = [
    pytest.param(kind, row, id=f"{kind}, {row}"[:80], marks=[] if row in FAST else pytest.mark.slow)
    for kind, rows in RUNS.items()
    for row in rows
]


@pytest.mark.parametrize(("kind", "row"), CASES)
def test_equal(gloo_pool: Any, tmp_path: Any, kind: str, row: dict[str, Any]) -> None:
    """GRPO on fixed rollouts."""
    if row.get("beta") and "lora" not in row:
        runs.model_of("llama").save_pretrained(tmp_path)  # the reference model is loaded from there
        row = row | {"saved": str(tmp_path)}
    want, *_ = compare(gloo_pool, runs.train, kind=kind, **row)
    norms = [log["grad_norm"] for log in want["logs"] if "grad_norm" in log]
    assert max(norms) > (0.5 if row is RUNS[""][0] else 0.01)  # these are clipped


@pytest.mark.slow
def test_grpo_generates(gloo_pool: Any) -> None:
    """The ranks of a cp group go on with the same completions, other groups with others."""
    options = dict(kind="GRPO", sampled=True, per_device_train_batch_size=2, num_iterations=2, temperature=1.0)
    first, *others = gloo_pool.run(4, run, runs.train, **GROUPS, **options)
    for result in others:
        runs.check(result, first, *runs.NAMES["GRPO"], "num_tokens", "completions/mean_length", close=1e-7)


@pytest.mark.slow
def test_other_axis_order_predictions_and_metrics(gloo_pool: Any) -> None:
    """The cp groups are ranks 0, 2 and 1, 3. Logits are whole, in the order of the batch, and NaN at padding."""
    options: dict[str, Any] = dict(EVALUATED, dp=2, more=dict(compute_metrics=accuracy), predict=True)
    axes, names = ("cp", "dp_replicate"), ("eval_accuracy", "eval_scores")
    want, *results = compare(gloo_pool, runs.train, *names, axes=axes, **options)
    valid = want["label_ids"] != -100
    for result in results:
        np.testing.assert_array_equal(result["label_ids"], want["label_ids"])
        np.testing.assert_allclose(result["predictions"][valid], want["predictions"][valid], atol=1e-5)
        assert np.isnan(result["predictions"]).any() and not np.isnan(want["predictions"]).any()


@pytest.mark.slow
def test_resumes(gloo_pool: Any, tmp_path: Any) -> None:
    """From a checkpoint of step 7 the remaining losses are those of the run that was not interrupted.

    Not under FSDP2: accelerate does not support it on the CPU, and what the tests put in its place cannot be saved.
    """
    options: dict[str, Any] = dict(max_steps=20, save_strategy="steps", save_steps=7, folder=str(tmp_path))
    whole = gloo_pool.run(2, run, runs.train, **options)
    again = gloo_pool.run(2, run, runs.train, resume=str(tmp_path / "checkpoint-7"), **options)
    for a, b in zip(again, whole, strict=True):
        assert len(a["logs"]) == len(b["logs"])
        runs.check(a | {"logs": a["logs"][7:20]}, b | {"logs": b["logs"][7:20]}, "loss", "grad_norm", close=1e-6)


@pytest.mark.slow
def test_first_tokens_do_not_count(gloo_pool: Any) -> None:
    """Labels of first tokens of documents are neither trained nor counted, whether the collator masks them or not."""
    want = gloo_pool.run(1, run, runs.train, cut=False, collator=runs.pack_labelled)[0]
    for result in gloo_pool.run(2, run, runs.train, collator=runs.pack):
        runs.check(result, want, *runs.LOGGED)


# --- losses of one's own ---------------------------------------------------------------------------------------------


def policy_gradient(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Its value is that of any outputs, its gradient not."""
    return -(picked(outputs, labels) - picked(outputs, labels).detach()).exp().mean()


def of_tokens(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """What leaves padding out, and the balance of experts."""
    valid = labels != -100
    total = outputs.logits[valid].logsumexp(-1).mean() + (outputs.hidden_states[-1] * valid[..., None]).norm()
    return total + load_balancing_loss_func(outputs.router_logits, 4, 2, valid)


READING: dict[str, Loss] = {
    "squares": lambda outputs, labels: outputs.logits.pow(2).mean(),
    "policy gradient": policy_gradient,
}


def own(loss: Loss, base: Any) -> type[Any]:
    """A trainer with a `compute_loss` of its own."""

    class Own(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            inputs = dict(inputs)
            labels = inputs.pop("labels")
            outputs = model(**inputs, output_hidden_states=True)
            value = loss(outputs, labels)
            return (value, {"loss": value, "logits": outputs.logits}) if return_outputs else value

    return Own


def error_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The text of the ValueError that a call raises; empty without one."""
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


def reads_padding(cls: Any) -> list[tuple[str, str]]:
    """The errors of losses that read padding, in evaluation and in training."""
    data = dict(train_dataset=runs.documents(4), eval_dataset=runs.documents(4), data_collator=runs.pad)
    found = []
    for loss in READING.values():
        arguments = runs.arguments(TrainingArguments, max_steps=1)
        trainer = cls(own(loss, Trainer))(runs.model_of("llama"), args=arguments, **data)
        found.append((error_of(trainer.evaluate), error_of(trainer.train)))
    return found


def test_refuses_losses_that_read_padding(gloo_pool: Any) -> None:
    first, second = gloo_pool.run(2, run, reads_padding)
    assert first == second
    for name, texts in zip(READING, first, strict=True):
        seen = ["reads outputs at padding" in text for text in texts]
        assert seen == [name != "policy gradient", True], name  # its value is right


def train_own(cls: Any, **options: Any) -> Any:
    return runs.train(lambda base: cls(own(of_tokens, base)), **options)


@pytest.mark.slow
def test_losses_that_leave_padding_out(gloo_pool: Any) -> None:
    options = EVALUATED | EXPERTS | dict(more=dict(compute_metrics=accuracy), dp=2, gradient_accumulation_steps=2)
    compare(gloo_pool, train_own, "eval_accuracy", "eval_scores", **options)


# --- what is refused -------------------------------------------------------------------------------------------------


ARGUMENTS: tuple[tuple[str, Any], ...] = (
    *((name, True) for name in ("torch_compile", "auto_find_batch_size", "use_liger_kernel", "eval_use_gather_object")),
    ("neftune_noise_alpha", 5.0),
    ("accelerator_config", {"dispatch_batches": True}),
    ("train_sampling_strategy", "batch_rebalance"),
    ("parallelism_config", ParallelismConfig(dp_replicate_size=2)),
)
STEPS: dict[str, dict[str, Any]] = {
    "attention dropout; set 0.1 to 0": dict(config=dict(attention_dropout=0.1)),
    "different batches of equal lengths": dict(collator=runs.pad_at_random),
    "2 labels are of first tokens of documents": dict(
        collator=runs.pack, more=dict(compute_loss_func=squared_loss), gradient_accumulation_steps=2
    ),
}


def refusals(cls: Any) -> dict[str, str]:
    """The error of each argument or model that is refused, most of them before training starts."""
    sharded, mesh = runs.model_of("llama"), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    sharded._is_distributed_loading_by_transformers = True
    models = {
        "distributed_config": sharded,
        "causal language models": transformers.LlamaForSequenceClassification(tiny.config_of("llama")),
        "prepared for another mesh or loss": hf.context_parallel(runs.model_of("llama"), mesh, reduce_loss=False),
    }

    def made(model: Any, **changes: Any) -> str:
        return error_of(lambda: cls(Trainer)(model, args=runs.arguments(TrainingArguments, **changes)))

    errors = {next(iter(x)) if isinstance(x, dict) else name: made(runs.model_of("llama"), **{name: x})
              for name, x in ARGUMENTS}  # fmt: skip
    errors |= {name: made(model) for name, model in models.items()}
    for name in ("log_completions", "use_vllm", "use_transformers_continuous_batching"):
        errors[name] = error_of(runs.train, cls, kind="GRPO", **{name: True})
    errors["generation_batch_size"] = error_of(runs.train, cls, kind="GRPO", per_device_train_batch_size=2)
    return errors | {name: error_of(runs.train, cls, **options) for name, options in STEPS.items()}


def test_refuses_before_training(gloo_pool: Any) -> None:
    errors = gloo_pool.run(2, run, refusals)
    assert errors[0] == errors[1] and all(name in text for name, text in errors[0].items()), errors[0]


def class_of(base: Any, module: str) -> Any:
    return type("Own", (base,), {"__module__": module})


def test_refuses_other_meshes_and_trainers(gloo_pool: Any) -> None:
    """Also those that trl derives from trainers that are right."""
    mesh: Any = None
    assert hf.trainer(class_of(trl.SFTTrainer, "users"), mesh).__name__ == "ContextParallelOwn"
    derived = [class_of(Trainer, "trl.trainer.unknown"), class_of(trl.SFTTrainer, "trl.experimental.gkd.gkd_trainer")]
    made = hf.trainer(Trainer, mesh)
    for base in (int, transformers.Seq2SeqTrainer, made, trl.RewardTrainer, trl.RLOOTrainer, *derived):
        with pytest.raises(ValueError, match="hf.trainer takes"):
            hf.trainer(base, mesh)
    with pytest.raises(ValueError, match="define training_step of Derived in the base"):
        type("Derived", (made,), {"training_step": print})
    for axes in (dict(mesh_dim_names=("dp",)), dict(mesh_shape=(2, 1), mesh_dim_names=("tp", "cp"))):
        with pytest.raises(ValueError, match=r"takes a mesh of 'cp' .*, got axes \("):
            gloo_pool.run(2, run, runs.train, **axes)


def before_and_after(cls: Any) -> None:
    """A run under context parallelism, then its model and another trainer without it."""
    model, args = runs.model_of("llama"), runs.arguments(TrainingArguments, max_steps=2)
    cut = cls(Trainer)(model, args=args, train_dataset=runs.documents(22), data_collator=runs.pad)
    cut.train()
    batch, fresh = runs.pad(runs.documents(3, seed=9).to_list()), runs.model_of("llama")
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch).logits, fresh.eval()(**batch).logits)
    once = [cut.accelerator.reduce(torch.tensor(3.0), reduction=name).item() for name in ("sum", "mean", "max")]
    assert once == [3.0] * 3  # a group counts once
    whole = Trainer(fresh, args=args)
    assert type(whole.accelerator) is Accelerator is transformers.trainer.Accelerator
    assert whole.accelerator.num_processes == 2 and cut.accelerator.num_processes == 1
    assert not any("spanwise" in str(x) for x in (*vars(Accelerator).values(), model.config.to_dict()))


def test_leaves_classes_and_modules_alone(gloo_pool: Any) -> None:
    """The accelerator object alone changes its class; models keep hooks that are silent outside of the trainer."""
    gloo_pool.run(2, run, before_and_after)

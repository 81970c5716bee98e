"""`transformers.Trainer` under context parallelism logs and learns what it does on one process a cp group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.integrations.transformers import images, tiny
from tests.integrations.transformers import trainer_runs as runs

EVALUATED: dict[str, Any] = dict(
    eval_count=7, eval_strategy="steps", eval_steps=3
)  # 7 is odd: the last batch is not full
RUNS: dict[str, dict[str, Any]] = {
    "epochs, accumulated": dict(gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=3),
    "replicas, accumulated": dict(dp=2, gradient_accumulation_steps=3),
    "replicas, a count each": dict(dp=2, average_tokens_across_devices=False),
    "replicas, evaluated": dict(dp=2, **EVALUATED),
    "four ranks": dict(cp=4),
    "one rank": dict(cp=1, **EVALUATED),
    "label smoothing": dict(dp=2, label_smoothing_factor=0.1),
    "own loss": dict(dp=2, more=dict(compute_loss_func=runs.squared_loss)),
    "by length": dict(dp=2, train_sampling_strategy="group_by_length"),
    "experts": dict(model="qwen3_moe, auxiliary loss"),
    "sliding": dict(model="gemma3"),
    "gated delta rule": dict(model="qwen3_next"),
    "states beside attention": dict(dp=2, model="falcon_h1"),
    "states alone": dict(model="mamba2", gradient_accumulation_steps=2),
    "checkpointed": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
    "checkpointed, reentrant": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
    "FSDP": dict(shard=True, gradient_accumulation_steps=2),
    "FSDP, replicas, evaluated": dict(dp=2, shard=True, **EVALUATED),
    "stream": dict(dp=2, data=runs.streamed),
    "collated by transformers": dict(dp=2, collator=runs.flattened),
    "a token count without padding": dict(dp=2, include_num_input_tokens_seen="non_padding"),
    "evaluated at the start, packed": dict(EVALUATED, eval_on_start=True, collator=runs.pack_without_first),
    "evaluated in bfloat16": dict(EVALUATED, bf16_full_eval=True),
    "split batches": dict(dp=2, accelerator_config={"split_batches": True}, per_device_train_batch_size=4),
    "bfloat16": dict(bf16=True, max_grad_norm=0.0, learning_rate=1e-4, close=5e-3),
    "whole batches alone": dict(dataloader_drop_last=True, max_steps=-1, num_train_epochs=2, data_seed=9),
}


def start(pool: Any, ranks: int, made: Any, **options: Any) -> list[Any]:
    """`runs.run` on ranks; the first one on a rank imports transformers, so that it has time."""
    return pool.run(ranks, runs.run, made, **options)


def compare(
    pool: Any,
    made: Any,
    *names: str,
    dp: int = 1,
    cp: int = 2,
    shard: bool = False,
    close: float = 1e-5,
    **options: Any,
) -> list[Any]:
    """Every rank under context parallelism against as many processes as there are cp groups."""
    without: dict[str, Any] = {}
    if options.get("data") is runs.streamed and made is runs.plain:
        without = {"accelerator_config": {"dispatch_batches": False}}  # else accelerate cannot join the batches
    axes: dict[str, Any] = dict(mesh_shape=(dp,), mesh_dim_names=("dp",))
    want = start(pool, dp, made, cut=False, **axes, **options, **without)[0]
    axes = dict(mesh_shape=(dp, cp), mesh_dim_names=("dp_shard", "cp"))
    got = start(pool, dp * cp, made, **axes, **options, **(runs.FSDP if shard else {}))
    for result in got:
        assert result["sharded"] is shard
        runs.check(result, want, *names, close=close)
    return [*got, want]


@pytest.mark.parametrize("steps", [7, pytest.param(20, marks=pytest.mark.slow)])
def test_steps(gloo_pool: Any, steps: int) -> None:
    """Accumulated, evaluated, clipped, with a last batch that is not full."""
    options = dict(EVALUATED, gradient_accumulation_steps=2, max_steps=steps)
    got = compare(gloo_pool, runs.plain, *runs.LOGGED, "eval_loss", **options)
    norms = [log["grad_norm"] for log in got[0]["logs"] if "grad_norm" in log]
    assert len(norms) == steps and min(norms) > 0.5  # all were clipped


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_equal(gloo_pool: Any, name: str) -> None:
    names = (*runs.LOGGED, "eval_loss") if "eval_count" in RUNS[name] else runs.LOGGED
    compare(gloo_pool, runs.plain, *names, **RUNS[name])


@pytest.mark.slow
def test_other_axis_order(gloo_pool: Any) -> None:
    """The cp groups are then ranks 0, 2 and 1, 3."""
    options = dict(EVALUATED, more=dict(compute_metrics=runs.accuracy))
    want = start(gloo_pool, 2, runs.plain, cut=False, **options)[0]
    axes = dict(mesh_shape=(2, 2), mesh_dim_names=("cp", "dp_replicate"))
    for result in start(gloo_pool, 4, runs.plain, **axes, **options):
        runs.check(result, want, *runs.LOGGED, "eval_loss", "eval_accuracy")


@pytest.mark.slow
def test_predictions_and_metrics(gloo_pool: Any) -> None:
    """Whole logits in the order of the batch; at padding they are NaN."""
    options = dict(EVALUATED, dp=2, more=dict(compute_metrics=runs.accuracy), predict=True)
    *got, want = compare(gloo_pool, runs.plain, *runs.LOGGED, "eval_loss", "eval_accuracy", "eval_scores", **options)
    valid = want["label_ids"] != -100
    for result in got:
        np.testing.assert_array_equal(result["label_ids"], want["label_ids"])
        np.testing.assert_allclose(result["predictions"][valid], want["predictions"][valid], atol=1e-5)
        assert np.isnan(result["predictions"]).any() and not np.isnan(want["predictions"]).any()


@pytest.mark.slow
def test_resumes(gloo_pool: Any, tmp_path: Any) -> None:
    """From a checkpoint of step 7 the remaining losses are those of the run that was not interrupted.

    Not under FSDP2: accelerate does not support it on the CPU, and what the tests put in its place cannot be saved.
    """
    options: dict[str, Any] = dict(max_steps=20, save_strategy="steps", save_steps=7, folder=str(tmp_path))
    whole = start(gloo_pool, 2, runs.plain, **options)
    again = start(gloo_pool, 2, runs.plain, resume=str(tmp_path / "checkpoint-7"), **options)
    for a, b in zip(again, whole, strict=True):
        assert len(a["logs"]) == len(b["logs"])
        runs.check(a | {"logs": a["logs"][7:20]}, b | {"logs": b["logs"][7:20]}, "loss", "grad_norm", close=1e-6)


@pytest.mark.slow
def test_first_tokens_do_not_count(gloo_pool: Any) -> None:
    """Labels of first tokens of documents are neither trained nor counted, whether the collator masks them or not."""
    want = start(gloo_pool, 1, runs.plain, cut=False, collator=runs.pack_without_first)[0]
    for result in start(gloo_pool, 2, runs.plain, collator=runs.pack):
        runs.check(result, want, *runs.LOGGED)


@pytest.mark.slow
@pytest.mark.parametrize("model", images.MODELS)
def test_images(gloo_pool: Any, model: str) -> None:
    more = EVALUATED if model == "llava" else {}
    compare(gloo_pool, runs.with_images, *runs.LOGGED, *(["eval_loss"] if more else []), model=model, **more)


@pytest.mark.slow
def test_made_anew_for_each_run(gloo_pool: Any) -> None:
    compare(gloo_pool, runs.made_twice, *runs.LOGGED)


@pytest.mark.slow
def test_stops_early(gloo_pool: Any, tmp_path: Any) -> None:
    """Ranks stop at the same step and load the same checkpoint."""
    options = dict(EVALUATED, eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True)
    options |= dict(eval_count=5, max_steps=12, metric_for_best_model="loss", greater_is_better=True, stop=2)
    *_, want = compare(gloo_pool, runs.plain, *runs.LOGGED, "eval_loss", dp=2, folder=str(tmp_path), **options)
    assert want["logs"][-1]["step"] < 12


@pytest.mark.slow
def test_metrics_of_inputs_and_of_batches(gloo_pool: Any) -> None:
    options = dict(EVALUATED, include_for_metrics=["inputs", "loss"], eval_accumulation_steps=1)
    compare(gloo_pool, runs.plain, "eval_ids", "eval_losses", **options, more=dict(compute_metrics=runs.of_inputs))
    names = "eval_accuracy", "eval_count"
    options = dict(EVALUATED, batch_eval_metrics=True)
    compare(gloo_pool, runs.plain, *names, dp=2, **options, more=dict(compute_metrics=runs.Batched()))


def sums(cls: Any) -> list[float]:
    import torch
    from transformers import Trainer, TrainingArguments

    accelerator = cls(Trainer)(runs.model_of("llama"), args=runs.arguments(TrainingArguments)).accelerator
    given = {name: torch.tensor(accelerator.process_index + 1.0) for name in ("sum", "mean", "max")}
    return [accelerator.reduce(x, reduction=name).item() for name, x in given.items()]


@pytest.mark.slow
def test_reductions_count_a_group_once(gloo_pool: Any) -> None:
    axes = dict(mesh_shape=(2, 2), mesh_dim_names=("dp_shard", "cp"))
    assert start(gloo_pool, 4, sums, **axes) == [[3.0, 1.5, 2.0]] * 4


def refusals(cls: Any) -> dict[str, str]:
    """The error of each argument or model that is refused, most of them before training starts."""
    from accelerate import ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

    from spanwise.integrations import transformers as hf

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    sharded, replicas = runs.model_of("llama"), ParallelismConfig(dp_replicate_size=2)
    sharded._is_distributed_loading_by_transformers = True
    arguments: dict[str, dict[str, Any]] = {
        "torch_compile": dict(torch_compile=True),
        "auto_find_batch_size": dict(auto_find_batch_size=True),
        "use_liger_kernel": dict(use_liger_kernel=True),
        "neftune_noise_alpha": dict(neftune_noise_alpha=5.0),
        "dispatch_batches": dict(accelerator_config={"dispatch_batches": True}),
        "batch_rebalance": dict(train_sampling_strategy="batch_rebalance"),
        "eval_use_gather_object": dict(eval_use_gather_object=True),
        "parallelism_config": dict(parallelism_config=replicas),
    }
    models = {
        "distributed_config": sharded,
        "causal language models": LlamaForSequenceClassification(tiny.config_of("llama")),
        "prepared for another mesh or loss": hf.context_parallel(runs.model_of("llama"), mesh, reduce_loss=False),
    }
    steps = {
        "attention dropout; set 0.1 to 0": dict(model="llama", config=dict(attention_dropout=0.1)),
        "different batches of equal lengths": dict(collator=runs.pad_at_random),
    }

    def error(act: Any, *args: Any, **options: Any) -> str:
        with pytest.raises(ValueError) as caught:
            act(*args, **options)
        return str(caught.value)

    made = lambda model, **changes: cls(Trainer)(model, args=runs.arguments(TrainingArguments, **changes))  # noqa: E731
    errors = {name: error(made, runs.model_of("llama"), **changes) for name, changes in arguments.items()}
    errors |= {name: error(made, model) for name, model in models.items()}
    return errors | {name: error(runs.plain, cls, **options) for name, options in steps.items()}


def test_refuses_before_training(gloo_pool: Any) -> None:
    errors = start(gloo_pool, 2, refusals)
    assert errors[0] == errors[1] and all(name in text for name, text in errors[0].items()), errors[0]


def test_refuses_other_meshes_and_trainers(gloo_pool: Any) -> None:
    import transformers

    from spanwise.integrations import transformers as hf

    class Unknown(transformers.Trainer):
        __module__ = "trl.trainer.unknown_trainer"

    mesh: Any = None
    with pytest.raises(ValueError, match=r"takes transformers.Trainer or a subclass, got <class 'int'>"):
        hf.trainer(int, mesh)
    with pytest.raises(ValueError, match="takes SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer .* got Unknown"):
        hf.trainer(Unknown, mesh)
    with pytest.raises(ValueError, match="Seq2SeqTrainer"):
        hf.trainer(transformers.Seq2SeqTrainer, mesh)
    with pytest.raises(ValueError, match="without a mesh, got ContextParallelTrainer"):
        hf.trainer(hf.trainer(transformers.Trainer, mesh), mesh)
    with pytest.raises(ValueError, match="define training_step of Derived in the base"):
        type("Derived", (hf.trainer(transformers.Trainer, mesh),), {"training_step": print})
    with pytest.raises(ValueError, match=r"takes a mesh of 'cp' .*, got axes \('dp',\)"):
        start(gloo_pool, 2, runs.plain, mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match=r"takes a mesh of 'cp' .*, got axes \('tp', 'cp'\)"):
        start(gloo_pool, 2, runs.plain, mesh_shape=(2, 1), mesh_dim_names=("tp", "cp"))


def before_and_after(cls: Any) -> dict[str, Any]:
    """A run under context parallelism, then its model and another trainer without it."""
    import accelerate
    import torch
    import transformers

    model, args = runs.model_of("llama"), runs.arguments(transformers.TrainingArguments, max_steps=2)
    cut = cls(transformers.Trainer)(model, args=args, train_dataset=runs.documents(22), data_collator=runs.pad)
    cut.train()
    batch = runs.pad(runs.documents(3, seed=9).to_list())
    fresh = runs.model_of("llama")
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch).logits, fresh.eval()(**batch).logits)
    whole = transformers.Trainer(fresh, args=args)
    assert type(whole.accelerator) is accelerate.Accelerator is transformers.trainer.Accelerator
    assert type(cut.accelerator) is not accelerate.Accelerator
    assert whole.accelerator.num_processes == 2 and cut.accelerator.num_processes == 1
    assert cut.args is args and not any("spanwise" in str(x) for x in vars(accelerate.Accelerator).values())
    return {"config": model.config.to_dict()}


def test_leaves_classes_and_modules_alone(gloo_pool: Any) -> None:
    """The accelerator object alone changes its class; models keep hooks that are silent outside of the trainer."""
    for result in start(gloo_pool, 2, before_and_after):
        assert "spanwise" not in str(result["config"])

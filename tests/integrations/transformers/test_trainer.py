"""`transformers.Trainer` under context parallelism logs and learns what it does on one process a cp group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.integrations.transformers import images, runs, tiny
from tests.integrations.transformers.runs import EVALUATED, compare, run

pytestmark = pytest.mark.timeout(600)

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


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


# Each option at least once, with others beside it.
RUNS: dict[str, dict[str, Any]] = {
    "epochs, accumulated, sliding, checkpointed": dict(
        gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=3, model="qwen2, sliding", data_seed=9,
        dataloader_drop_last=True, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
    ),
    "replicas, a count each, experts": dict(
        dp=2, average_tokens_across_devices=False, model="qwen3_moe, auxiliary loss",
    ),
    "replicas, accumulated, by length, states beside attention": dict(
        dp=2, gradient_accumulation_steps=3, train_sampling_strategy="group_by_length", model="falcon_h1",
    ),
    "four ranks, reentrant checkpoints, gated delta rule": dict(
        cp=4, model="qwen3_next", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True},
    ),
    "one rank": dict(cp=1, **EVALUATED),
    "replicas, label smoothing, a count without padding": dict(
        dp=2, label_smoothing_factor=0.1, include_num_input_tokens_seen="non_padding",
    ),
    "replicas, own loss, split batches": dict(
        dp=2, more=dict(compute_loss_func=squared_loss), accelerator_config={"split_batches": True},
        per_device_train_batch_size=4,
    ),
    "FSDP, replicas, accumulated, evaluated": dict(dp=2, shard=True, gradient_accumulation_steps=2, **EVALUATED),
    "stream, collated by transformers": dict(dp=2, data=runs.streamed, collator=runs.flattened),
    "evaluated at the start, packed": dict(EVALUATED, eval_on_start=True, collator=runs.pack_without_first),
    "states alone, evaluated in bfloat16": dict(EVALUATED, bf16_full_eval=True, model="mamba2"),
    "bfloat16": dict(bf16=True, max_grad_norm=0.0, learning_rate=1e-4, close=5e-3),
    **{f"images, {model}": dict(model=model, **(EVALUATED if model == "llava" else {})) for model in images.MODELS},
}  # fmt: skip


@pytest.mark.parametrize("steps", [7, pytest.param(20, marks=pytest.mark.slow)])
def test_steps(gloo_pool: Any, steps: int) -> None:
    """Accumulated, evaluated, clipped, with a last batch that is not full."""
    options = dict(EVALUATED, gradient_accumulation_steps=2, max_steps=steps)
    got = compare(gloo_pool, runs.train, *runs.LOGGED, "eval_loss", **options)
    norms = [log["grad_norm"] for log in got[0]["logs"] if "grad_norm" in log]
    assert len(norms) == steps and min(norms) > 0.5  # all were clipped


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_equal(gloo_pool: Any, name: str) -> None:
    names = (*runs.LOGGED, "eval_loss") if "eval_count" in RUNS[name] else runs.LOGGED
    compare(gloo_pool, runs.train, *names, **RUNS[name])


@pytest.mark.slow
def test_other_axis_order_predictions_and_metrics(gloo_pool: Any) -> None:
    """The cp groups are ranks 0, 2 and 1, 3. Logits are whole, in the order of the batch, and NaN at padding."""
    options = dict(EVALUATED, more=dict(compute_metrics=accuracy), predict=True)
    want = gloo_pool.run(2, run, runs.train, cut=False, **options)[0]
    axes = dict(mesh_shape=(2, 2), mesh_dim_names=("cp", "dp_replicate"))
    valid = want["label_ids"] != -100
    for result in gloo_pool.run(4, run, runs.train, **axes, **options):
        runs.check(result, want, *runs.LOGGED, "eval_loss", "eval_accuracy", "eval_scores")
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
    want = gloo_pool.run(1, run, runs.train, cut=False, collator=runs.pack_without_first)[0]
    for result in gloo_pool.run(2, run, runs.train, collator=runs.pack):
        runs.check(result, want, *runs.LOGGED)


def _tiny_llama() -> Any:
    return runs.model_of("llama")


@pytest.mark.slow
def test_stops_early_with_a_model_made_by_the_trainer(gloo_pool: Any, tmp_path: Any) -> None:
    """Ranks stop at the same step and load the same checkpoint."""
    from transformers import EarlyStoppingCallback

    options = dict(EVALUATED, eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True)
    options |= dict(eval_count=5, max_steps=12, metric_for_best_model="loss", greater_is_better=False)
    options |= dict(learning_rate=20.0, max_grad_norm=5.0)  # so that it gets worse
    more = dict(callbacks=[EarlyStoppingCallback(2)], model_init=_tiny_llama)
    *_, want = compare(
        gloo_pool, runs.train, *runs.LOGGED, "eval_loss", dp=2, folder=str(tmp_path), more=more, **options
    )
    assert want["logs"][-1]["step"] < 12


def sums(cls: Any) -> list[float]:
    from transformers import Trainer, TrainingArguments

    accelerator = cls(Trainer)(runs.model_of("llama"), args=runs.arguments(TrainingArguments)).accelerator
    given = {name: torch.tensor(accelerator.process_index + 1.0) for name in ("sum", "mean", "max")}
    return [accelerator.reduce(x, reduction=name).item() for name, x in given.items()]


@pytest.mark.slow
def test_reductions_count_a_group_once(gloo_pool: Any) -> None:
    axes = dict(mesh_shape=(2, 2), mesh_dim_names=("dp_shard", "cp"))
    assert gloo_pool.run(4, run, sums, **axes) == [[3.0, 1.5, 2.0]] * 4


# --- losses of users in padded batches: equal to plain ones, or refused where they read padding -----------------------


def picked(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    scores = outputs.logits[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]


def detached_weights(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Gradients do not flow through what is read at padding."""
    weights = outputs.logits.detach().logsumexp(-1)[:, :-1].softmax(-1)
    return -(picked(outputs, labels) * weights * (labels[:, 1:] != -100)).sum()


def policy_gradient(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Its value is that of any outputs, its gradient not."""
    return -(picked(outputs, labels) - picked(outputs, labels).detach()).exp().mean()


def rectified(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Gradients flow at some of the outputs at padding, and on some ranks, only."""
    return outputs.logits[:, -1, 0].relu().sum() + squares_of_tokens(outputs, labels)


def squares_of_tokens(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.logits.pow(2).mean(-1) * (labels != -100)).sum() / (labels != -100).sum()


def many_of_tokens(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """By each way to leave padding out."""
    valid = labels != -100
    hidden = outputs.hidden_states[-1]
    means = (hidden * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    selected = outputs.logits[valid].logsumexp(-1).mean()
    filled = outputs.logits.logsumexp(-1).masked_fill(~valid, 0.0).mean()
    chosen = torch.where(valid, hidden.norm(dim=-1), 0.0).mean()
    ignored = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return means.norm(dim=-1).mean() + selected + filled + chosen + ignored


def balance_of_experts(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    loss = load_balancing_loss_func(outputs.router_logits, 4, 2, labels != -100)
    return squares_of_tokens(outputs, labels) + loss  # type: ignore[return-value]  # it takes other inputs, too


READING: dict[str, Loss] = {
    "squares": lambda outputs, labels: outputs.logits.pow(2).mean(),
    "last token": lambda outputs, labels: outputs.logits[:, -1].logsumexp(-1).mean(),
    "hidden states": lambda outputs, labels: outputs.hidden_states[1].mean(1).norm(dim=-1).sum(),
    "detached weights": detached_weights,
    "policy gradient": policy_gradient,
    "rectified": rectified,
}
KEEPING: dict[str, tuple[Loss, dict[str, Any]]] = {
    "many, replicas": (many_of_tokens, dict(dp=2, gradient_accumulation_steps=2)),
    "derived, experts": (balance_of_experts, dict(derived=True, model="qwen3_moe, auxiliary loss")),
    "no padding": (READING["squares"], dict(collator=runs.pack_without_first)),
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


def reads_padding(cls: Any) -> dict[str, str]:
    """The errors of losses that read padding, in training and in evaluation."""
    from transformers import Trainer, TrainingArguments

    errors = {}
    for name, loss in READING.items():
        data = dict(train_dataset=runs.documents(4), eval_dataset=runs.documents(4), data_collator=runs.pad)
        trainer = cls(own(loss, Trainer))(
            runs.model_of("llama"), args=runs.arguments(TrainingArguments, max_steps=1), **data
        )
        for step in (trainer.evaluate, trainer.train):
            try:
                step()
            except ValueError as error:
                errors[f"{name}, {step.__name__}"] = str(error)
    return errors


def test_refuses_losses_that_read_padding(gloo_pool: Any) -> None:
    first, second = gloo_pool.run(2, run, reads_padding)
    assert first == second
    missing = {f"{name}, {step}" for name in READING for step in ("train", "evaluate")} - set(first)
    assert missing == {"policy gradient, evaluate"}  # its value is right
    assert all("reads the model's outputs at padding" in text for text in first.values())


def of_tokens(cls: Any, loss: str, derived: bool = False, **options: Any) -> Any:
    """The loss in the base that `hf.trainer` gets, or in a class `derived` from its result."""
    value = KEEPING[loss][0]
    return runs.train(lambda base: own(value, cls(base)) if derived else cls(own(value, base)), **options)


@pytest.mark.slow
@pytest.mark.parametrize("loss", KEEPING)
def test_losses_that_leave_padding_out(gloo_pool: Any, loss: str) -> None:
    options = EVALUATED | dict(more=dict(compute_metrics=accuracy), loss=loss) | KEEPING[loss][1]
    compare(gloo_pool, of_tokens, *runs.LOGGED, "eval_loss", "eval_accuracy", "eval_scores", **options)


# --- what is refused, and what stays as it is -------------------------------------------------------------------------


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
        "attention dropout; set 0.1 to 0": dict(config=dict(attention_dropout=0.1)),
        "different batches of equal lengths": dict(collator=runs.pad_at_random),
        "2 labels are of first tokens of documents": dict(
            collator=runs.pack, more=dict(compute_loss_func=squared_loss), gradient_accumulation_steps=2
        ),
    }

    def error(act: Any, *args: Any, **options: Any) -> str:
        with pytest.raises(ValueError) as caught:
            act(*args, **options)
        return str(caught.value)

    made = lambda model, **changes: cls(Trainer)(model, args=runs.arguments(TrainingArguments, **changes))  # noqa: E731
    errors = {name: error(made, runs.model_of("llama"), **changes) for name, changes in arguments.items()}
    errors |= {name: error(made, model) for name, model in models.items()}
    return errors | {name: error(runs.train, cls, **options) for name, options in steps.items()}


def test_refuses_before_training(gloo_pool: Any) -> None:
    errors = gloo_pool.run(2, run, refusals)
    assert errors[0] == errors[1] and all(name in text for name, text in errors[0].items()), errors[0]


def test_refuses_other_meshes_and_trainers(gloo_pool: Any) -> None:
    import transformers

    from spanwise.integrations import transformers as hf

    class Unknown(transformers.Trainer):
        __module__ = "trl.trainer.unknown_trainer"

    mesh: Any = None
    for base, text in (
        (int, "got <class 'int'>"), (Unknown, "got Unknown"), (transformers.Seq2SeqTrainer, "Seq2SeqTrainer"),
        (hf.trainer(transformers.Trainer, mesh), "without a mesh, got ContextParallelTrainer"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            hf.trainer(base, mesh)
    with pytest.raises(ValueError, match="define training_step of Derived in the base"):
        type("Derived", (hf.trainer(transformers.Trainer, mesh),), {"training_step": print})
    for axes in (dict(mesh_dim_names=("dp",)), dict(mesh_shape=(2, 1), mesh_dim_names=("tp", "cp"))):
        with pytest.raises(ValueError, match=r"takes a mesh of 'cp' .*, got axes \("):
            gloo_pool.run(2, run, runs.train, **axes)


def before_and_after(cls: Any) -> dict[str, Any]:
    """A run under context parallelism, then its model and another trainer without it."""
    import accelerate
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
    for result in gloo_pool.run(2, run, before_and_after):
        assert "spanwise" not in str(result["config"])

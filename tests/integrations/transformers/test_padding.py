"""Losses of users under `hf.trainer`, in padded batches: equal to plain ones, or refused where they read padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.integrations.transformers import trainer_runs as runs
from tests.integrations.transformers.test_trainer import EVALUATED, compare, start

pytestmark = pytest.mark.timeout(600)

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def picked(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    scores = outputs.logits[:, :-1].log_softmax(-1)
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
    "mean": lambda outputs, labels: outputs.logits.mean(),
    "last token": lambda outputs, labels: outputs.logits[:, -1].logsumexp(-1).mean(),
    "hidden states": lambda outputs, labels: outputs.hidden_states[1].mean(1).norm(dim=-1).sum(),
    "detached weights": detached_weights,
    "policy gradient": policy_gradient,
    "rectified": rectified,
}
KEEPING: dict[str, tuple[Loss, dict[str, Any]]] = {
    "squares": (squares_of_tokens, dict(dp=2)),
    "many": (many_of_tokens, dict(gradient_accumulation_steps=2)),
    "derived": (squares_of_tokens, dict(derived=True)),
    "experts": (balance_of_experts, dict(model="qwen3_moe, auxiliary loss")),
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
    first, second = start(gloo_pool, 2, reads_padding)
    assert first == second
    missing = {f"{name}, {step}" for name in READING for step in ("train", "evaluate")} - set(first)
    assert missing == {"policy gradient, evaluate"}  # its value is right
    assert all("reads the model's outputs at padding" in text for text in first.values())


def of_tokens(cls: Any, loss: str, derived: bool = False, **options: Any) -> Any:
    """The loss in the base that `hf.trainer` gets, or in a class `derived` from its result."""
    value = KEEPING[loss][0]
    return runs.plain(lambda base: own(value, cls(base)) if derived else cls(own(value, base)), **options)


@pytest.mark.slow
@pytest.mark.parametrize("loss", KEEPING)
def test_losses_that_leave_padding_out(gloo_pool: Any, loss: str) -> None:
    options = EVALUATED | dict(more=dict(compute_metrics=runs.accuracy), loss=loss) | KEEPING[loss][1]
    compare(gloo_pool, of_tokens, *runs.LOGGED, "eval_loss", "eval_accuracy", "eval_scores", **options)


def labels_of_first_tokens(cls: Any) -> str:
    """The error of a loss of the user's in packed batches where first tokens of documents have labels."""
    with pytest.raises(ValueError) as caught:
        runs.plain(
            cls, collator=runs.pack, more=dict(compute_loss_func=runs.squared_loss), gradient_accumulation_steps=2
        )
    return str(caught.value)


@pytest.mark.slow
def test_refuses_labels_of_first_tokens_in_losses_of_users(gloo_pool: Any) -> None:
    first, second = start(gloo_pool, 2, labels_of_first_tokens)
    assert first == second
    assert "2 labels are of first tokens of documents" in first

"""torchtitan's Llama 3 debug model with two layers, packed batches, and one forward a document as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

Rows = Sequence[Sequence[int]]  # lengths of the documents of each row
Step = tuple[Any, dict[str, torch.Tensor]]  # loss and gradients


def model_of(inner_attention: type[Any] = FlexAttention, num_layers: int = 2) -> Any:
    """The model; the same weights in each call."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:num_layers]
    for layer in config.layers:
        layer.attention.inner_attention = inner_attention.Config()
    model = config.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_states()  # the rotary table; its weights come from the generator that threads share
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model


def batch_of(rows: Rows, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels and positions ``[B, S]``, as torchtitan's loader makes them; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(rows), sum(rows[0])
    tokens = torch.randint(0, 2048, (shape[0], shape[1] + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(shape, generator=generator) < 0.2] = IGNORE_INDEX
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    return tokens[:, :-1], labels, positions


def step(model: Any, labels: torch.Tensor, count: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A rank's part of the loss, as torchtitan's trainer computes it: its sum over all labels of the batch."""
    loss = cross_entropy_loss(model(*args, **kwargs), labels) / count
    loss.backward()
    return loss.detach()


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    held = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in held.items() if g is not None}


def reference(rows: Rows, batch: tuple[torch.Tensor, ...]) -> Step:
    """Loss and gradients on one device: torchtitan's SDPA attention, causal, one document at a time."""
    model = model_of(ScaledDotProductAttention)
    inputs, labels, positions = batch
    loss, count = 0.0, int((labels != IGNORE_INDEX).sum())
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            one = slice(row, row + 1), slice(start, start + length)
            loss += step(model, labels[one], count, inputs[one], positions[one]).item()
            start += length
    return loss, gradients_of(model)


def check(
    results: Sequence[tuple[float, dict[str, torch.Tensor]]], want: tuple[float, dict[str, torch.Tensor]]
) -> None:
    """Losses and gradients of the ranks sum to those of one device, as FSDP2 sums them in torchtitan."""
    loss, gradients = want
    total = sum(float(result[0]) for result in results)
    assert abs(total - loss) <= 3e-6 * abs(loss), (total, loss)
    assert results[0][1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = sum(result[1][name] for result in results) - gradient
        assert error.norm() <= 1e-5 * gradient.norm() + 1e-8, (name, error.norm(), gradient.norm())

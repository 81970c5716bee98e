"""Training on global batches over four ranks: losses and gradients are those of each document alone on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import spanwise
from examples.decoder import VOCABULARY, Decoder
from tests.ranks.gloo import GlooPool

TINY = {"dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}
LENGTHS = [37, 5, 0, 160, 1, 22, 61, 90, 3, 44]  # one needs all ranks, others are shorter than a block


def documents() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, n) for n in LENGTHS]


def batches(num_ranks: int, **options: Any) -> spanwise.GlobalBatches:
    tokens = 192 // num_ranks
    return spanwise.GlobalBatches(
        LENGTHS, num_ranks, tokens, seed=1, block_size=8, num_q_heads=4, num_kv_heads=2, head_dim=4, dtype="float64",
        **options,
    )  # fmt: skip


def train(rank: int, mesh: Any, sharding: str, options: dict[str, Any]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of each global batch, on one rank of all."""
    model: Any = Decoder(**TINY).double()
    parallelize_module(model, mesh, {"layers.*.inner": spanwise.ContextParallel(attention_type="sdpa")})
    if sharding == "fsdp":
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, device_mesh=mesh)
    found = []
    dataset = spanwise.GlobalBatchDataset(batches(mesh.size(), **options), documents(), rank)
    for batch in dataset:
        model.zero_grad()
        logits = model(batch["input_ids"], batch["position_ids"], batch["plan"].local(mesh))
        loss = spanwise.cross_entropy(logits, batch["labels"], mesh, num_valid=batch["num_valid"])
        loss.backward()
        grads = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
        found.append((loss.item(), grads))
    return found


def whole(gradient: Any) -> torch.Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def alone(batch: spanwise.GlobalBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """The same on one device, one document after the other, with torch's attention and loss."""
    model, tokens = Decoder(**TINY).double(), documents()
    total = 0.0
    for document, start, stop in batch.pieces.tolist():
        ids = torch.from_numpy(tokens[document][start:stop])[None]
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
        logits = model(ids, torch.arange(ids.shape[1])[None], causal)[0, :-1]
        loss = F.cross_entropy(logits, ids[0, 1:], reduction="sum") / batch.num_valid
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("sharding", "options"),
    [
        ("fsdp", {"balancer": "local"}),
        ("ddp", {"cut": True, "pad": True, "balancer": "contiguous"}),
        ("fsdp", {"pad": True, "balancer": "contiguous"}),
    ],
    ids=["fsdp", "ddp, documents cut, padded", "fsdp, padded"],
)
def test_losses_and_gradients_are_those_of_documents_alone(
    gloo_pool: GlooPool, sharding: str, options: dict[str, Any]
) -> None:
    ranks = gloo_pool.run(4, train, sharding, options)
    made = list(batches(4, **options))
    assert len(made) == len(ranks[0]) >= 3
    assert sum(int(batch.plan.recv_tokens().sum()) for batch in made) > 0
    without = [step for step, batch in enumerate(made) if (batch.load(documents(), 3)["labels"] == -100).all()]
    assert bool(without) == bool(options.get("pad"))  # the last rank holds padding alone in some step
    for step, batch in enumerate(made):
        loss, gradients = alone(batch)
        for found in ranks:
            assert found[step][0] == pytest.approx(loss, rel=1e-12)
            assert found[step][1].keys() == gradients.keys()
            for name, expected in gradients.items():
                torch.testing.assert_close(found[step][1][name], expected, rtol=1e-10, atol=1e-13)

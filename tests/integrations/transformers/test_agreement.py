"""Ranks of a cp mesh that get different batches of equal lengths: an error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.integrations.transformers.agreement import check_same
from tests.ranks.harness import run_ranks

BATCH = {
    "input_ids": torch.arange(6)[None],
    "inputs_embeds": torch.zeros(2),
    "pixels": torch.linspace(-1, 1, 12).view(3, 4),
    "task": "text",
}
# What the last rank has otherwise; equal sums of tokens, and a batch with its rows exchanged, among them.
OTHERS: dict[str, dict[str, Any]] = {
    "a token": {"input_ids": torch.tensor([[0, 1, 2, 3, 4, 6]])},
    "an order": {"input_ids": torch.tensor([[0, 1, 2, 4, 3, 5]])},
    "a pixel": {"pixels": BATCH["pixels"] + torch.eye(3, 4) * 1e-6},
    "rows of pixels": {"pixels": BATCH["pixels"].flip(0)},
    "one more tensor": {"mask": torch.ones(1)},
}


def checked(rank: int, mesh: DeviceMesh, other: dict[str, Any]) -> str:
    try:
        check_same(BATCH | (other if rank == mesh.size() - 1 else {}), mesh, [])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", OTHERS)
def test_another_batch_on_one_rank(name: str) -> None:
    for text in run_ranks(3, checked, OTHERS[name]):
        assert "got different batches of equal lengths" in text


def test_equal_batches_and_other_embeddings() -> None:
    for other in ({}, {"inputs_embeds": torch.ones(2)}, {"task": "image"}):
        assert run_ranks(3, checked, other) == [""] * 3

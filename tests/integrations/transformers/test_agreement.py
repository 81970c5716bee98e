"""Ranks of a cp mesh with different batches of equal lengths, or other parameters: an error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.integrations.transformers.agreement import check_same
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

PACKED = tiny.packed(tiny.documents_of((23, 41)))
BATCH = {
    "input_ids": torch.arange(6)[None],
    "inputs_embeds": torch.zeros(2),
    "pixels": torch.linspace(-1, 1, 12).view(3, 4),
    "task": "text",
    "num_items_in_batch": 10,
}
# What the last rank has otherwise; equal sums of tokens, and a batch with its rows exchanged, among them.
OTHERS: tuple[dict[str, Any], ...] = (
    {"input_ids": torch.tensor([[0, 1, 2, 3, 4, 6]])}, {"input_ids": torch.tensor([[0, 1, 2, 4, 3, 5]])},
    {"pixels": BATCH["pixels"] + torch.eye(3, 4) * 1e-6}, {"pixels": BATCH["pixels"].flip(0)}, {"mask": torch.ones(1)},
    {"num_items_in_batch": 11},
)  # fmt: skip


def test_another_batch_on_one_rank() -> None:
    def checked(rank: int, mesh: DeviceMesh, other: dict[str, Any]) -> None:
        check_same(BATCH | (other if rank == mesh.size() - 1 else {}), mesh, [])

    for other in OTHERS:
        with pytest.raises(ValueError, match="got different batches of equal lengths"):
            run_ranks(3, checked, other)
    for equal in ({}, {"inputs_embeds": torch.ones(2)}, {"task": "image"}):
        run_ranks(3, checked, equal)


@pytest.mark.parametrize(("step", "fused"), [(0, True), (1, False), (1, True), (2, True)])
def test_gradients_that_nobody_averages(step: int, fused: bool) -> None:
    """Found at the first batch after the first step; a drift that begins with the second one too.

    Fused optimizers, the default of Trainer, do not count versions of parameters on.
    """
    averaged = 9

    def steps(mine: Any, batch: Any) -> int:
        if step == 0 and torch.distributed.get_rank() == 1:
            mine.lm_head.weight.data[0, 0] += 1e-3
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, fused=fused)
        for i in range(4):
            try:
                tiny.step(mine, batch)
            except ValueError as error:
                assert "parameters differ between ranks of the cp mesh" in str(error)
                return i
            if i < averaged:
                for x in mine.parameters():
                    torch.distributed.all_reduce(x.grad)
                    x.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        return -1

    assert tiny.train("llama", PACKED, act=steps) == ([0, 0] if step == 0 else [-1, -1])
    averaged = step - 1
    assert tiny.train("llama", PACKED, act=steps) == [step, step]

"""K/V heads that several ranks of a Ulysses group compute with: where they land, how gradients are summed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spanwise import _torch
from spanwise.attention import ulysses
from tests.ranks.harness import run_ranks


@pytest.mark.parametrize(("num_heads", "kv_heads", "num_ranks"), [(16, 1, 8), (10, 2, 5), (12, 4, 3), (12, 3, 4)])
def test_shared_heads_land_alike_and_their_gradients_are_summed_in_float32(
    num_heads: int, kv_heads: int, num_ranks: int
) -> None:
    """A K/V head gets 256 from the rank that computes its first query head, and 1 from others."""
    tokens = [np.array([[rank, num_ranks + rank]]) for rank in range(num_ranks)]
    group, own = num_heads // kv_heads, num_heads // num_ranks
    value = torch.arange(kv_heads).view(1, -1, 1, 1).expand(1, -1, 2, 1).bfloat16()

    def on_rank(rank: int, mesh: Any) -> tuple[list[tuple[int, float]], torch.Tensor, torch.Tensor]:
        name = _torch.group_name(mesh.get_group())
        trade = ulysses.trade_of(tokens, rank, torch.device("cpu"))
        k, v = (value.clone().requires_grad_() for _ in range(2))
        _, k_heads, v_heads = ulysses.to_heads(value[:, :1].expand(1, num_heads, 2, 1), k, v, trade, name, "test")
        firsts = range(rank * own, (rank + 1) * own, own // k_heads.shape[1])  # the first query head that reads each
        assert k_heads[0, :, 0, 0].tolist() == v_heads[0, :, -1, 0].tolist() == [first // group for first in firsts]
        given = torch.tensor([256.0 if first % group == 0 else 1.0 for first in firsts])
        grad = given.bfloat16().view(1, -1, 1, 1).expand_as(k_heads)
        torch.autograd.backward([k_heads, v_heads], [grad, 2 * grad])
        return [(first // group, x) for first, x in zip(firsts, given.tolist(), strict=True)], k.grad, v.grad

    results, totals = run_ranks(num_ranks, on_rank), torch.zeros(kv_heads)
    for given, _, _ in results:
        for head, gradient in given:
            totals[head] += gradient
    expected = totals.bfloat16().view(1, -1, 1, 1)
    for _, dk, dv in results:
        assert torch.equal(dk, expected.expand_as(dk)) and torch.equal(dv, 2 * expected.expand_as(dv))

"""causal_conv on 1 to 4 ranks: outputs and gradients are those of one device for each document."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, strategies as st

import spanwise
from spanwise import recurrence
from spanwise.layouts import document_runs
from tests.ranks.harness import run_ranks
from tests.recurrence import oracle
from tests.recurrence.problem import documents_of, plan_of
from tests.recurrence.test_layers import TOLERANCES, Owners


def _on_rank(rank: int, mesh: Any, plan: spanwise.Plan, tensors: list[torch.Tensor], activation: str | None) -> Any:
    x, weight, bias, d_out = tensors
    route = recurrence.recurrence_route(plan, mesh if plan.num_ranks > 1 else None, conv_width=5)
    leaves = [
        plan.shard(x, rank, dim=0).clone().requires_grad_(),
        *(w.clone().requires_grad_() for w in (weight, bias)),
    ]
    out = recurrence.causal_conv(*leaves, route, activation)
    return out.detach(), torch.autograd.grad((out * plan.shard(d_out, rank, dim=0)).sum(), leaves)


@given(
    data=st.data(), ranks=st.integers(1, 4), width=st.integers(1, 5), activation=st.sampled_from([None, "silu"]),
    dtype=st.sampled_from(list(TOLERANCES)),
)  # fmt: skip
def test_any_owners_and_documents(
    data: st.DataObject, ranks: int, width: int, activation: str | None, dtype: torch.dtype
) -> None:
    """Runs of one token: a halo comes from several runs and several ranks."""
    length, block_size = data.draw(st.integers(1, 30)), data.draw(st.sampled_from([1, 1, 2, 7]))
    blocks = -(-length // block_size)
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=blocks, max_size=blocks))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=5))})
    plan = plan_of(cuts, ranks, Owners(owners, block_size))
    generator = torch.Generator().manual_seed(0)
    shapes = ((length, 3), (3, width), (3,), (length, 3))
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    results = run_ranks(ranks, _on_rank, plan, tensors, activation)
    *inputs, d_out = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in inputs]
    out = oracle.convolution(*leaves, documents_of(cuts), activation)
    grads = torch.autograd.grad((out * d_out).sum(), leaves)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    for rank, (mine, (d_x, _, _)) in enumerate(results):
        torch.testing.assert_close(mine.double(), plan.shard(out, rank, dim=0), **close)
        torch.testing.assert_close(d_x.double(), plan.shard(grads[0], rank, dim=0), **close)
    for number in (1, 2):
        torch.testing.assert_close(sum(g[number].double() for _, g in results), grads[number], **close)


def test_nan_stays_in_its_document_and_padding_gives_zeros() -> None:
    packing = spanwise.Packing([0, 6, 20], cu_seqlens_q_padded=[0, 8, 24])
    plan = spanwise.make_plan(packing.mask(), 2, packing=packing, balancer="head_tail", exchange="needed", block_size=2)
    x = torch.ones(24, 2)
    x[:8] = torch.nan  # the first document and its padding
    x[22:] = torch.nan

    def on_rank(rank: int, mesh: Any) -> torch.Tensor:
        route = recurrence.recurrence_route(plan, mesh)
        mine = plan.shard(x, rank, dim=0).clone().requires_grad_()
        out = recurrence.causal_conv(mine, torch.ones(2, 4), torch.ones(2), route)
        (grad,) = torch.autograd.grad(out.nan_to_num().sum(), mine)
        return torch.cat([out.detach(), grad], dim=1)

    whole = torch.empty(24, 4)
    for rank, mine in enumerate(run_ranks(2, on_rank)):
        whole[plan.layout.indices(rank)] = mine
    assert whole[8:22].isfinite().all() and whole[:6, :2].isnan().all()
    assert (whole[[6, 7, 22, 23]] == 0).all()


def test_only_rows_before_runs_travel() -> None:
    layout = spanwise.Layout([[(0, 0, 10), (1, 10, 20), (0, 20, 25), (1, 25, 40)]], num_ranks=2, seq_len=40)
    everyone = document_runs.find(layout, [spanwise.Packing([0, 12, 20, 40])])
    # Rank 1 reads 7 to 9, and 22 to 24; rank 0 begins a document at 20.
    reader, token = document_runs.halos(everyone, 3)
    assert reader.tolist() == [1] * 6 and token.tolist() == [7, 8, 9, 22, 23, 24]

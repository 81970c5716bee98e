"""Log-probabilities and the loss from hidden states on ranks: sharded tokens, sharded vocabularies, and both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import spanwise
from spanwise import SpanMask
from tests.batch.test_token_scores import problem, reference
from tests.pairs import covering
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

LENGTH, DIM, VOCAB = 45, 6, 11
CU = [0, 1, 20, 20, 31, 45]


def batch_problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight, bias, labels = problem(2 * LENGTH, DIM, VOCAB)
    return hidden.detach().view(2, LENGTH, DIM), weight.detach(), bias.detach(), labels.view(2, LENGTH)


def own(x: torch.Tensor, rows: list[int], rank: int) -> torch.Tensor:
    """A copy of this rank's rows that needs a gradient."""
    return x.split(rows)[rank].clone().requires_grad_()


@pytest.mark.parametrize(
    ("num_ranks", "reduction", "softcap"),
    covering([1, 2, 3, 4], ["mean", "sum", "none", "logits", "micro-batches"], [None, 2.0]),
)
def test_the_loss_and_all_gradients_are_those_of_one_device(num_ranks: int, reduction: Any, softcap: float) -> None:
    plan = spanwise.make_plan(SpanMask.documents(CU), num_ranks, balancer="ptrr", block_size=4)
    hidden, weight, bias, labels = batch_problem()
    if num_ranks > 1:
        labels[:, plan.layout.indices(0)] = -100  # a rank without a valid token
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    losses = -reference(*leaves, labels, softcap=softcap)[0]
    cotangent = torch.randn(2, LENGTH, dtype=torch.float64)
    count = int((labels != -100).sum())
    expected = {"sum": losses.sum(), "none": losses}.get(reduction, losses.sum() / count)
    factor = cotangent if reduction == "none" else torch.tensor(0.7, dtype=torch.float64)
    grads = torch.autograd.grad(expected, leaves, factor)

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[torch.Tensor, list[torch.Tensor]]:
        h, w, b = (x.clone().requires_grad_() for x in (hidden, weight, bias))
        states, targets = spanwise.shard(plan, mesh, h), spanwise.shard(plan, mesh, labels)
        if reduction in ("logits", "micro-batches"):
            logits = F.linear(states, w, b)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            num_valid, rows = (count, [[0], [1]]) if reduction == "micro-batches" else (None, [[0, 1]])
            loss = sum(spanwise.cross_entropy(logits[i], targets[i], mesh, num_valid=num_valid) for i in rows)
        else:
            loss = spanwise.linear_cross_entropy(
                states, w, targets, bias=b, loss_mesh=mesh, reduction=reduction, softcap=softcap, chunk=7
            )
        own_factor = spanwise.shard(plan, mesh, cotangent) * mesh.size() if reduction == "none" else factor
        return loss.detach(), list(torch.autograd.grad(loss, (h, w, b), own_factor))

    results = run_ranks(num_ranks, on_rank)
    for rank, (loss, _) in enumerate(results):
        exact = expected.detach()
        torch.testing.assert_close(loss, plan.shard(exact, rank) if reduction == "none" else exact)
    for i, exact in enumerate(grads):  # averaged, as FSDP2 and DDP do
        torch.testing.assert_close(sum(own_grads[i] for _, own_grads in results) / num_ranks, exact)


@pytest.mark.parametrize("rows", [[11], [6, 5], [4, 4, 3], [5, 5, 1, 0], [0, 1, 9, 1]])
@pytest.mark.parametrize("from_hidden", [True, False])
def test_a_sharded_vocabulary(rows: list[int], from_hidden: bool) -> None:
    """Each rank has its rows, any number of them; scores and gradients of hidden states are whole on every rank."""
    hidden, weight, bias, labels = problem(29, DIM, VOCAB)
    softcap = 2.0 if from_hidden else None
    expected = reference(hidden, weight, bias, labels, 1.3, softcap)
    cotangents = [torch.randn(29, dtype=torch.float64) for _ in range(2)]
    exact = torch.autograd.grad(expected, (hidden, weight, bias), cotangents)

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[Any, Any]:
        h = hidden.detach().clone().requires_grad_()
        w, b = own(weight.detach(), rows, rank), own(bias.detach(), rows, rank)
        given: dict[str, Any] = {"temperature": 1.3, "entropy": True, "vocab_mesh": mesh, "chunk": 4}
        if from_hidden:
            found = spanwise.token_logprobs(h, labels, vocab_weight=w, bias=b, softcap=softcap, **given)
        else:
            found = spanwise.token_logprobs(F.linear(h, w, b), labels, **given)
        return [x.detach() for x in found], torch.autograd.grad(found, (h, w, b), cotangents)

    results = run_ranks(len(rows), on_rank)
    for scores, grads in results:
        for one, other in zip(scores, expected, strict=True):
            torch.testing.assert_close(one, other.detach())
        if from_hidden:
            torch.testing.assert_close(grads[0], exact[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([grads[i] for _, grads in results]), exact[i])
    if not from_hidden:  # logits are each rank's own, so their gradients reach hidden states in parts
        torch.testing.assert_close(sum(grads[0] for _, grads in results), exact[0])


@pytest.mark.parametrize("dtensor", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sharded_vocabulary_beside_context_parallelism(dtensor: bool, reduction: Any) -> None:
    """2 × 2 ranks, 11 rows as 6 and 5; a DTensor gets its gradient as a DTensor of the same placement."""
    if dtensor and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 crashes where ranks that are threads enter a fake mode, as DTensor does")
    plan = spanwise.make_plan(SpanMask.documents(CU), 2, balancer="lpt", block_size=4)
    hidden, weight, bias, labels = batch_problem()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    losses = -reference(*leaves, labels)[0]
    expected = losses.sum() / ((labels != -100).sum() if reduction == "mean" else 1)
    exact = torch.autograd.grad(expected, leaves)

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cp, tp = mesh["cp"], mesh["tp"]
        h = hidden.clone().requires_grad_()
        if dtensor:
            w, b = (distribute_tensor(x, tp, [Shard(0)]).requires_grad_() for x in (weight, bias))
        else:
            w, b = (own(x, [6, 5], tp.get_local_rank()) for x in (weight, bias))
        loss = spanwise.linear_cross_entropy(
            spanwise.shard(plan, cp, h), w, spanwise.shard(plan, cp, labels), bias=b, loss_mesh=cp, vocab_mesh=tp,
            reduction=reduction, chunk=7,
        )  # fmt: skip
        loss.backward()
        assert not dtensor or isinstance(w.grad, DTensor)
        return loss.detach(), [x.grad.to_local() if isinstance(x, DTensor) else x.grad for x in (h, w, b)]

    results = run_ranks(4, on_rank, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))
    assert all(torch.allclose(loss, expected) for loss, _ in results)
    for tp in range(2):
        torch.testing.assert_close((results[tp][1][0] + results[2 + tp][1][0]) / 2, exact[0])
    for i in (1, 2):
        parts = [(results[tp][1][i] + results[2 + tp][1][i]) / 2 for tp in range(2)]
        torch.testing.assert_close(torch.cat(parts), exact[i])


def test_what_a_sharded_vocabulary_refuses() -> None:
    hidden, weight, _, labels = (x.detach() for x in problem(7, DIM, VOCAB))

    def refused(match: str, **given: Any) -> None:
        with pytest.raises(ValueError, match=match):
            spanwise.linear_cross_entropy(
                **({"hidden": hidden, "vocab_weight": weight, "labels": labels, "loss_mesh": None} | given)
            )

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        tp = mesh["tp"]
        sharded = distribute_tensor(weight, tp, [Shard(0)])
        refused(r"vocab_weight is a DTensor .*Shard\(dim=0\).* vocab_mesh, None. Under FSDP", vocab_weight=sharded)
        refused(r"must be Shard\(0\) on vocab_mesh", vocab_weight=sharded, vocab_mesh=mesh["cp"])
        columns = distribute_tensor(weight, tp, [Shard(1)])
        refused(r"must be Shard\(0\) on vocab_mesh", vocab_weight=columns, vocab_mesh=tp)
        refused("hidden must be a plain tensor", hidden=distribute_tensor(hidden, tp, [Replicate()]))
        refused(r"vocab_mesh must have one axis, got 2 \(\('cp', 'tp'\)\)", vocab_mesh=mesh)
        rows = weight.split([6, 5])[tp.get_local_rank()]
        refused(r"; labels\[0\] is 11", vocab_weight=rows, vocab_mesh=tp, labels=torch.full((7,), 11))

    run_ranks(4, on_rank, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))


def _by_inductor(rank: int, mesh: DeviceMesh, hidden: torch.Tensor, weight: torch.Tensor, labels: Any) -> float:
    rows = weight.split([6, 5])[rank]

    @torch.compile(fullgraph=True)
    def scores(h: torch.Tensor) -> torch.Tensor:
        return spanwise.token_logprobs(h, labels, vocab_weight=rows, vocab_mesh=mesh)

    return (scores(hidden) - reference(hidden, weight, None, labels)[0]).abs().max().item()


@pytest.mark.slow
@pytest.mark.compiles
def test_inductor_keeps_the_largest_logits_of_a_rank(gloo_pool: GlooPool) -> None:
    """Without gradients it made them a view of what an all-reduce then overwrote: 0.3 off."""
    hidden, weight, _, labels = (x.detach() for x in problem(17, DIM, VOCAB))
    assert max(gloo_pool.run(2, _by_inductor, hidden, weight, labels)) < 1e-10


class Head(torch.nn.Module):
    """The last layer of a model under FSDP: the loss is computed in its forward, where the weight is whole."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return spanwise.linear_cross_entropy(hidden, self.weight, labels, loss_mesh=mesh, chunk=5)


def _fsdp(rank: int, mesh: DeviceMesh, plan: Any, hidden: Any, weight: Any, labels: Any) -> Any:
    head = fully_shard(Head(weight), mesh=mesh)
    h, y = (spanwise.shard(plan, mesh, x) for x in (hidden, labels))
    with pytest.raises(ValueError, match="Under FSDP, call this inside the forward"):
        spanwise.linear_cross_entropy(h, head.weight, y, loss_mesh=mesh)
    head(h, y, mesh).backward()
    return head.weight.grad.full_tensor()


def test_fully_sharded_data_parallelism(gloo_pool: GlooPool) -> None:
    hidden, weight, _, labels = batch_problem()
    leaf = weight.clone().requires_grad_()
    F.cross_entropy((hidden @ leaf.T).flatten(0, 1), labels.flatten()).backward()
    plan = spanwise.make_plan(SpanMask.documents(CU), 2, balancer="lpt", block_size=4)
    for grad in gloo_pool.run(2, _fsdp, plan, hidden, weight, labels):
        torch.testing.assert_close(grad, leaf.grad)

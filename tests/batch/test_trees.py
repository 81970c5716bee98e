"""Trees on ranks: a small model over a tree against independent forwards of every sequence through it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import SpanMask, TokenTree
from tests.pairs import covering
from tests.ranks.harness import run_ranks

VOCAB, HEADS, HEAD_DIM = 11, 12, 2
WIDTH = HEADS * HEAD_DIM


def rollouts(seed: int) -> list[np.ndarray]:
    """Two prompts, answers that branch and branch again, a sequence twice, a prefix of others, and an empty one."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt in (7, 12):
        shared = rng.integers(0, VOCAB, prompt)
        for _ in range(3):
            turn = np.concatenate([shared, rng.integers(0, VOCAB, rng.integers(1, 6))])
            found += [np.concatenate([turn, rng.integers(0, VOCAB, n)]) for n in rng.integers(1, 7, 2)]
        found.append(shared)
    return [*found, found[0], found[0][:0]]


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of the embedding, of q, k and v in two layers, of their outputs, and of the head."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(VOCAB, WIDTH), (2, 3, WIDTH, WIDTH), (2, WIDTH, WIDTH), (VOCAB, WIDTH)]
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5 for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in drawn]


def hidden_states(w: list[torch.Tensor], ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
    """Two layers of attention with rotated queries and keys; ids and positions ``[1, T]``."""
    x = F.embedding(ids, w[0])
    angle = positions[:, None, :, None].to(x.dtype) * torch.linspace(0.1, 1, HEADS, dtype=x.dtype)[:, None, None]
    turn = torch.cat([angle.cos(), angle.sin()], -1)  # [1, heads, T, 2]

    def rotated(q: torch.Tensor) -> torch.Tensor:
        (a, b), (cos, sin) = q.unbind(-1), turn.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1)

    for qkv, out in zip(w[1], w[2], strict=True):
        q, k, v = ((x @ y).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for y in qkv)
        x = x + attend(rotated(q), rotated(k), v).transpose(1, 2).flatten(2) @ out
    return x


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    return scores.masked_fill(~torch.ones_like(scores).tril().bool(), -math.inf).softmax(-1) @ v


class Expected(NamedTuple):
    sequences: list[np.ndarray]
    weights: list[np.ndarray]
    cotangents: list[torch.Tensor]
    loss: torch.Tensor
    logprobs: list[torch.Tensor]
    loss_grads: tuple[torch.Tensor, ...]
    logprob_grads: tuple[torch.Tensor, ...]


@functools.cache
def expected() -> Expected:
    """Each sequence alone, in float64: the weighted mean of losses, the log-probabilities, and gradients of both."""
    sequences, rng, w = rollouts(0), np.random.default_rng(0), weights(torch.float64)
    own = [rng.random(len(ids)) for ids in sequences]
    cotangents = [torch.from_numpy(rng.standard_normal(max(len(ids) - 1, 0))) for ids in sequences]
    logprobs = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence)[None]
        logits = hidden_states(w, ids, torch.arange(len(sequence))[None], causal) @ w[3].T
        logprobs.append(logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0])
    count = sum(x[1:].sum() for x in own)
    loss = -sum((torch.from_numpy(x[1:]) * y).sum() for x, y in zip(own, logprobs, strict=True)) / count
    loss_grads = torch.autograd.grad(loss, w, retain_graph=True)
    some = [(x, c) for x, c in zip(logprobs, cotangents, strict=True) if len(x)]
    logprob_grads = torch.autograd.grad([x for x, _ in some], w, [c for _, c in some])
    detached = [x.detach() for x in logprobs]
    return Expected(sequences, own, cotangents, loss.detach(), detached, loss_grads, logprob_grads)


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "balancer", "precision"),
    covering(
        [1, 2, 3, 4], ["needed", "all_gather", "ring", "ulysses", "hierarchical"],
        ["local", "contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "auto"],
        [(torch.float64, "reference"), (torch.float32, "sdpa")],
    ),
)  # fmt: skip
def test_a_tree_is_every_sequence_alone(num_ranks: int, exchange: str, balancer: str, precision: Any) -> None:
    wanted, (dtype, kernel) = expected(), precision
    found = spanwise.tree_from_sequences(wanted.sequences)
    tree, ids = found.tree, torch.from_numpy(found.ids)
    roots = [*np.flatnonzero(tree.parents == -1).tolist(), tree.num_nodes]
    offsets = np.cumsum([0, *(tree.lengths[first:last].sum() for first, last in itertools.pairwise(roots))])
    plan = spanwise.make_plan(
        tree.mask(), num_ranks, exchange=exchange, balancer=balancer, block_size=4, num_q_heads=HEADS,
        head_dim=HEAD_DIM, cu_seqlens=offsets if balancer == "per_document_head_tail" else None,
        hardware=spanwise.H100.with_host_size(2) if exchange == "hierarchical" else None,
    )  # fmt: skip
    of_targets = torch.from_numpy(found.weights(wanted.weights)).to(dtype)

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[Any, ...]:
        w = weights(dtype)
        edges = spanwise.shard_edges(tree, plan, mesh)
        batch = spanwise.shard_batch({"input_ids": ids[None]}, plan, mesh, tree=tree)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return spanwise.context_parallel_attention(q, k, v, plan, mesh, kernel=kernel)

        hidden = hidden_states(w, batch["input_ids"], batch["position_ids"], attend)[0, edges.sources]
        labels, own = ids[edges.targets], of_targets[edges.targets]
        loss = spanwise.linear_cross_entropy(hidden, w[3], labels, loss_mesh=mesh, weights=own, chunk=5)
        same = spanwise.cross_entropy(hidden @ w[3].T, labels, mesh, weights=own)
        whole = spanwise.unshard_edges(edges, mesh, spanwise.token_logprobs(hidden, labels, vocab_weight=w[3]))
        logprobs = [whole[path[1:]] for path in found.paths]
        loss_grads = torch.autograd.grad(loss, w, retain_graph=True)
        some = [(x, c.to(dtype) / num_ranks) for x, c in zip(logprobs, wanted.cotangents, strict=True) if len(x)]
        logprob_grads = torch.autograd.grad([x for x, _ in some], w, [c for _, c in some])
        return loss.detach(), same.detach(), [x.detach() for x in logprobs], loss_grads, logprob_grads

    close = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 4e-6}

    def compare(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.testing.assert_close(x.double(), y, **close)

    results = run_ranks(num_ranks, on_rank)
    for loss, same, logprobs, *_ in results:
        compare(loss, wanted.loss)
        compare(same, wanted.loss)
        for x, y in zip(logprobs, wanted.logprobs, strict=True):
            compare(x, y)
    for i in range(4):  # averaged, as reducers do; and summed
        compare(sum(result[3][i] for result in results) / num_ranks, wanted.loss_grads[i])
        compare(sum(result[4][i] for result in results), wanted.logprob_grads[i])


def plan_of(mask: SpanMask, num_ranks: int = 1, **options: Any) -> spanwise.Plan:
    return spanwise.make_plan(mask, num_ranks, block_size=1, **options)


TREE, SHORT = TokenTree([-1, 0, 0], [3, 2, 2]), TokenTree([-1], [3])
PLAN, IDS = plan_of(TREE.mask()), torch.zeros(1, 7, dtype=torch.int64)
PACKING, NEAR = spanwise.Packing([0, 7]), TREE.mask() & SpanMask.sliding_window(7, 1)
PACKED = plan_of(PACKING.mask(), packing=PACKING)
APART = plan_of(SpanMask.stack([TREE.mask(), NEAR]), 2, balancer="lpt")
EDGES = spanwise.shard_edges(TREE, PLAN)
WRONG: list[tuple[str, Callable[[], Any]]] = [
    ("labels of a tree", lambda: spanwise.shard_batch({"labels": IDS}, PLAN, tree=TREE)),
    ("token 5 .*tree=", lambda: spanwise.shard_batch({"input_ids": IDS}, PLAN)),
    ("3 tokens, the plan 7", lambda: spanwise.shard_edges(SHORT, PLAN)),
    (r"'default' .* token 5 \(batch row 0\)", lambda: spanwise.shard_edges(TREE, plan_of(SpanMask.causal(7)))),
    ("a packing", lambda: spanwise.shard_edges(TokenTree([-1], [7]), PACKED)),
    ("RankPlan", lambda: spanwise.shard_edges(TREE, PLAN.local(None))),
    ("needs their mesh", lambda: spanwise.shard_edges(TREE, APART)),
    ("2 batch rows", lambda: run_ranks(2, lambda rank, mesh: spanwise.shard_edges(TREE, APART, mesh))),
    (r"6 edges, got \(7,\)", lambda: spanwise.unshard_edges(EDGES, None, torch.zeros(7))),
]


@pytest.mark.parametrize(("names", "call"), WRONG)
def test_wrong_calls(names: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=names):
        call()


def test_a_part_of_the_mask_and_padding_as_a_root_are_taken() -> None:
    assert len(spanwise.shard_edges(TREE, plan_of(TREE.mask() & SpanMask.sliding_window(7, 2))).sources) == 6
    padded = TokenTree.pack([TREE, TokenTree([-1], [5])])
    assert spanwise.shard_edges(padded, plan_of(padded.mask())).num_tokens == 12

"""Graphs made by hand: what may be cut and what must stop a cut, and random chains of token-wise operators."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from spanwise.overlap import _torch
from spanwise.overlap.fx.decoder import Axis
from spanwise.overlap.split.region import Region, find_regions
from spanwise.overlap.split.rewrite import rewrite
from spanwise.overlap.split.tokenwise import COLLECTIVES
from tests.lockstep import Lockstep
from tests.overlap.split.test_rewrite import error

OPS, ATEN = torch.ops._c10d_functional, torch.ops.aten
RANKS, TOKENS, DIM = 2, 12, 6
AXIS = [{"tp": Axis("tp", (0, 1), rank)} for rank in range(RANKS)]


def gather(x: torch.Tensor) -> torch.Tensor:
    return OPS.wait_tensor(OPS.all_gather_into_tensor(x, RANKS, "tp"))


def scatter(x: torch.Tensor) -> torch.Tensor:
    return OPS.wait_tensor(OPS.reduce_scatter_tensor(x, "sum", RANKS, "tp"))


def reduce(x: torch.Tensor) -> torch.Tensor:
    return OPS.wait_tensor(OPS.all_reduce(x, "sum", "tp"))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def cut(gm: fx.GraphModule, pieces: int, region: Region) -> fx.GraphModule:
    graph = _torch.copy_graph(gm.graph)
    rewrite(graph, region.by_name, region.tokens, pieces)
    graph.lint()
    for node in graph.nodes:  # torch refuses others
        assert node.target not in COLLECTIVES or node.all_input_nodes[0].meta["val"].is_contiguous()
    return fx.GraphModule(gm, graph)


def check(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], pieces: int, region: Region, most: float = 1e-12
) -> fx.GraphModule:
    """Run both graphs on all ranks; return the cut one."""
    feed = [[x + 0.1 * rank if x.is_floating_point() else x for x in inputs] for rank in range(RANKS)]
    found, expected = cut(gm, pieces, region), Lockstep([gm] * RANKS, AXIS).run(feed)
    for late in (False, True):
        assert error(Lockstep([found] * RANKS, AXIS, late=late).run(feed), expected) < most
    return found


W, V = drawn(DIM, 8, seed=1), drawn(8, DIM, seed=2)


def sequence_first(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    h = gather(F.layer_norm(x, (DIM,))) @ w
    return x + scatter((h.tanh() * 2.0) @ v), h


def batch_first(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    """As DTensor gathers it."""
    h = F.gelu(torch.cat(gather(x).chunk(RANKS, 0), 1) @ w) @ v
    return (x + scatter(torch.cat(h.chunk(RANKS, 1), 0)),)


def mixes_batches(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    h = (torch.cat(gather(x).chunk(RANKS, 0), 1) @ w).softmax(0) @ v
    return (scatter(torch.cat(h.chunk(RANKS, 1), 0)),)


def flat(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    h = torch.addmm(w.new_ones(DIM), (gather(x).flatten(0, 1) @ w).relu(), v).view(RANKS * 7, -1, DIM)
    return scatter(h), h.unflatten(-1, (2, 3)).permute(1, 2, 0, 3).contiguous()


def experts(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    h = torch.einsum("td,edh->teh", gather(x), w).relu()
    return (scatter(torch.einsum("teh,ehd->td", h, v)),)


def attention(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> Any:
    """Keys are needed whole; the mask is taken apart."""
    h = gather(x) @ w
    return (scatter(((h @ h.t() + mask).softmax(-1) @ h) @ w.t()),)


def backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    """Gradients of weights and sums over tokens read whole tensors."""
    whole = gather(grad)
    return scatter(whole @ w.t()), x.t() @ whole, whole.sum(0), whole.t() @ x


def row_parallel(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    return (x + reduce(F.relu(x @ w) @ v),)


# Functions, their inputs, and the least number of collectives after a cut in two.
CASES: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], int]] = [
    (lambda x, w: (gather(x) @ w,), (drawn(TOKENS, DIM), W), 2),
    (lambda h, v: (scatter(h @ v),), (drawn(2 * TOKENS, 8), V), 2),
    *((of, (drawn(7, batch, DIM), W, V), 3) for of in (sequence_first, flat) for batch in (1, 3)),
    *((of, (drawn(3, 7, DIM), W, V), 3) for of in (batch_first, mixes_batches)),
    *((row_parallel, (drawn(*shape, DIM), W, V), 2) for shape in ((TOKENS,), (2, TOKENS))),
    (experts, (drawn(TOKENS, DIM), drawn(3, DIM, 4), drawn(3, 4, DIM, seed=3)), 4),
    (attention, (drawn(TOKENS, DIM), W, torch.ones(2 * TOKENS, 2 * TOKENS, dtype=torch.float64).tril()), 3),
    (backward, (drawn(TOKENS, 8), drawn(2 * TOKENS, DIM, seed=3), W), 2),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_pieces_compute_the_same(case: int) -> None:
    """Every region of the function's graph in 2, 3 and 5 pieces."""
    function, inputs, least = CASES[case]
    gm, counts = traced(function, *inputs), []
    for region in find_regions(gm.graph):
        for pieces in (p for p in (2, 3, 5) if p <= region.tokens):
            found = check(gm, inputs, pieces, region)
            counts.append(len([n for n in found.graph.nodes if n.target in COLLECTIVES]))
    assert counts[0] >= least


def stopped(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    assert find_regions(traced(function, *inputs).graph) == []


def test_gathers_of_parameters_are_not_cut() -> None:
    stopped(lambda x, w: (x @ gather(w),), drawn(TOKENS, 2 * DIM), drawn(DIM, 8))
    stopped(lambda x, w: (F.linear(x, gather(w)),), drawn(TOKENS, DIM), drawn(4, DIM))
    stopped(lambda x, b, w: ((x * gather(b)).relu() @ w,), drawn(TOKENS, DIM), drawn(DIM // 2), W)
    stopped(lambda x, w: (torch.bmm(x, gather(w)),), drawn(4, TOKENS, DIM), drawn(2, DIM, 4))
    # The gradient of a weight.
    stopped(lambda g, x: (scatter(g.t() @ x),), drawn(TOKENS, 8), drawn(TOKENS, DIM))
    stopped(lambda g, x: (scatter((x.t() @ g).t().float().double()),), drawn(TOKENS, 8), drawn(TOKENS, DIM))
    stopped(lambda x, g: (scatter(torch.bmm(x.mT, g)),), drawn(4, TOKENS, DIM), drawn(4, TOKENS, 8))


def test_what_is_written_is_not_cut() -> None:
    def in_place(x: torch.Tensor, w: torch.Tensor) -> Any:
        return (gather(x).mul_(2.0) @ w,)

    def alias(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = gather(x) @ w
        h.view(-1)[0].zero_()
        return (h.sin(),)

    stopped(in_place, drawn(TOKENS, DIM), W)
    names = {n.name for region in find_regions(traced(alias, drawn(TOKENS, DIM), W).graph) for n in region.cuts}
    assert not names & {"mm", "sin"}


@pytest.mark.parametrize("drop", [F.dropout, lambda h, p: torch.native_dropout(h, p, True)[0]])
def test_random_operators_stop_a_cut(drop: Callable[..., torch.Tensor]) -> None:
    gm = traced(lambda x, w, v: (scatter(drop(gather(x) @ w, 0.5) @ v),), drawn(TOKENS, DIM), W, V)
    for region in find_regions(gm.graph):
        names = [n.name for n in region.cuts] + [n.name for n in cut(gm, 2, region).graph.nodes if "piece" in n.name]
        assert not any(word in name for name in names for word in ("dropout", "bernoulli", "rand"))


def test_operators_of_torch_export() -> None:
    """Composite operators, as graphs have them that were not decomposed."""

    def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> Any:
        h = gather(F.rms_norm(F.layer_norm(x, (DIM,)), (DIM,)))
        q = F.linear(h, w.t(), b).unflatten(-1, (2, 4)).softmax(-1).permute(1, 0, 2).unsqueeze(0)
        o = F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(0).permute(1, 0, 2).flatten(1)
        a, c = (F.gelu(o) + 1).chunk(2, -1)
        o = torch.cat([a * c.contiguous(), c.log_softmax(-1)], -1).to(torch.float32).to(torch.float64)
        return (x + scatter(o @ v),)

    inputs = drawn(7, DIM), W, V, drawn(8, seed=6)
    gm = make_fx(block, tracing_mode="fake", pre_dispatch=True)(*inputs)
    (region,) = find_regions(gm.graph)
    assert len(region.collectives) == 2 and len(region.cuts) > 15
    for pieces in (2, 3):
        check(gm, inputs, pieces, region, most=1e-6)  # products of other sizes, rounded to float32


POINTWISE: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda h, side: F.silu(h) * side,
    lambda h, side: h + side[:, :1],
    lambda h, side: F.layer_norm(h, (h.shape[-1],)),
    lambda h, side: h * h.square().mean(-1, keepdim=True).add(1e-5).rsqrt(),
    lambda h, side: torch.cat([h[:, 4:], -h[:, :4]], -1),
    lambda h, side: h.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8),
    lambda h, side: h.softmax(-1),
    lambda h, side: h.split(4, -1)[1].repeat_interleave(2, -1),
    lambda h, side: (h.clone() @ side[:8].t()) @ side[:8],
    lambda h, side: h.cumsum(0) * 0.1,
    lambda h, side: h - h.sum(0, keepdim=True) * 0.01,
]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(4, 13), st.integers(2, 4))
def test_random_chains(seed: int, length: int, tokens: int, pieces: int) -> None:
    random_ = random.Random(seed)
    chain = [random_.choice(POINTWISE) for _ in range(length)]
    keep = random_.randrange(length)

    def function(x: torch.Tensor, side: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        h, saved = gather(F.relu(x)) @ w, []
        for at, operator in enumerate(chain):
            h = operator(h, side)
            if at == keep:
                saved.append(h)
        return (x + scatter(h @ v), *saved)

    inputs = drawn(tokens, DIM), drawn(2 * tokens, 8, seed=5), W, V
    gm = traced(function, *inputs)
    for region in find_regions(gm.graph):
        check(gm, inputs, min(pieces, region.tokens), region, most=1e-10)

"""Sums over tokens, such as gradients of weights, are added over pieces in the order of the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.nn import functional as F

from spanwise import overlap
from spanwise.overlap import _torch
from spanwise.overlap.costs.roofline import node_flops
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import STARTS, storage_of, tensors_of
from spanwise.overlap.split.choose import apply, cut_graphs
from spanwise.overlap.split.region import Region, chosen, find_regions
from spanwise.overlap.split.values import Values
from tests.lockstep import Lockstep
from tests.overlap.split.test_graphs import ATEN, AXIS, DIM, RANKS, TOKENS, W, drawn, gather, scatter, traced
from tests.overlap.split.test_rewrite import error


def in_pieces(gm: fx.GraphModule, pieces: int) -> fx.GraphModule:
    """`gm` with all that can be cut of its largest region, sums among it."""
    graph, region = fx.Graph(), find_regions(gm.graph)[0]
    graph.output(graph.graph_copy(gm.graph, {}))
    cuts = {n.name: cut for n, cut in chosen(region, frozenset((*region.segments, *region.sums))).items()}
    apply(graph, cuts, region.tokens, pieces)
    graph.lint()
    return fx.GraphModule(gm, graph)


def same_in_pieces(gm: fx.GraphModule, inputs: tuple[torch.Tensor, ...], pieces: int) -> fx.GraphModule:
    feed = [[x + 0.1 * rank for x in inputs] for rank in range(RANKS)]
    expected = Lockstep([gm] * RANKS, AXIS).run([[x.clone() for x in xs] for xs in feed])
    found = in_pieces(gm, pieces)
    for late in (False, True):
        got = Lockstep([found] * RANKS, AXIS, late=late).run([[x.clone() for x in xs] for xs in feed])
        assert error(got, expected) < 1e-12
    return found


def sums(region: Region) -> list[str]:
    return sorted(str(next(iter(of)).target) for kind in region.sums.values() for of in kind)


def backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, lone: torch.Tensor) -> Any:
    """Gradients of rows, of two weights (one by a gather that nothing else reads), of a bias and of a norm's weight."""
    whole = gather(grad)
    by_norm = (whole * x[:, :1]).sum([0], True)
    return scatter(whole @ w.t()), x.t() @ whole, whole.t() @ gather(lone), whole.sum(0), by_norm


GIVEN = drawn(TOKENS, 8), drawn(2 * TOKENS, DIM, seed=3), W, drawn(TOKENS, DIM, seed=5)


@pytest.mark.parametrize("pieces", [2, 5, TOKENS])
def test_sums_over_pieces(pieces: int) -> None:
    gm = traced(backward, *GIVEN)
    (region,) = find_regions(gm.graph)
    assert sums(region) == ["aten.mm.default"] * 2 + ["aten.sum.dim_IntList"] * 2
    found = same_in_pieces(gm, GIVEN, pieces)
    nodes = list(found.graph.nodes)
    assert sum(n.target in STARTS for n in nodes) == 3 * pieces
    assert sum(n.target == ATEN.mm.default for n in nodes) == 3 * pieces
    assert sum(n.target == ATEN.add.Tensor for n in nodes) == 4 * (pieces - 1)
    assert [n.target for n in nodes].count(ATEN.cat.default) == 1  # the result of the reduce-scatter


def test_the_first_piece_is_added_first() -> None:
    found = same_in_pieces(traced(backward, *GIVEN), GIVEN, 3)
    products = [n for n in found.graph.nodes if n.name.startswith("mm_1_piece") and n.target == ATEN.mm.default]
    first = next(iter(products[0].users))
    assert first.args == tuple(products[:2])
    assert next(iter(first.users)).args == (first, products[2])


def test_what_is_no_gradient_of_a_weight_is_no_sum() -> None:
    """Parameters' gathers, products with another left side, written operands, random ones, sums of other dims."""

    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, written: torch.Tensor) -> Any:
        whole = gather(x) @ w
        written.add_(1.0)
        dropped = F.dropout(whole, 0.5)
        kept = whole.sum(1), whole.sum(), written.t() @ written, dropped.t() @ dropped
        return scatter(whole @ w.t()), gather(v) @ whole, *kept

    gm = traced(step, drawn(TOKENS, DIM), W, drawn(3, 2 * TOKENS), drawn(2 * TOKENS, 4))
    assert sums(find_regions(gm.graph)[0]) == []
    gm = traced(lambda x, v, w: (x @ gather(w), scatter(F.relu(x) @ v)), drawn(TOKENS, 2 * DIM), drawn(2 * DIM, 6), W)
    assert not any(region.sums for region in find_regions(gm.graph))


def test_weights_used_twice_results_and_views_of_sums() -> None:
    def twice(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, written: torch.Tensor) -> Any:
        whole = gather(grad)
        first, second = whole.t() @ x, (2 * whole).t() @ x.sin()
        written.add_(first.sum())
        return scatter(whole @ w.t()), first, first.t(), (first + second).view(-1), second @ w, written

    inputs = *GIVEN[:3], drawn(8, DIM, seed=7)
    found = same_in_pieces(traced(twice, *inputs), inputs, 3)
    assert sum(n.target == ATEN.mm.default and "piece" in n.name for n in found.graph.nodes) == 9


def test_low_precision_is_added_in_float32() -> None:
    """Products of bfloat16 with results in float32 are CUDA's; elsewhere these gradients stay whole."""

    def step(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        whole = gather(grad)
        return scatter(whole @ w.t()), x.t() @ whole, whole.sum(0)

    low = tuple(x.bfloat16() for x in (drawn(64, 8), drawn(128, DIM, seed=3), W))
    gm = traced(step, *low)
    assert sums(find_regions(gm.graph)[0]) == ["aten.sum.dim_IntList"]
    exact = Lockstep([traced(step, *(x.double() for x in low))] * RANKS, AXIS).run([[x.double() for x in low]] * 2)
    whole, cut = (Lockstep([m] * RANKS, AXIS).run([low] * RANKS)[0][2] for m in (gm, in_pieces(gm, 8)))
    assert cut.dtype == torch.bfloat16
    assert (cut.double() - exact[0][2]).norm() <= 1.5 * (whole.double() - exact[0][2]).norm()

    on_gpu = traced(step, *(x.to("meta") for x in low))
    for node in on_gpu.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    nodes = list(in_pieces(on_gpu, 4).graph.nodes)
    products = [n for n in nodes if n.target == ATEN.mm.dtype]
    assert len(products) == 4 and all(n.meta["val"].dtype == torch.float32 for n in products)
    gradient = nodes[-1].all_input_nodes[1]
    assert gradient.meta["val"].dtype == torch.bfloat16 and node_flops(products[0]) > 0


def by_size(node: fx.Node) -> float:
    if node.target in STARTS:
        return 1e-2 * sum(t.numel() for t in tensors_of(node))
    return 1e-3 * node_flops(node) + 1e-6 * sum(t.numel() for t in tensors_of(node))


by_size.half_rate = 0  # type: ignore[attr-defined]


def test_sums_are_cut_where_that_gains_and_whole_where_additions_cost_more() -> None:
    def step(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        whole = gather(grad)
        return whole @ w.t(), x.t() @ whole

    gm = traced(step, *GIVEN[:3])
    found = overlap.optimize(gm, by_size, split=True, bucket=False).split
    assert found is not None and found.sums == 1 and found.is_cut

    def dear(node: fx.Node) -> float:
        return 1.0 if node.target == ATEN.add.Tensor else by_size(node)

    dear.half_rate = 0  # type: ignore[attr-defined]
    found = overlap.optimize(gm, dear, split=True, bucket=False).split
    assert found is not None and found.sums == 0 and found.is_cut


def test_cut_graphs_have_all_that_can_be_cut() -> None:
    gm = traced(backward, *GIVEN)
    products = [sum(n.target == ATEN.mm.default for n in cut.graph.nodes) for cut in cut_graphs(gm, (2, 4))]
    assert products == [4, 6, 6, 12]


def test_values_are_shared_between_graphs_but_not_in_one() -> None:
    """Two equal calls have two results; a second copy of the graph has the values of the first, and its memory."""

    def alike(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = gather(x) @ w
        return h.sin(), h.sin(), scatter(h @ w.t())

    gm = traced(alike, drawn(TOKENS, DIM), W)
    (region,) = find_regions(gm.graph)
    cuts = {n.name: cut for n, cut in chosen(region, frozenset(region.segments)).items()}
    values, dags, results = Values(), [], []
    for shared in (values, values, None):
        module = _torch.copy_module(gm)
        apply(module.graph, cuts, region.tokens, 2, shared)
        dag = to_dag(module, lambda node: 1.0).dag
        dags.append((dag.nodes, dag.storages))
        results.append([n.meta["val"] for n in module.graph.nodes if n.target == ATEN.sin.default])
    assert dags[0] == dags[1] == dags[2]
    assert len({storage_of(x) for x in results[0]}) == 4
    assert all(x is y for x, y in zip(*results[:2], strict=True))


LEFT = [
    lambda h, side: h.t() @ side,
    lambda h, side: (h * side[:, :1]).t() @ h.tanh(),
    lambda h, side: side.t() @ h,
    lambda h, side: h.sum(0),
    lambda h, side: h.view(-1, 2, 4).sum([0, 1]),
    lambda h, side: (h.view(RANKS, -1, 8) * 2.0).sum([0, 1], True),
    lambda h, side: h.permute(1, 0) @ gather(side[: side.shape[0] // RANKS].clone()),
    lambda h, side: h.cumsum(0).t() @ h,
]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(LEFT), min_size=1, max_size=4), st.integers(2, 9), st.integers(2, 9))
def test_random_sums(chain: list[Any], tokens: int, pieces: int) -> None:
    def function(x: torch.Tensor, side: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        h = gather(x) @ w
        return (x + scatter(h @ v), *(operator(h, side) for operator in chain))

    inputs = drawn(tokens, DIM), drawn(2 * tokens, 8, seed=5), W, drawn(8, DIM, seed=2)
    same_in_pieces(traced(function, *inputs), inputs, min(pieces, tokens))


def test_collectives_start_and_end_beside_compute() -> None:
    """The reduce-scatter of looked-up rows, and the gather of their gradients after the last norm."""

    def embed(indices: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> Any:
        x = scatter(F.embedding(indices, table))
        return (gather(F.layer_norm(x, (DIM,))) @ w,)

    def embed_backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        return (gather(F.layer_norm(x + scatter(grad @ w.t()), (DIM,))).sin(),)

    indices = torch.arange(2 * TOKENS) % 5
    for gm in (
        traced(embed, indices, drawn(5, DIM), W),
        traced(embed_backward, drawn(2 * TOKENS, 8), drawn(TOKENS, DIM), W),
    ):
        found = in_pieces(gm, 3)
        assert sum(n.target in STARTS for n in found.graph.nodes) == 6

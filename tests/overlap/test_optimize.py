"""The optimized graph computes what the given one does, and the given one is left as it is; passes and graph files."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from spanwise import H100, overlap
from spanwise.overlap import _torch
from spanwise.overlap.dag import GraphError
from spanwise.overlap.fx.files import load_graphs, save_graphs
from spanwise.overlap.fx.graph import to_dag
from tests.lockstep import Lockstep
from tests.overlap.programs import (
    SMALL,
    Cost,
    Program,
    graphs_on,
    model_cost,
    one,
    programs,
    run,
    same,
    step,
    traced,
)  # fmt: skip

OPS, ATEN = torch.ops._c10d_functional, torch.ops.aten


def state(gm: fx.GraphModule) -> Any:
    """All of a graph that a pass could have changed."""
    nodes = [(n, n.name, n.op, n.target, n.args, dict(n.kwargs), dict(n.meta), list(n.users)) for n in gm.graph.nodes]
    return nodes, gm.code, dict(gm.meta), list(gm.__dict__)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_all_ranks_graphs_give_the_same_bits(which: str) -> None:
    graphs = [graphs_on(rank) for rank in range(SMALL.num_ranks)]
    results = [overlap.optimize(getattr(g, which), model_cost(g), effort=2) for g in graphs]
    feed, expected = step(graphs)[which]
    for late in (False, True):
        # Nodes have the same names on all ranks, in the same order: Lockstep sees to it.
        found = Lockstep([result.graph_module for result in results], [g.axes for g in graphs], late=late).run(feed)
        for of_rank, of_expected in zip(found, expected, strict=True):
            same(of_rank, of_expected)
    assert all(len(r.timeline.dag.starts) < len(r.before.dag.starts) for r in results)
    assert len({tuple(result.timeline.order.tolist()) for result in results}) == 1


def test_the_new_graph_is_what_the_timeline_says_and_the_given_one_is_left() -> None:
    graphs = graphs_on(0, dataclasses.replace(SMALL, device="cuda"))
    for gm in (graphs.forward, graphs.backward):
        before, cost = state(gm), model_cost(graphs)
        result = overlap.optimize(gm, cost)
        assert state(gm) == before
        new = result.graph_module
        assert isinstance(new, fx.GraphModule) and new is not gm and type(new).__name__ == type(gm).__name__
        assert result.before.makespan == overlap.simulate(gm, cost).makespan
        again = overlap.simulate(new, cost)
        assert math.isclose(again.makespan, result.timeline.makespan)
        assert again.peak_bytes == result.timeline.peak_bytes <= result.budget
        assert overlap.lower_bound(new, cost) == pytest.approx(result.bounds.makespan)
        assert result.bounds.makespan * (1 - 1e-9) <= result.timeline.makespan < result.before.makespan
        assert sorted(i for members in result.members for i in members) == list(range(len(result.before.dag)))
        twice = overlap.optimize(new, cost)
        assert twice.timeline.makespan <= result.timeline.makespan * (1 + 1e-9)
        assert len(twice.timeline.dag.starts) <= len(result.timeline.dag.starts)
        kept = {n.name: n.meta for n in new.graph.nodes}
        assert all(kept[n.name] == n.meta for n in gm.graph.nodes if n.name in kept)  # not a start in a bucket
        assert all("val" in node.meta for node in new.graph.nodes if node.op.startswith("call_"))
        inputs, others = ([n.name for n in of.graph.find_nodes(op="placeholder")] for of in (gm, new))
        assert inputs == others


def gathered(x: torch.Tensor) -> Any:
    """A gather with compute that does not need it after its wait."""
    whole = OPS.wait_tensor(OPS.all_gather_into_tensor(x, 2, "tp"))
    return whole.sum(), x.sin(), x.cos().cos()


def test_barriers_and_guesses_are_named() -> None:
    @torch.library.custom_op("spanwise_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    def function(x: torch.Tensor) -> Any:
        summed = torch.ops.symm_mem.one_shot_all_reduce(x.sin(), "sum", "tp")
        return torch.ops.spanwise_test.twice(summed), OPS.wait_tensor(x), torch.ops.spanwise_test.twice(x)

    cost = overlap.CostModel(H100, ranks={"tp": (0, 1)})
    result = overlap.optimize(make_fx(function, tracing_mode="fake")(torch.ones(4, 4)), cost)
    assert result.barriers == ("symm_mem.one_shot_all_reduce",)
    assert sorted(set(result.guesses)) == [
        "_c10d_functional.wait_tensor", "spanwise_test.twice", "symm_mem.one_shot_all_reduce"
    ]  # fmt: skip
    plain = overlap.optimize(make_fx(gathered, tracing_mode="fake")(torch.ones(4, 4)), cost)
    assert plain.barriers == plain.guesses == ()


def test_sizes_stand_for_symbols() -> None:
    """The order is that of the graph of these sizes; the new graph keeps its symbols."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        start = OPS.all_gather_into_tensor(x, 2, "tp")
        first, second = y @ y.t(), OPS.wait_tensor(start)
        return first, second @ x.t()

    gm = make_fx(function, tracing_mode="symbolic")(torch.ones(6, 4), torch.ones(10, 4))
    cost = overlap.CostModel(H100, ranks={"tp": (0, 1)})
    symbols = sorted({str(size) for x in gm.graph.find_nodes(op="placeholder") for size in x.meta["val"].shape})
    numeric = overlap.optimize(
        make_fx(function, tracing_mode="fake")(torch.ones(4096, 4096), torch.ones(4096, 4096)), cost
    )
    for sizes in (dict.fromkeys(symbols, 4096), 4096):
        result = overlap.optimize(gm, cost, sizes=sizes)
        assert result.timeline.makespan == numeric.timeline.makespan > 0
        assert result.report() == numeric.report() and result.sizes == sizes
        for module in (gm, result.graph_module):
            shown = {str(node.meta["val"].shape[0]) for node in module.graph.find_nodes(op="placeholder")}
            assert shown <= set(symbols)
    for wrong in (dict.fromkeys(symbols[:-1], 4096), dict.fromkeys(symbols, 0), 2.5, True):
        with pytest.raises(ValueError, match="sizes"):
            overlap.optimize(gm, cost, sizes=wrong)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="is symbolic; give numbers"):
        overlap.optimize(gm, cost)


def test_what_no_graph_allows_is_refused() -> None:
    gm = make_fx(gathered, tracing_mode="fake")(torch.ones(4, 4))
    peak = overlap.simulate(gm, Cost()).peak_bytes
    assert overlap.optimize(gm, Cost(), memory_budget=peak).timeline.peak_bytes <= peak
    before = state(gm)
    wrong: list[tuple[str, Any]] = [(name, x) for name in ("memory_budget", "effort") for x in (math.nan, 2**63, True)]
    wrong += [("multiplier", 0), ("multiplier", "2"), ("effort", 1.5), ("bucket", "no"), ("split", "no")]
    for name, value in (*wrong, ("memory_budget", 16)):
        with pytest.raises(ValueError, match=f"{name} must be|takes 16 bytes at its peak"):
            overlap.optimize(gm, Cost(), **{name: value})
    as_pass = functools.partial(overlap.graph_pass, cost=Cost())
    for function in (overlap.optimize, overlap.simulate, overlap.lower_bound, lambda gm, cost: as_pass()(gm, ())):
        with pytest.raises(TypeError, match=r"an fx\.GraphModule of ATen operators, got"):
            function(gathered, Cost())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'budget'"):
        as_pass(budget=3)
    for options in ({"sizes": 0}, {"effort": 1.5}):
        with pytest.raises(ValueError, match=f"got {next(iter(options.values()))}"):
            as_pass(**options)
    assert state(gm) == before


def priced(seed: int) -> Callable[[fx.Node], float]:
    """Random milliseconds by the names of nodes."""
    return lambda node: random.Random(f"{seed} {node.name}").choice([0.0, 0.5, 1.0, 3.0, 10.0])


@settings(deadline=None, max_examples=40)
@given(programs(), st.integers(0, 9), st.booleans(), st.sampled_from([0.5, 1.0, 2.0]))
def test_random_graphs_give_the_same_bits_on_all_ranks(
    program: Program, seed: int, tight: bool, multiplier: float
) -> None:
    """Random operators, writes in place, views, collectives over two groups."""
    gm, inputs = traced(program)
    before, expected = state(gm), run(gm, inputs)
    peak = overlap.simulate(gm, priced(seed)).peak_bytes
    result = overlap.optimize(gm, priced(seed), memory_budget=peak if tight else None, multiplier=multiplier)
    assert state(gm) == before
    assert result.timeline.makespan <= result.before.makespan
    assert result.timeline.peak_bytes <= result.budget and (result.budget == peak or not tight)
    module = result.graph_module
    module.graph.lint()
    assert to_dag(module, one).dag.peak_bytes() == result.timeline.peak_bytes
    for late in (False, True):
        same(run(module, inputs, late=late), expected)


def test_buckets_are_priced_by_the_cost() -> None:
    gm, model = graphs_on(0).backward, model_cost(graphs_on(0))
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    table = {node.name: model(node) for node in nodes}
    for cost, price in ((model, model.merged), (table, lambda members: sum(table[node.name] for node in members))):
        result, plain = (overlap.optimize(gm, cost, bucket=bucket).timeline for bucket in (True, False))
        members = overlap.optimize(gm, cost).members
        for start in result.dag.starts:
            assert result.dag.nodes[start].ms == pytest.approx(price([nodes[i] for i in members[start]]))
        assert result.makespan <= plain.makespan * (1 + 1e-9)
        assert cost is not model or len(result.dag.starts) < len(plain.dag.starts)


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shards = torch.nn.ParameterList(torch.randn(2, 4) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, bias: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        for shard in self.shards:
            x = x @ OPS.wait_tensor(OPS.all_gather_into_tensor(shard, 2, "dp"))
        return {"out": x + bias["b"], "calls": self.calls * 2}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export's own
def test_programs_of_torch_export() -> None:
    program = torch.export.export(Tower(), (torch.randn(3, 4),), {"bias": {"b": torch.randn(4)}}).run_decompositions()
    flat = program.graph_module
    nested = program.module()  # takes and returns what the module does
    with pytest.raises(GraphError, match="'copy__default'"):
        overlap.optimize(nested, priced(0))
    FakeTensorProp(nested, _torch.fake_mode()).propagate(torch.randn(3, 4), torch.randn(4))
    for gm in (flat, nested):
        result = overlap.optimize(gm, priced(0))
        module = result.graph_module
        module.graph.lint()
        assert result.timeline.makespan < result.before.makespan and module.meta == gm.meta
        assert module.graph.python_code("self").src.count("all_gather")
        kept = [[n.name for n in of.graph.nodes if n.op in ("placeholder", "output")] for of in (module, gm)]
        assert kept[0] == kept[1]
    values = [n.meta["val"] for n in flat.graph.nodes if n.op == "placeholder"]
    inputs = [[torch.randn(v.shape) + r for v in values] for r in range(4)]
    same(run(overlap.optimize(flat, priced(0)).graph_module, inputs), run(flat, inputs))


def test_a_pass_returns_a_scheduled_copy() -> None:
    gm, results = graphs_on(0).backward, list[overlap.Result]()
    before, gm.meta["of"] = gm.code, "mine"
    apply = overlap.graph_pass(cost=Cost(), bucket=False, on_result=results.append)
    new = apply(gm, ())
    names, others = ([node.name for node in of.graph.nodes] for of in (gm, new))
    assert gm.code == before and new.meta["of"] == "mine" and sorted(others) == sorted(names) != others != names
    (result,) = results
    assert overlap.simulate(new, Cost()).makespan == result.timeline.makespan < 0.9 * result.before.makespan
    assert result.sizes is None and result.barriers == ()  # no size is symbolic
    assert apply(new, None).code == new.code  # its own order is as good as any; values are in the graph


def test_unknown_operators_and_files_that_hold_no_graphs(tmp_path: Path) -> None:
    path, library = tmp_path / "g", torch.library.Library("spanwise_test_elsewhere", "DEF")
    library.define("double(Tensor x) -> Tensor")
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.spanwise_test_elsewhere.double.default, (graph.placeholder("x"),)))
    save_graphs(path, {"one": torch.fx.GraphModule({}, graph)})
    library._destroy()
    with pytest.raises(ValueError, match="spanwise_test_elsewhere.*'double'.*import the modules"):
        load_graphs(path)
    save_graphs(path, {"one": torch.fx.symbolic_trace(torch.nn.ReLU())})
    data = path.read_bytes()
    torch.save({"a": torch.ones(3)}, path)
    for content in (path.read_bytes(), b"hello", b"PK and so on", data[:-10], data[:500] + bytes(100) + data[600:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="holds no graphs"):
            load_graphs(path)

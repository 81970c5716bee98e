"""`graph_pass`: what it returns, refuses and fills in; what of a whole step is no barrier."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from spanwise import overlap
from spanwise.overlap import _torch
from spanwise.overlap.costs.roofline import node_flops
from spanwise.overlap.fx import operators
from spanwise.overlap.fx.operators import operator_name

ATEN, OPS = torch.ops.aten, _torch.functional_collectives
RANKS = 2


def costs(node: fx.Node) -> float:
    if node.target in operators.STARTS:
        return 0.6
    return 1.0 if node_flops(node) else 0.01


def gather(x: torch.Tensor, group: str = "dp") -> torch.Tensor:
    return OPS.wait_tensor(OPS.all_gather_into_tensor(x, RANKS, group))


def reduce_scatter(x: torch.Tensor, group: str = "dp") -> torch.Tensor:
    return OPS.wait_tensor(OPS.reduce_scatter_tensor(x, "sum", RANKS, group))


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(grad.contiguous())


def loss(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    for shard in shards:
        x = F.silu(x @ Gathered.apply(shard).t())
    return x.square().mean()


def step(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """Forward, backward, and an update in place that torch's optimizers mark for the profiler."""
    given = [shard.detach().requires_grad_() for shard in shards]
    value = loss(x, given)
    grads = torch.autograd.grad(value, given)
    with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
        for shard, grad in zip(shards, grads, strict=True):
            shard.sub_(grad * 0.1)
    return value.detach()


def inputs(layers: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.ones(8, 16), [torch.ones(16 // RANKS, 16) / 16 for _ in range(layers)]


def traced(function: Any = step, *args: Any, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*(args or inputs()))


def names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


@pytest.fixture
def results() -> Iterator[list[overlap.Result]]:
    yield []


def test_a_pass_returns_a_scheduled_copy(results: list[overlap.Result]) -> None:
    gm = traced()
    gm.meta["of"] = "mine"
    before = gm.code
    apply = overlap.graph_pass(cost=costs, bucket=False, on_result=results.append)
    new = apply(gm, inputs())
    assert gm.code == before and new is not gm and new.meta["of"] == "mine"
    assert sorted(names(new)) == sorted(names(gm)) and names(new) != names(gm)
    own, found = overlap.simulate(gm, costs), overlap.simulate(new, costs)
    (result,) = results
    assert found.makespan == result.timeline.makespan < 0.8 * own.makespan
    assert result.sizes is None  # no size is symbolic
    assert apply(new, inputs()).code == new.code  # its own order is as good as any
    assert apply.__name__ == "spanwise_overlap_pass"  # pipelines know passes by name


def test_a_graph_without_collectives_is_returned_as_it_is(results: list[overlap.Result]) -> None:
    gm = traced(lambda x, shards: [x @ shard.t() for shard in shards])
    del next(node for node in gm.graph.nodes if node.op == "call_function").meta["val"]  # nothing is asked of it
    assert overlap.graph_pass(cost=costs, on_result=results.append)(gm, inputs()) is gm and not results


def test_the_optimizer_is_no_barrier(results: list[overlap.Result]) -> None:
    """Reductions travel while parameters are updated, across the marks of `record_function`, which stay in order."""
    gm = traced()
    new = overlap.graph_pass(cost=costs, bucket=False, on_result=results.append)(gm, inputs())
    assert results[0].doubts.barriers == ()

    def marks(of: fx.GraphModule) -> list[str]:
        return [node.name for node in of.graph.nodes if "record_function" in node.name]

    assert marks(new) == marks(gm) and len(marks(gm)) == 4
    order = [operator_name(node) for node in new.graph.nodes]
    first = order.index("aten.sub_")
    assert "_c10d_functional.wait_tensor" in order[first:]
    waits = [operator_name(node) for node in gm.graph.nodes]
    assert "_c10d_functional.wait_tensor" not in waits[waits.index("aten.sub_") :]


def test_a_shard_is_written_after_the_last_read_of_it() -> None:
    """A gather of old parameters that no gradient needs, and that takes longer than all else."""

    def watched(x: torch.Tensor, shards: list[torch.Tensor]) -> Any:
        old = gather(shards[0])
        for shard in shards:
            shard.sub_(x.sum() * 0.1)
        return old.sum(), gather(shards[0]), [x @ x.t() for _ in range(3)]

    gm = traced(watched)
    new = overlap.graph_pass(cost=lambda node: 9.0 if node.name == "all_gather_into_tensor" else 0.1)(gm, inputs())
    order = names(new)
    assert order.index("wait_tensor") < order.index("sub_") < order.index("all_gather_into_tensor_1")
    assert order.index("mm") < order.index("wait_tensor")


def test_gradients_that_nobody_asked_for_need_no_value(results: list[overlap.Result]) -> None:
    """The first convolution's input has none: an item that is None, to which tracing gives no value."""

    def function(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        kernel = gather(shard).requires_grad_()
        (grad,) = torch.autograd.grad(F.conv2d(x, kernel).square().sum(), kernel)
        return reduce_scatter(grad)

    gm = make_fx(function, tracing_mode="fake")(torch.ones(2, 4, 8, 8), torch.ones(2, 4, 3, 3))
    (back,) = gm.graph.find_nodes(op="call_function", target=ATEN.convolution_backward.default)
    nothing = next(node for node in back.users if node.args[1] == 0)
    assert "val" not in nothing.meta and back.meta["val"][0] is None
    overlap.graph_pass(cost=costs, on_result=results.append)(gm, ())
    assert len(results[0].timeline.dag.starts) == 2


# Values that are missing.


def without_values(gm: fx.GraphModule) -> fx.GraphModule:
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
        node.meta.pop("tensor_meta", None)
    return gm


@pytest.mark.parametrize("fake", [False, True])
def test_values_are_made_from_example_inputs(fake: bool, results: list[overlap.Result]) -> None:
    expected = overlap.optimize(traced(), costs)
    x, shards = inputs()
    if fake:
        mode = _torch.fake_mode()
        x, shards = _torch.to_fake(mode, x), [_torch.to_fake(mode, s) for s in shards]
    apply = overlap.graph_pass(cost=costs, on_result=results.append)
    gm = without_values(traced())
    for given in ((x, shards), [x, *shards]):  # as the graph is called, and flat
        new = apply(gm, given)
        assert names(new) == names(expected.graph_module)
        assert results[-1].timeline.peak_bytes == expected.timeline.peak_bytes
    assert all("val" not in node.meta for node in gm.graph.nodes)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # of torch's own pickling
def test_a_loaded_graph_takes_the_inputs_of_its_function(results: list[overlap.Result]) -> None:
    """Pickled, a graph loses its values, and its flat inputs become lists again."""
    gm = pickle.loads(pickle.dumps(traced()))
    assert len(gm.graph.find_nodes(op="placeholder")) == 2
    new = overlap.graph_pass(cost=costs, on_result=results.append)(gm, inputs())
    expected = overlap.optimize(traced(), costs)
    assert results[0].timeline.makespan == expected.timeline.makespan
    assert results[0].timeline.peak_bytes == expected.timeline.peak_bytes
    assert [operator_name(node) for node in new.graph.nodes].count("aten.sub_") == 3
    assert not any("val" in node.meta for node in gm.graph.nodes)


def test_values_that_cannot_be_made_are_errors() -> None:
    x, shards = inputs()
    apply, gm = overlap.graph_pass(cost=costs), without_values(traced())
    with pytest.raises(overlap.GraphError, match=r'no meta\["val"\].*give the inputs to overlap.graph_pass'):
        apply(gm)
    with pytest.raises(ValueError, match="the graph has 4 inputs, and example_inputs has 3"):
        apply(gm, [x, *shards[:2]])
    with pytest.raises(ValueError, match=r"does not run on fake tensors of example_inputs \[\(2, 2\), .*RuntimeError"):
        apply(gm, [torch.ones(2, 2), *shards])


# What is refused.


def test_wrong_options_and_things_that_are_no_graphs_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'budget'"):
        overlap.graph_pass(cost=costs, budget=3)
    with pytest.raises(ValueError, match="sizes must be whole numbers of at least 1.*, got 0"):
        overlap.graph_pass(cost=costs, sizes=0)
    with pytest.raises(ValueError, match="effort must be a whole number, got 1.5"):
        overlap.graph_pass(cost=costs, effort=1.5)
    overlap.graph_pass(cost=costs)(traced(), None)  # values are there
    for other in (torch.nn.Linear(2, 2), step, None):
        with pytest.raises(TypeError, match=r"takes an fx\.GraphModule of ATen operators, got"):
            overlap.graph_pass(cost=costs)(other, ())  # type: ignore[arg-type]


def test_unknown_operators_are_barriers_with_names(results: list[overlap.Result]) -> None:
    """DeepCompile's gathers, which share state, and functions of Python."""
    library = torch.library.Library("dc", "DEF")
    try:
        library.define("allgather_param(Tensor a, int graph_id, int id) -> Tensor")
        library.impl("allgather_param", lambda a, graph_id, id: a * 1, "CompositeExplicitAutograd")

        def mystery(x: torch.Tensor) -> torch.Tensor:
            return x

        gm = traced(lambda x, shards: [torch.ops.dc.allgather_param(x, 0, 1), loss(x, shards), x.sin()])
        with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.target is ATEN.sin.default)) as _:
            x = next(iter(gm.graph.nodes))
            node = gm.graph.call_function(mystery, (x,))
            node.meta["val"] = x.meta["val"]
        overlap.graph_pass(cost=costs, on_result=results.append)(gm, inputs())
    finally:
        library._destroy()
    assert results[0].doubts.barriers == ("dc.allgather_param", "mystery")
    assert "mystery" in results[0].report()


# Other graphs.


def test_sizes_may_be_open(results: list[overlap.Result]) -> None:
    gm = traced(step, *inputs(), mode="symbolic")
    apply = overlap.graph_pass(cost=costs, on_result=results.append, bucket=False)
    new = apply(gm, inputs())
    assert sorted(names(new)) == sorted(names(gm))
    values = [node.meta["val"] for node in new.graph.nodes if node.op == "placeholder"]
    assert any(isinstance(size, torch.SymInt) for value in values for size in value.shape)
    assert results[0].sizes == 4096
    with pytest.raises(overlap.GraphError, match="is symbolic; give numbers"):
        overlap.graph_pass(cost=costs, sizes=None)(gm, inputs())


def test_fake_ranks_do_not_compare() -> None:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=_torch.fake_store())
    try:
        group = _torch.group_name(dist.new_group([0, 1]))
        gm = traced(lambda x, shards: [x @ gather(shard, group).t() for shard in shards])
        new = overlap.graph_pass(cost=costs)(gm, inputs())
        assert not new.graph.find_nodes(op="call_function", target=torch.ops.spanwise.agree.default)
        assert len(new(*inputs())) == 3
    finally:
        dist.destroy_process_group()

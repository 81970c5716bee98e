"""FLOPs of operators that are defined by others: those of the program that they decompose into."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import ExportedProgram, default_decompositions, export
from torch.utils.flop_counter import FlopCounterMode

from spanwise.hardware import H100
from spanwise.overlap import _torch
from spanwise.overlap.costs.flops import is_attention, is_attention_backward, node_flops
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.explain.report import arithmetic
from spanwise.overlap.fx.sizes import assumed

pytestmark = pytest.mark.filterwarnings(r"ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's, in export

ATEN = torch.ops.aten
SDPA = F.scaled_dot_product_attention


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def exported(function: Callable[..., Any], *shapes: tuple[int, ...]) -> ExportedProgram:
    return export(Calls(function), tuple(map(torch.randn, shapes)), strict=False)


def decomposed(program: ExportedProgram) -> fx.GraphModule:
    """Decompose everything except attention; torch would make plain products of that, without the mask."""
    table = default_decompositions()
    table.pop(ATEN._scaled_dot_product_flash_attention_for_cpu.default)
    return program.run_decompositions(table).graph_module


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def total(gm: fx.GraphModule) -> float:
    return sum(map(node_flops, calls(gm)))


def node(op: Any, *args: Any, val: Any = None) -> fx.Node:
    """The call of `op` in a graph whose inputs are the tensors among `args`, and whose result is `val` or the op's."""
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        x = graph.placeholder("x")
        x.meta["val"] = value
        return x

    call = graph.call_function(op, tuple(map(given, args)))
    call.meta["val"] = op(*args) if val is None else val
    return call


# Not (5,) @ (2, 5, 7): torch's kernels make a bmm of it, its decomposition for export an mv, which has no FLOPs.
PRODUCTS = [
    ("matmul", torch.matmul, ((3, 5), (5, 7)), 2 * 3 * 5 * 7),
    ("matmul", torch.matmul, ((2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    ("matmul", torch.matmul, ((2, 3, 5), (5, 7)), 2 * 2 * 3 * 5 * 7),
    ("matmul", torch.matmul, ((3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    ("matmul", torch.matmul, ((6, 1, 3, 5), (4, 5, 7)), 2 * 24 * 3 * 5 * 7),
    ("matmul", torch.matmul, ((5,), (5,)), 0),
    ("matmul", torch.matmul, ((3, 5), (5,)), 0),
    ("matmul", torch.matmul, ((5,), (5, 7)), 2 * 5 * 7),
    ("matmul", lambda x, y: x.transpose(0, 1) @ y, ((3, 2, 5), (5,)), None),
    ("linear", F.linear, ((4, 3, 5), (7, 5), (7,)), 2 * 12 * 5 * 7),
    ("linear", F.linear, ((3, 5), (7, 5)), 2 * 3 * 5 * 7),
    ("linear", F.linear, ((5,), (7, 5), (7,)), 2 * 5 * 7),
    ("conv1d", lambda x, w: F.conv1d(x, w, dilation=2), ((2, 3, 9), (4, 3, 3)), 2 * 2 * 4 * 5 * 9),
    ("conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2), ((2, 6, 8, 8), (4, 3, 3, 3), (4,)),
     2 * 2 * 4 * 16 * 27),
    ("conv2d", F.conv2d, ((6, 8, 8), (4, 6, 3, 3)), 2 * 4 * 36 * 54),
    ("conv2d", lambda x, w: F.conv2d(x, w, padding="same"), ((1, 6, 8, 8), (4, 6, 3, 3)), 2 * 4 * 64 * 54),
    ("conv3d", F.conv3d, ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2)), 2 * 3 * 27 * 16),
    ("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2), ((2, 6, 5, 5), (6, 2, 3, 3)),
     2 * 2 * 6 * 25 * 18),
    ("einsum", lambda x, y: torch.einsum("bij,bkj->bki", x, y), ((2, 3, 5), (2, 7, 5)), 2 * 2 * 3 * 5 * 7),
    ("einsum", lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), ((3, 5), (5, 7), (7, 2)), 2 * 3 * 7 * (5 + 2)),
    ("tensordot", lambda x, y: torch.tensordot(x, y, dims=([2, 0], [0, 1])), ((4, 3, 5), (5, 4, 7)), 2 * 3 * 20 * 7),
    ("inner", torch.inner, ((2, 3, 5), (7, 5)), 2 * 6 * 5 * 7),
    ("linalg_multi_dot", lambda *x: torch.linalg.multi_dot(x), ((3, 9), (9, 7), (7, 2)), 2 * (9 * 7 * 2 + 3 * 9 * 2)),
    ("linalg_matrix_power", lambda x: torch.linalg.matrix_power(x, 5), ((4, 4),), 3 * 2 * 64),
    ("scaled_dot_product_attention", SDPA, ((2, 4, 9, 8), (2, 4, 6, 8), (2, 4, 6, 8)), 2 * 8 * 54 * 16),
    ("scaled_dot_product_attention", SDPA, ((4, 9, 8), (4, 6, 8), (4, 6, 3)), 2 * 4 * 54 * 11),
    ("scaled_dot_product_attention", lambda q, k: SDPA(q, k, k, is_causal=True), ((2, 4, 9, 8), (2, 4, 9, 8)),
     2 * 8 * 45 * 16),
    ("scaled_dot_product_attention", lambda q, k: SDPA(q, k, k, enable_gqa=True), ((2, 4, 9, 8), (2, 2, 6, 8)),
     2 * 8 * 54 * 16),
    ("scaled_dot_product_attention", lambda q, m: SDPA(q, q, q, m > 0), ((2, 4, 9, 8), (9, 9)), 2 * 8 * 81 * 16),
    ("softmax", lambda x: x.softmax(-1), ((3, 5),), 0),
    ("layer_norm", lambda x: F.layer_norm(x, (5,)), ((3, 5),), 0),
]  # fmt: skip


def first_of_each(cases: list[Any]) -> list[Any]:
    """All cases; those of an operator that had one before are slow."""
    names = [case[0] for case in cases]
    return [pytest.param(*case, marks=pytest.mark.slow if case[0] in names[:i] else []) for i, case in enumerate(cases)]


@pytest.mark.parametrize(("name", "function", "shapes", "flops"), first_of_each(PRODUCTS))
def test_flops_of_a_composite_are_those_of_what_it_decomposes_into(
    name: str, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], flops: float | None
) -> None:
    program = exported(function, *shapes)
    packets = [n.target.overloadpacket for n in calls(program.graph_module) if hasattr(n.target, "overloadpacket")]
    assert getattr(ATEN, name) in packets
    plain = decomposed(program)
    assert all(getattr(n.target, "overloadpacket", None) is not getattr(ATEN, name) for n in calls(plain))
    assert total(program.graph_module) == total(plain)
    assert flops is None or total(plain) == flops


def test_attention_that_is_composite_is_attention() -> None:
    q, kv = torch.empty(2, 4, 10, 8), torch.empty(2, 4, 6, 8)
    call = node(ATEN.scaled_dot_product_attention.default, q, kv, kv, None, 0.0, True)
    assert is_attention(call) and not is_attention_backward(call)
    seen = int(torch.ones(10, 6).tril().sum())
    assert node_flops(call) == pytest.approx(2 * 8 * seen * 16, rel=1e-12)
    rate = H100.attention_flops * 67 / 989.4
    fast = dataclasses.replace(H100, memory_bandwidth=1e18)
    assert CostModel(fast)(call) == pytest.approx(1e3 * node_flops(call) / rate)


def test_no_device_is_needed() -> None:
    with _torch.fake_mode():
        q = torch.empty(2, 4, 64, 16, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 4, 64, 16, device="cuda", dtype=torch.bfloat16)
        x = torch.empty(64, 64, device="cuda")
    attention = node(ATEN.scaled_dot_product_attention.default, q, k, k, None, 0.0, True, val=q)
    assert node_flops(attention) == pytest.approx(2 * 8 * (64 * 65 // 2) * 32)
    product = 2 * 64**3
    assert node_flops(node(ATEN.matmul.default, x, x, val=x)) == product
    assert node_flops(node(ATEN.einsum.default, "ij,jk->ik", [x, x], val=x)) == product


def test_operators_are_run_without_contents_once_and_not_if_they_talk() -> None:
    seen: list[str] = []

    def twice(x: torch.Tensor, y: torch.Tensor, name: str = "") -> torch.Tensor:
        seen.append(x.device.type)
        return (x @ y) @ y

    library = torch.library.Library("spanwise_flops", "DEF")
    library.define("twice(Tensor x, Tensor y) -> Tensor")
    library.impl("twice", twice, "CompositeImplicitAutograd")
    library.define("talks(Tensor x, Tensor y, str group_name) -> Tensor")
    library.impl("talks", twice, "CompositeImplicitAutograd")
    ops = torch.ops.spanwise_flops
    x = torch.zeros(6, 6)
    with FlopCounterMode(display=False) as outside:
        flops = [node_flops(node(ops.twice.default, x, x, val=x)) for _ in range(3)]
        assert flops == [2 * 2 * 6**3] * 3
        assert node_flops(node(ops.twice.default, x[:3], x, val=x[:3])) == 2 * 2 * 3 * 6**2
    assert outside.get_total_flops() == 0
    assert seen == ["meta", "meta"]
    assert node_flops(node(ops.talks.default, x, x, "g", val=x)) == 0 and len(seen) == 2
    # Writes have no effect; operators that read contents or draw random numbers have 0 FLOPs and draw nothing.
    assert node_flops(node(ATEN.fill_diagonal_.default, x, 1.0, val=x)) == 0 and not x.any()
    assert node_flops(node(ATEN.isclose.default, x, x)) == 0 == node_flops(node(ATEN.item.default, x[0, 0]))
    before = torch.get_rng_state()
    assert node_flops(node(ATEN.dropout.default, x, 0.5, True, val=x)) == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_that_are_not_numbers_and_layouts_without_strides_are_no_error() -> None:
    size = torch.export.Dim("size", min=2)
    program = export(Calls(lambda x: (torch.einsum("ij,kj->ik", x, x), F.linear(x, x))), (torch.randn(6, 4),),
                     dynamic_shapes=(({0: size},),), strict=False)  # fmt: skip
    gm = program.graph_module
    einsum, linear = calls(gm)
    assert node_flops(einsum) == 0
    with assumed(gm, 10):
        assert node_flops(einsum) == node_flops(linear) == 2 * 10 * 10 * 4
    sparse = torch.eye(4).to_sparse()
    assert node_flops(node(ATEN.einsum.default, "ij,jk->ik", [sparse, sparse], val=torch.empty(4, 4))) == 0


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_recurrent_layers_have_the_flops_of_their_steps(name: str) -> None:
    """As they run on no device: for kernels that do all steps at once torch has no formulas."""
    layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}[name](6, 8, num_layers=2, bidirectional=True)
    op = getattr(ATEN, name).input
    hidden = torch.zeros(4, 3, 8, device="meta")
    state: Any = [hidden, hidden] if name == "lstm" else hidden
    weights = [w.detach() for w in layer.to("meta").parameters()]
    args = [torch.zeros(5, 3, 6, device="meta"), state, weights, True, 2, 0.0, False, True, False]
    with FlopCounterMode(display=False) as counter:
        op(*args)
    assert node_flops(node(op, *args)) == counter.get_total_flops() > 0


def test_weights_that_the_module_has_are_known_by_it() -> None:
    module, graph = nn.Linear(5, 7), fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    x.meta["val"] = torch.empty(3, 5)
    call = graph.call_function(ATEN.linear.default, (x, weight))
    call.meta["val"] = torch.empty(3, 7)
    graph.output(call)
    gm = fx.GraphModule(module, graph)
    assert total(gm) == 2 * 3 * 5 * 7
    del next(iter(gm.graph.nodes)).meta["val"]
    assert total(gm) == 0


class Block(nn.Module):
    def __init__(self, dim: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim, bias=False)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(SDPA(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def test_a_block_costs_the_same_before_and_after_it_is_decomposed() -> None:
    program = export(Block(), (torch.randn(2, 128, 256),), strict=False)
    plain = decomposed(program)
    assert total(program.graph_module) == total(plain) == pytest.approx(
        2 * 256 * 256 * 256 * 12 + 2 * 2 * 256 * 2 * (128 * 129 // 2)
    )  # fmt: skip
    model = CostModel(H100)
    given, after = (sum(map(model, calls(gm))) for gm in (program.graph_module, plain))
    assert given == pytest.approx(after, rel=0.03)
    # By it a report tells what a collective could be hidden behind.
    assert len(arithmetic(program.graph_module)) == len(arithmetic(plain)) == 5


def test_of_decomposed_graphs_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = decomposed(export(Block(), (torch.randn(2, 16, 256),), strict=False))
    run: list[Any] = []
    monkeypatch.setattr("spanwise.overlap.costs.flops._composite_flops", lambda node: run.append(node.target) or 0.0)
    total(plain)
    assert not run

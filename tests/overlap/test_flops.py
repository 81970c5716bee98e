"""FLOPs of operators that are defined by others: those of the program that they decompose into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import default_decompositions, export

from spanwise.overlap.costs.flops import node_flops

pytestmark = pytest.mark.filterwarnings(r"ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's, in export

ATEN = torch.ops.aten
SDPA = F.scaled_dot_product_attention


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def total(gm: fx.GraphModule) -> float:
    return sum(node_flops(n) for n in gm.graph.nodes if n.op == "call_function")


def flops(op: Any, *args: Any) -> float:
    """Of the call of `op` in a graph whose inputs are the tensors among `args`."""
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
    call.meta["val"] = torch.empty(4, 4)
    return node_flops(call)


# What is multiplied, and how often, with the FLOPs of a multiplication and an addition each.
PRODUCTS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = [
    (torch.matmul, ((3, 5), (2, 5, 7)), 2 * 3 * 5 * 7),
    (torch.matmul, ((5,), (5,)), 0),
    (F.linear, ((4, 3, 5), (7, 5), (7,)), 12 * 5 * 7),
    (lambda x, w: F.conv1d(x, w, dilation=2), ((2, 3, 9), (4, 3, 3)), 2 * 4 * 5 * 9),
    (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2), ((2, 6, 8, 8), (4, 3, 3, 3), (4,)), 2 * 64 * 27),
    (lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2), ((2, 6, 5, 5), (6, 2, 3, 3)), 2 * 6 * 25 * 18),
    (lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), ((3, 5), (5, 7), (7, 2)), 3 * 7 * (5 + 2)),
    (lambda *x: torch.linalg.multi_dot(x), ((3, 9), (9, 7), (7, 2)), 9 * 7 * 2 + 3 * 9 * 2),
    (SDPA, ((4, 9, 8), (4, 6, 8), (4, 6, 3)), 4 * 54 * 11),
    (lambda q, k: SDPA(q, k, k, is_causal=True), ((2, 4, 9, 8), (2, 4, 9, 8)), 8 * 45 * 16),
    (lambda q, k: SDPA(q, k, k, enable_gqa=True), ((2, 4, 9, 8), (2, 2, 6, 8)), 8 * 54 * 16),
    (lambda x: F.layer_norm(x.softmax(-1), (5,)), ((3, 5),), 0),
]


@pytest.mark.parametrize(("function", "shapes", "products"), PRODUCTS)
def test_flops_of_a_composite_are_those_of_what_it_decomposes_into(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], products: int
) -> None:
    program, table = export(Calls(function), tuple(map(torch.randn, shapes)), strict=False), default_decompositions()
    table.pop(ATEN._scaled_dot_product_flash_attention_for_cpu.default)  # torch would make products without the mask
    assert total(program.graph_module) == total(program.run_decompositions(table).graph_module) == 2 * products


def test_operators_are_run_without_contents_and_not_if_they_communicate() -> None:
    seen: list[str] = []

    def twice(x: torch.Tensor, y: torch.Tensor, name: str = "") -> torch.Tensor:
        seen.append(x.device.type)
        return (x @ y) @ y

    library = torch.library.Library("spanwise_flops", "DEF")
    library.define("twice(Tensor x, Tensor y) -> Tensor")
    library.impl("twice", twice, "CompositeImplicitAutograd")
    library.define("talks(Tensor x, Tensor y, str group_name) -> Tensor")
    library.impl("talks", twice, "CompositeImplicitAutograd")
    ops, x = torch.ops.spanwise_flops, torch.zeros(6, 6)
    assert flops(ops.twice.default, x, x) == 2 * 2 * 6**3 and seen == ["meta"]
    assert flops(ops.talks.default, x, x, "g") == 0 and len(seen) == 1
    # Writes have no effect; operators that read contents or draw random numbers have 0 FLOPs and draw nothing.
    before, sparse = torch.get_rng_state(), torch.eye(4).to_sparse()
    assert flops(ATEN.fill_diagonal_.default, x, 1.0) == 0 and not x.any()
    assert flops(ATEN.item.default, x[0, 0]) == flops(ATEN.dropout.default, x, 0.5, True) == 0
    assert flops(ATEN.einsum.default, "ij,jk->ik", [sparse, sparse]) == 0
    assert torch.equal(torch.get_rng_state(), before)

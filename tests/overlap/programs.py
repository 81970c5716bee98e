"""Random programs of tensors: views, writes, tuples, dtypes, memory formats, random numbers and collectives.

A program is a list of statements ``(name, first, second)``; the numbers choose among the values made so far. Traced, it
is one graph for four ranks, as 2 × 2, without races: nothing writes what is being sent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from spanwise import H100, overlap
from spanwise.overlap.costs.flops import node_flops
from spanwise.overlap.fx.capture import Axis, CaptureConfig, Graphs, capture
from spanwise.overlap.fx.operators import MESSAGES, STARTS, tensors_of
from tests.lockstep import Lockstep

OPS, ATEN = torch.ops._c10d_functional, torch.ops.aten
Program = list[tuple[str, int, int]]
# Every rank's groups have these names, so that one graph serves all ranks.
AXES = [
    {"tp": Axis("tp", (r - r % 2, r - r % 2 + 1), r % 2), "dp": Axis("dp", (r % 2, r % 2 + 2), r // 2)}
    for r in range(4)
]


SMALL = CaptureConfig(
    layers=1, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=28, vocab=24, dp=2, tp=2, device="cpu", dtype=torch.float64
)


@functools.cache
def graphs_on(rank: int, config: CaptureConfig = SMALL) -> Graphs:
    return capture(dataclasses.replace(config, rank=rank))


def model_cost(graphs: Graphs) -> overlap.CostModel:
    return overlap.CostModel(H100, ranks={axis.name: axis.ranks for axis in graphs.axes.values()})


def step(graphs: Sequence[Graphs]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Inputs and outputs of both graphs of a captured step on all ranks."""
    axes, given = [g.axes for g in graphs], []
    for seed, g in enumerate(graphs):
        draw = torch.Generator().manual_seed(seed)
        values = [node.meta["val"] for node in g.forward.graph.find_nodes(op="placeholder")]
        given.append([
            torch.randn(v.shape, generator=draw).to(v.dtype) if v.dtype.is_floating_point
            else torch.randint(SMALL.vocab or 1, v.shape, generator=draw) for v in values
        ])  # fmt: skip
    forward = Lockstep([g.forward for g in graphs], axes).run(given)
    saved = [[*outputs[1:], torch.ones_like(outputs[0])] for outputs in forward]
    return {"forward": (given, forward), "backward": (saved, Lockstep([g.backward for g in graphs], axes).run(saved))}


def one(node: fx.Node) -> float:
    """A cost."""
    return 1.0


class Cost:
    """A collective takes `ratio` of a matrix product, one with `slow` columns 10 of them, all else nearly nothing."""

    def __init__(self, ratio: float = 0.6, slow: int = 0, message: float | None = None) -> None:
        self.ratio, self.slow, self.message = ratio, slow, ratio if message is None else message

    def uuid(self) -> str:
        return f"ratio {self.ratio}, slow {self.slow}, message {self.message}"

    def __call__(self, node: fx.Node) -> float:
        if node.target in STARTS:
            return self.message if node.target in MESSAGES else self.ratio
        if not node_flops(node):
            return 0.01
        return 10.0 if tensors_of(node)[0].shape[-1] == self.slow else 1.0

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        return self.ratio


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda x, y: x.add_(1),
    "copy_": lambda x, y: x.copy_(y.mean().expand_as(x)),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([0]),), y.sum().to(x.dtype)) if x.dim() else x,
    "index_add_": lambda x, y: x.reshape(-1).index_add_(0, torch.tensor([0]), y.new_ones(1).to(x.dtype)),
    "transposed in place": lambda x, y: x.t_() if x.dim() == 2 and x.shape[0] == x.shape[1] else x,
    "unsqueezed in place": lambda x, y: x.unsqueeze_(0) if x.dim() < 3 else x.squeeze_(),
    "random in place": lambda x, y: x.uniform_(),
    "out": lambda x, y: torch.mul(x, 0.5, out=torch.empty_like(x)),
    "out given": lambda x, y: torch.mul(y, 0.5, out=x) if x.shape == y.shape and x.dtype == y.dtype else None,
    "relu_ of a view": lambda x, y: x.reshape(-1)[::2].relu_(),
}
READS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, y: x + y.sum(),
    "flat view": lambda x, y: x.reshape(-1),
    "transposed": lambda x, y: x.t() if x.dim() == 2 else x,
    "halves": lambda x, y: x.split(max(1, x.shape[0] // 2)) if x.dim() else x,
    "unbound": lambda x, y: x.unbind()[:3] if x.dim() and x.shape[0] < 9 else x,
    "expanded": lambda x, y: x.unsqueeze(0).expand(2, *x.shape),
    "diagonal": lambda x, y: x.diagonal() if x.dim() > 1 else x,
    "unfolded": lambda x, y: x.reshape(-1).unfold(0, 2, 1) if x.numel() > 1 else x,
    "contiguous": lambda x, y: x.contiguous(),
    "channels last": lambda x, y: (
        x.reshape(1, -1, 2, 2).contiguous(memory_format=torch.channels_last) if x.numel() % 4 == 0 else x
    ),
    "bfloat16": lambda x, y: x.to(torch.bfloat16),
    "float64": lambda x, y: x.to(torch.float64),
    "complex": lambda x, y: torch.complex(x.float(), x.float()).conj().imag.resolve_neg(),
    "random": lambda x, y: torch.rand_like(x),
    "dropped": lambda x, y: torch.native_dropout(x, 0.5, True),
    "sorted": lambda x, y: x.reshape(-1).sort(),
    "stacked": lambda x, y: torch.stack([x, x]) if x.dim() < 3 else x,
    "several": lambda x, y: torch._foreach_add([x, y], 1.0),
}
STATEMENTS = WRITES | READS
START: dict[str, Callable[[torch.Tensor, str], Any]] = {  # collectives of two ranks on a flat tensor
    "all_gather": lambda x, group: OPS.all_gather_into_tensor(x, 2, group),
    "all_gather out": lambda x, group: OPS.all_gather_into_tensor_out(x, 2, group, out=x.new_empty(2 * len(x))),
    "reduce_scatter": lambda x, group: OPS.reduce_scatter_tensor(torch.cat([x, x * 2]), "sum", 2, group),
    "all_reduce": lambda x, group: OPS.all_reduce(x, "sum", group),
    "all_reduce max": lambda x, group: OPS.all_reduce(x, "max", group),
    "all_reduce_": lambda x, group: OPS.all_reduce_(x.clone(), "sum", group),
    "broadcast": lambda x, group: OPS.broadcast(x, 0, group),
    "broadcast_": lambda x, group: OPS.broadcast_(x.clone(), 1, group),
    "all_reduce several": lambda x, group: OPS.all_reduce_coalesced([x, x + 1], "sum", group),
    "all_reduce_ several": lambda x, group: OPS.all_reduce_coalesced_([x.clone(), x + 1], "sum", group),
    "all_gather several": lambda x, group: OPS.all_gather_into_tensor_coalesced([x, x * 2], 2, group),
    "all_to_all": lambda x, group: OPS.all_to_all_single(torch.cat([x, -x]), [len(x)] * 2, [len(x)] * 2, group),
}


def programs() -> st.SearchStrategy[Program]:
    names = sorted(STATEMENTS) + 3 * list(START) + 20 * ["wait"]
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 99), st.integers(0, 99)), min_size=4, max_size=40)


def traced(program: Program, mode: str = "fake") -> tuple[fx.GraphModule, list[list[torch.Tensor]]]:
    """The graph of a program, and the inputs of each rank, some of which it writes."""

    def function(*leaves: torch.Tensor) -> Any:
        values = list(leaves)
        under_way: list[tuple[torch.Tensor, torch.Tensor]] = []  # what was started, and on what
        for name, first, second in program:
            x, y = values[first % len(values)], values[second % len(values)]
            if name in START and x.numel():
                begun = START[name](x.reshape(-1)[:32].contiguous(), "tp" if second % 3 else "dp")
                under_way += [(one, x) for one in tree_leaves(begun)]
            elif name == "wait" and under_way:
                values.append(OPS.wait_tensor(under_way.pop(first % len(under_way))[0]))
            elif name in STATEMENTS and x.numel() and y.numel():
                sent = {of.untyped_storage()._cdata for _, of in under_way}
                if name in WRITES:
                    x, y = (t.clone() if t.untyped_storage()._cdata in sent or _shares(t) else t for t in (x, y))
                result = STATEMENTS[name](x, y)
                found = result if isinstance(result, (tuple, list)) else [result]
                values += [t for t in found if t is not None and t.is_floating_point()]
        return values[-4:], [OPS.wait_tensor(x) for x, _ in under_way]

    def leaves(rank: int) -> list[torch.Tensor]:
        return [torch.arange(16.0).reshape(4, 4) * (rank + 1) + i for i in range(3)]

    return make_fx(function, tracing_mode=mode)(*leaves(0)), [leaves(rank) for rank in range(4)]


def _shares(x: torch.Tensor) -> bool:
    """Whether elements share memory, so that torch refuses to write them."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def run(gm: fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]], *, late: bool = False) -> list[torch.Tensor]:
    """Outputs and written inputs of all ranks."""
    return tracked(gm, inputs, late=late)[0]


def tracked(
    gm: fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]], *, late: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Outputs and written inputs of all ranks, and the peak of bytes on rank 0."""
    torch.manual_seed(0)
    given = [[x.clone() for x in of_rank] for of_rank in inputs]
    lockstep = Lockstep([gm] * len(AXES), AXES, late=late, track=True)
    outputs = lockstep.run(given)
    return [x for values in (*outputs, *given) for x in tree_leaves(values)], lockstep.peak


def same(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    """Fail unless tensors are the same to the bit, with their strides."""
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:  # the gradient of what needs none
            assert x is y
            continue
        assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
        assert torch.equal(x.nan_to_num(77.0), y.nan_to_num(77.0))

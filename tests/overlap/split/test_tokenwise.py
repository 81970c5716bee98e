"""Every cut that is legal: an operator on pieces of its arguments gives the pieces of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from spanwise.overlap.split.tokenwise import Cut, bounds, legal, piece_call

ATEN = torch.ops.aten


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def piece(x: Any, cut: Cut, tokens: int, first: int, end: int) -> Any:
    """These tokens of each block."""
    if not isinstance(x, torch.Tensor):
        return type(x)(piece(item, cut, tokens, first, end) for item in x)
    before, after = x.shape[: cut.dim], x.shape[cut.dim + 1 :]
    opened = x.reshape(*before, cut.blocks, tokens * cut.unit, *after)
    part = opened.narrow(cut.dim + 1, first * cut.unit, (end - first) * cut.unit)
    return part.reshape(*before, cut.size(end - first), *after).contiguous()


def all_cuts(shape: torch.Size, tokens: int) -> Iterator[Cut]:
    for dim, size in enumerate(shape):
        for unit in (1, 2, 3, 4, 6):
            if size and size % (tokens * unit) == 0:
                yield Cut(dim, size // (tokens * unit), unit)


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "view": (lambda x: x.view(24, 3), ((4, 6, 3),)),
    "expand": (lambda x: x.expand(4, 6, 5), ((4, 6, 1),)),
    "permute": (lambda x: x.permute(2, 0, 1), ((4, 6, 2),)),
    "t": (lambda x: x.t(), ((4, 6),)),
    "unsqueeze": (lambda x: x.unsqueeze(1), ((4, 6),)),
    "squeeze": (lambda x: x.squeeze(1), ((4, 1, 6),)),
    "split": (lambda x: x.split(6, 1), ((4, 12),)),
    "split uneven": (lambda x: x.split([4, 8], 1), ((4, 12),)),
    "slice": (lambda x: x[:, 6:18], ((4, 24),)),
    "step": (lambda x: x[:, ::2], ((4, 24),)),
    "select": (lambda x: x[:, 1], ((4, 2, 6),)),
    "pointwise": (lambda x, y: x * y, ((4, 6, 2), (6, 1))),
    "sum": (lambda x: x.sum(1), ((4, 6, 2),)),
    "amax": (lambda x: x.amax((0, 2), keepdim=True), ((4, 6, 2),)),
    "softmax": (lambda x: x.softmax(1).log_softmax(0), ((4, 6, 2),)),
    "mm": (lambda x, y: x @ y, ((6, 4), (4, 12))),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y), ((6, 12), (6, 4), (4, 12))),
    "bmm": (lambda x, y: torch.bmm(x, y), ((4, 6, 2), (4, 2, 4))),
    "gather": (lambda x, y: x.gather(1, (y.abs() % 4).long()), ((6, 4), (6, 2))),
    "scatter_add": (lambda x, y, z: x.scatter_add(1, (y.abs() % 4).long(), z), ((6, 4), (6, 2), (6, 2))),
    "embedding": (lambda w, y: F.embedding((y.abs() % 4).long(), w), ((4, 6), (6, 4))),
    "cat": (lambda x, y: torch.cat([x, y], 0), ((6, 4), (6, 4))),
    "cumsum": (lambda x: x.cumsum(0), ((6, 4),)),
}
NEVER = {"step", "cumsum"}
ROUNDING = {"softmax": 1e-14}  # vectors of exponentials, of other lengths


@pytest.mark.parametrize("name", OPERATORS)
def test_legal_cuts_are_exact(name: str) -> None:
    function, shapes = OPERATORS[name]
    inputs = [drawn(*shape) for shape in shapes]
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    values: dict[fx.Node, Any] = {}
    given, tried = iter(inputs), 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        if node.op == "output":
            break
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        whole = values[node] = target(*args, **kwargs)
        first = whole if isinstance(whole, torch.Tensor) else whole[0]
        for tokens, cut in ((t, c) for t in (2, 3, 4, 6) for c in all_cuts(first.shape, t)):
            found = legal(node, cut, tokens)
            if found is None:
                continue
            tried += 1
            for begin, end in bounds(tokens, 2):
                op, args, kwargs = piece_call(node, cut, tokens, end - begin)
                parts = {arg: piece(values[arg], of, tokens, begin, end) for arg, of in found.items()}
                args, kwargs = fx.node.map_arg((args, kwargs), lambda arg, parts=parts: parts.get(arg, values[arg]))
                made, wanted = op(*args, **kwargs), piece(whole, cut, tokens, begin, end)
                for x, y in zip(tree_leaves(made), tree_leaves(wanted), strict=True):
                    assert x.shape == y.shape, (cut, tokens, node)
                    assert torch.allclose(x, y, rtol=0, atol=ROUNDING.get(name, 0)), (cut, tokens, node)
    assert (tried == 0) == (name in NEVER)

"""Losses, token scores, tree edges and recurrences whose calls differ between ranks: an error on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from tests.ranks.gloo import GlooPool
from tests.ranks.test_mismatch import mismatch

TREE = spanwise.TokenTree([-1, 0, 0], [2, 1, 2])
Options = dict[str, Any]


def scores(mesh: DeviceMesh, options: Options) -> Callable[[torch.Tensor], Any]:
    """Scores of hidden states, or of logits."""
    labels = torch.arange(options.pop("tokens", 4))
    weight = None if options.pop("logits", False) else torch.ones(3, 5, dtype=options["dtype"])
    bias = torch.ones(3, dtype=options["dtype"]) if options.pop("bias", False) else None
    reduction, count = options.pop("loss", None), options.pop("count", None)
    rest = {name: value for name, value in options.items() if name not in ("dtype", "grad")}

    def call(x: torch.Tensor) -> Any:
        if reduction:
            kwargs = {"loss_mesh": None, "vocab_mesh": mesh, "reduction": reduction, "num_valid": count}
            return spanwise.linear_cross_entropy(x[: len(labels)], weight, labels, **kwargs)
        return spanwise.token_logprobs(
            x[: len(labels)], labels, vocab_weight=weight, bias=bias, vocab_mesh=mesh, **rest
        )

    return call


def edges(mesh: DeviceMesh, options: Options) -> Callable[[torch.Tensor], Any]:
    tree = options.pop("tree", TREE)
    own = spanwise.shard_edges(tree, spanwise.make_plan(tree.mask(), 2, block_size=1), mesh)

    def call(x: torch.Tensor) -> Any:
        return spanwise.unshard_edges(own, mesh, x[: len(own.targets)], dim=0)

    return call


def each_loss(mesh: DeviceMesh, options: Options) -> Callable[[torch.Tensor], Any]:
    """The loss of each token, which has no collective."""
    softcap, reduction = options.pop("softcap", None), options.pop("reduction", "none")

    def call(x: torch.Tensor) -> Any:
        kwargs = {"loss_mesh": mesh, "softcap": softcap, "reduction": reduction}
        return spanwise.linear_cross_entropy(x, torch.ones(7, x.shape[-1]), torch.arange(6), **kwargs)

    return call


def fused_loss(mesh: DeviceMesh, options: Options) -> Callable[[torch.Tensor], Any]:
    softcap = options.pop("softcap", None)

    def call(x: torch.Tensor) -> Any:
        weight = torch.ones(7, x.shape[-1])
        return spanwise.linear_cross_entropy(x, weight, torch.arange(6), loss_mesh=mesh, softcap=softcap)

    return call


def logits_loss(mesh: DeviceMesh, options: Options) -> Callable[[torch.Tensor], Any]:
    count, weights = options.pop("count", 6), options.pop("weights", None)
    labels = torch.tensor([1, -100, 2, 0, 1, 3])
    return lambda x: spanwise.cross_entropy(x, labels, mesh, num_valid=count, weights=weights)


def recurrent(mesh: DeviceMesh, options: Options) -> Callable[[torch.Tensor], Any]:
    plan = spanwise.make_plan(spanwise.SpanMask.causal(12), 2, balancer="contiguous", block_size=2)
    route = spanwise.recurrence.recurrence_route(plan, mesh)
    bias, normalize = options.pop("bias", None), options.pop("normalize", False)

    def call(x: torch.Tensor) -> Any:
        x = spanwise.recurrence.causal_conv(x, torch.ones(5, 3), bias, route)
        gates = torch.full((x.shape[0], 1), 0.5)
        heads = [x.unsqueeze(1)] * 3
        return spanwise.recurrence.gated_delta(*heads, -gates, gates, route, normalize=normalize)

    return call


def convolved(mesh: DeviceMesh, options: Options) -> Callable[[torch.Tensor], Any]:
    plan = spanwise.make_plan(spanwise.SpanMask.causal(12), 2, balancer="contiguous", block_size=2)
    route, width = spanwise.recurrence.recurrence_route(plan, mesh), options.pop("width", 3)
    return lambda x: spanwise.recurrence.causal_conv(x, torch.ones(5, width), None, route)


def moved(mesh: DeviceMesh, options: Options) -> Callable[[torch.Tensor], Any]:
    mask = spanwise.SpanMask.causal(12)
    plans = [spanwise.make_plan(mask, 2, balancer=name, block_size=2) for name in ("contiguous", "head_tail")]
    way = spanwise.relayout_route(*plans, mesh)
    return lambda x: spanwise.relayout(x, way, dim=0)


# What rank 1 does otherwise, and what the error names.
CHANGES: dict[Callable[..., Any], dict[str, tuple[Options, str]]] = {
    scores: {
        "fewer tokens": ({"tokens": 3}, "(3, 5)"),
        "a wider dtype": ({"dtype": torch.float64}, "dtype float64"),
        "no gradient": ({"grad": False}, "requires grad False"),
        "a temperature": ({"temperature": 0.5}, "temperature 0.5"),
        "a softcap": ({"softcap": 3.0}, "softcap 3.0"),
        "entropies": ({"entropy": True}, "entropy True"),
        "logits": ({"logits": True}, "given logits"),
        "a bias": ({"bias": True}, "bias True"),
        "another loss": ({"loss": "sum"}, 'linear_cross_entropy(reduction="sum")'),
        "a count": ({"loss": "mean", "count": 5}, "amount 5"),
    },
    each_loss: {
        "a sum": ({"reduction": "sum"}, 'linear_cross_entropy(reduction="sum")'),
        "a softcap": ({"softcap": 3.0}, "softcap 3.0"),
    },
    fused_loss: {
        "a softcap": ({"softcap": 3.0}, "softcap 3.0"),
        "a hidden size": ({"columns": 4}, "last dim (4,)"),
    },
    logits_loss: {
        "a count of its own": ({"count": 2}, "rank 1: amount 2.0"),
        "no count": ({"count": None}, "num_valid None, weighted False"),
        "a count in a tensor": ({"count": torch.tensor(6)}, "rank 1: num_valid a tensor"),
        "a wider dtype": ({"dtype": torch.float64}, "rank 1: dtype float64"),
        "weights": ({"weights": torch.ones(6)}, "rank 1: weighted True"),
        "no gradient": ({"grad": False}, "rank 1: requires grad False"),
    },
    recurrent: {
        "a bias": ({"bias": torch.ones(5)}, "(3, None, True)"),
        "normalized": ({"normalize": True}, "rank 1: gated_delta(normalize=True)"),
    },
    convolved: {"a width": ({"width": 2}, "(2, None, False)")},
    moved: {"no gradient": ({"grad": False}, "requires grad (False,)")},
    edges: {
        "another tree": ({"tree": spanwise.TokenTree([-1, 0, 0], [2, 1, 3])}, "(6, 5)"),
        "a wider dtype": ({"dtype": torch.float64}, "dtype float64"),
        "no gradient": ({"grad": False}, "requires grad (False,)"),
        "edges of another batch": ({"tree": spanwise.TokenTree([-1, 0, 0], [1, 2, 2])}, "rank 1: plan "),
    },
}


def run(door: Callable[..., Any], mesh: DeviceMesh, options: Options, backend: str | None, times: int = 1) -> None:
    """Calls, and then the backward of all but the first `skipped` of them."""
    options = {"dtype": torch.float32, "grad": True, "skipped": 0} | options
    skipped = options.pop("skipped")
    x = torch.ones(6, options.pop("columns", 5), dtype=options["dtype"], requires_grad=options["grad"])
    call = door(mesh, options)
    outs = [(torch.compile(call, backend=backend, fullgraph=True) if backend else call)(x) for _ in range(times)]
    for out in outs[skipped:]:
        parts = out if isinstance(out, tuple) else (out,)
        if parts[0].requires_grad:
            sum(part.sum() for part in parts).backward()


def differ(
    rank: int, mesh: DeviceMesh, door: Callable[..., Any], names: list[str], backend: str | None, steady: int
) -> dict[str, str]:
    said = {}
    for name in names:
        for _ in range(steady):
            run(door, mesh, {}, None)
        torch._dynamo.reset()  # compiled once for each name, it would meet the limit of torch
        own = CHANGES[door][name][0] if rank == 1 else {}
        said[name] = mismatch(lambda own=own: [run(door, mesh, dict(own), backend), run(door, mesh, {}, backend)])
    if not steady:
        run(door, mesh, {}, backend if rank == 0 else None)  # only one rank has compiled it: the same call
    return said


@pytest.mark.parametrize("door", CHANGES)
def test_raises_on_every_rank(gloo_pool: GlooPool, door: Callable[..., Any]) -> None:
    check(gloo_pool, door, list(CHANGES[door]), None)


@pytest.mark.parametrize("name", ["a count of its own", "no gradient"])
def test_raises_on_every_rank_after_equal_steps(gloo_pool: GlooPool, name: str) -> None:
    """One rank has gone on, and the groups are closed."""
    check(gloo_pool, logits_loss, [name], None, steady=8)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("door", "backend", "names"),
    [
        (scores, "aot_eager", ["a temperature", "a bias"]),
        (edges, "aot_eager", ["a wider dtype"]),
        (logits_loss, "aot_eager", ["a count of its own", "no count"]),
        (each_loss, "aot_eager", ["a softcap"]),
        *(
            pytest.param(door, "inductor", list(CHANGES[door]), marks=pytest.mark.slow)
            for door in (scores, edges, logits_loss)
        ),
    ],
)
def test_raises_on_every_rank_in_compiled_code(
    gloo_pool: GlooPool, door: Callable[..., Any], backend: str, names: list[str]
) -> None:
    check(gloo_pool, door, names, backend)


def check(
    gloo_pool: GlooPool, door: Callable[..., Any], names: list[str], backend: str | None, steady: int = 0
) -> None:
    for said in gloo_pool.run(2, differ, door, names, backend, steady):
        for name, text in said.items():
            assert "ranks disagree on call" in text and CHANGES[door][name][1] in text, (name, text)


def skips(rank: int, mesh: DeviceMesh, door: Callable[..., Any], backend: str | None) -> str:
    """Equal steps of several calls; then rank 1 leaves out the backward of one call."""
    torch._dynamo.reset()

    def steps() -> None:
        with spanwise.exchange_errors(mesh):  # compiled code raises torch's own error where it waits
            for number in range(6):
                run(door, mesh, {"skipped": int(rank == 1 and number == 4)}, backend, times=3)

    return mismatch(steps)


@pytest.mark.parametrize("door", [scores, edges, recurrent, convolved, moved])
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=[pytest.mark.slow, pytest.mark.compiles])])
def test_a_backward_that_one_rank_leaves_out(
    gloo_pool: GlooPool, door: Callable[..., Any], backend: str | None
) -> None:
    for text in gloo_pool.run(2, skips, door, backend):
        assert "ranks disagree on call" in text and "backward of " in text, text


def counts_in_tensors(rank: int, mesh: DeviceMesh, backend: str | None) -> str:
    torch._dynamo.reset()
    run(logits_loss, mesh, {"count": torch.tensor(6)}, backend)
    return mismatch(lambda: run(logits_loss, mesh, {"count": torch.tensor([6, 3][rank])}, backend))


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=[pytest.mark.slow, pytest.mark.compiles])])
def test_counts_in_tensors_of_the_host_are_compared(gloo_pool: GlooPool, backend: str | None) -> None:
    for text in gloo_pool.run(2, counts_in_tensors, backend):
        assert "rank 0: cross_entropy(amount 6.0" in text and "rank 1: amount 3.0" in text, text


def over_two_axes(rank: int, mesh: DeviceMesh, backend: str | None) -> tuple[str, float]:
    torch._dynamo.reset()
    both = mesh["dp", "cp"]
    loss = spanwise.cross_entropy(torch.zeros(1, 4, 5), torch.tensor([[1, -100, 2, 0]]), both, num_valid=12).item()
    run(logits_loss, both, {"count": 12}, backend)
    return mismatch(lambda: run(logits_loss, both, {"count": 3 + rank // 3}, backend)), loss


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=[pytest.mark.slow, pytest.mark.compiles])])
def test_ranks_of_two_axes(gloo_pool: GlooPool, backend: str | None) -> None:
    axes: dict[str, Any] = {"mesh_shape": (2, 2), "mesh_dim_names": ("dp", "cp")}
    for text, loss in gloo_pool.run(4, over_two_axes, backend, **axes):
        assert "rank 3: amount 4.0" in text and loss == pytest.approx(math.log(5))

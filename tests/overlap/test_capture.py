"""Captured graphs: which collectives they have, and that all ranks' graphs together compute the model's gradients."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import spanwise
from spanwise.overlap.fx.capture import CaptureConfig, capture
from spanwise.overlap.fx.decoder import Axis, shapes
from tests.lockstep import Lockstep

TINY = CaptureConfig(layers=2, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=16, batch=2, device="cpu")
OPS = torch.ops._c10d_functional


def collectives(module: torch.fx.GraphModule, axes: dict[str, Axis]) -> Counter[tuple[str, str]]:
    """How many starts there are, by kind and axis."""
    axis = {group.name: name for name, group in axes.items()}
    starts = [n for n in module.graph.nodes if str(n.target).startswith("_c10d_functional") and "wait" not in n.name]
    return Counter((str(n.target).split(".")[1], axis[n.args[-1]]) for n in starts)


def reference(
    config: CaptureConfig, cos: torch.Tensor, sin: torch.Tensor, data: list[torch.Tensor], weights: Any
) -> Any:
    """The model on one device, with whole weights: plain torch."""
    take = iter(weights)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (config.dim,), next(take), 1e-5)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, next(take)).unflatten(-1, (-1, config.head_dim))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = config.head_dim // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)
        return torch.cat([turned.real, turned.imag], -1)

    x = data[0] if config.vocab is None else F.embedding(data[0], next(take))
    for _ in range(config.layers):
        h = norm(x)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(heads(h)), rotate(heads(h)), heads(h)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(out.permute(2, 0, 1, 3).flatten(2), next(take))
        h = norm(x)
        gate, up = F.linear(h, next(take)), F.linear(h, next(take))
        x = x + F.linear(F.silu(gate) * up, next(take))
    if config.vocab is None:
        return x
    return F.cross_entropy(F.linear(norm(x), next(take)).flatten(0, 1), data[1].flatten())


def cut_over_tp(config: CaptureConfig) -> list[int | None]:
    """The dim along which each parameter is split over tp; None for a norm, which every rank has whole."""
    layer = [None, 0, 0, 0, 1, None, 0, 0, 1]
    return layer * config.layers if config.vocab is None else [0, *layer * config.layers, None, 0]


@pytest.mark.parametrize(
    ("sizes", "exchange"),
    [
        ({}, ""),
        ({"dp": 2, "tp": 2, "layers": 1, "vocab": 24}, ""),
        pytest.param({"cp": 2, "layers": 1}, "needed", marks=pytest.mark.compiles),
        pytest.param({"cp": 4, "layers": 1}, "ring", marks=[pytest.mark.slow, pytest.mark.compiles]),
    ],
    ids=str,
)
def test_all_ranks_together_compute_the_gradients_of_the_model(sizes: dict[str, int], exchange: str) -> None:
    config = dataclasses.replace(TINY, dtype=torch.float64, **sizes)
    plan = causal_plan(config, exchange) if exchange else None
    torch.manual_seed(0)
    whole = [(config.dim,), *shapes(dataclasses.replace(config, tp=1))][1:] * config.layers
    if config.vocab is not None:
        whole = [(config.vocab, config.dim), *whole, (config.dim,), (config.vocab, config.dim)]
    weights = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in whole]
    angle = torch.randn(config.seq_len, 1, 1, config.head_dim // 2, dtype=torch.float64)
    shape = config.seq_len, config.batch
    cotangent = torch.randn(*shape, config.dim, dtype=torch.float64)
    if config.vocab is not None:
        cotangent = torch.ones((), dtype=torch.float64)
    data_of_dp = []
    for _ in range(config.dp):
        data = [torch.randn(*shape, config.dim, dtype=torch.float64, requires_grad=True)]
        if config.vocab is not None:
            data = [torch.randint(config.vocab, shape) for _ in range(2)]
        data_of_dp.append(data)
    expected = [reference(config, angle.cos(), angle.sin(), data, weights) for data in data_of_dp]
    torch.autograd.backward(expected, [cotangent] * config.dp)

    graphs, extra = [], []
    for rank in range(config.num_ranks):
        given: list[torch.Tensor] = []
        graphs.append(capture(dataclasses.replace(config, rank=rank), attention_of(plan, given) if plan else None))
        extra.append(given)
    inputs, tangents = [], []
    for rank, graph in enumerate(graphs):

        def own(x: torch.Tensor, axes: Any = graph.axes, of_tp: bool = True) -> torch.Tensor:
            """Of a tensor of the whole sequence, what the rank has."""
            of_cp = x if plan is None else x[tokens_of(plan, axes["cp"].index)]
            return of_cp.chunk(config.tp)[axes["tp"].index] if of_tp else of_cp

        data = [own(x.detach(), of_tp=config.vocab is None) for x in data_of_dp[rank // (config.tp * config.cp)]]
        shards = [_shard(w.detach(), c, graph.axes) for w, c in zip(weights, cut_over_tp(config), strict=True)]
        inputs.append([own(angle.cos(), of_tp=False), own(angle.sin(), of_tp=False), *data, *shards, *extra[rank]])
        tangents.append(cotangent if config.vocab else own(cotangent))
        if plan is not None:  # K/V travel in the open, and their gradients back
            for module in (graph.forward, graph.backward):
                rounds = config.cp - 1 if exchange == "ring" else 1
                assert collectives(module, graph.axes)["all_to_all_single", "cp"] == rounds * config.layers
    axes = [g.axes for g in graphs]
    results = Lockstep([g.forward for g in graphs], axes).run(inputs)
    for graph in graphs:
        names = [node.name for node in graph.backward.graph.nodes if node.op == "placeholder"]
        assert [name for name in names if name.startswith("tangents")] == names[-1:]
    saved = [[*result[1:], tangent] for result, tangent in zip(results, tangents, strict=True)]
    grads = Lockstep([g.backward for g in graphs], axes).run(saved)
    for rank, (result, grad) in enumerate(zip(results, grads, strict=True)):
        dp, cp, tp = rank // (config.tp * config.cp), graphs[rank].axes["cp"].index, graphs[rank].axes["tp"].index
        mine = slice(None) if plan is None else tokens_of(plan, cp)
        if config.vocab is None:
            torch.testing.assert_close(result[0], expected[dp][mine].chunk(config.tp)[tp])
            torch.testing.assert_close(grad[2], data_of_dp[dp][0].grad[mine].chunk(config.tp)[tp])
        else:
            torch.testing.assert_close(result[0], expected[dp])
        first = 3 if config.vocab is None else 4
        of_shards = grad[first : first + len(weights)]
        for shard, weight, cut in zip(of_shards, weights, cut_over_tp(config), strict=True):
            mean = weight.grad / (config.dp * config.cp)
            torch.testing.assert_close(shard, _shard(mean, cut, graphs[rank].axes))


def causal_plan(config: CaptureConfig, exchange: str = "needed") -> spanwise.Plan:
    heads = {"num_q_heads": config.heads // config.tp, "num_kv_heads": config.kv_heads // config.tp}
    return spanwise.make_plan(
        spanwise.SpanMask.causal(config.seq_len), config.cp, exchange=exchange, balancer="head_tail", block_size=2,
        head_dim=config.head_dim, dtype=config.dtype, keep_kv=True, **heads,
    )  # fmt: skip


def tokens_of(plan: spanwise.Plan, rank: int) -> torch.Tensor:
    return torch.cat([torch.arange(first, stop) for first, stop in plan.layout.runs(rank)])


def attention_of(plan: spanwise.Plan, given: list[torch.Tensor]) -> Any:
    """spanwise's own, by `plan`; the tensors that it takes are put into `given`."""

    def make(mesh: Any) -> Any:
        local = plan.local(mesh, "cpu", kernel="sdpa")
        given.extend(x for x in tree_leaves(local) if isinstance(x, torch.Tensor))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: Any) -> torch.Tensor:
            return spanwise.context_parallel_attention(q, k, v, local, mesh, kernel="sdpa")

        return attend, local

    return make


def _shard(weight: torch.Tensor, cut: int | None, axes: dict[str, Axis]) -> torch.Tensor:
    tp, dp = axes["tp"], axes["dp"]
    of_tp = weight if cut is None else weight.chunk(tp.size, cut)[tp.index]
    return of_tp.chunk(dp.size)[dp.index]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tp": 4}, "kv_heads must be a multiple of tp = 4, got 2"),
        ({"dp": 3}, "dim must be a multiple of dp \\* cp = 3, got 32"),
        ({"seq_len": 15, "tp": 2}, "seq_len must be a multiple of cp \\* tp = 2, got 15"),
        ({"rank": 1}, "rank must be in \\[0, dp \\* cp \\* tp = 1\\), got 1"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"device": "tpu"}, "device must be"),
    ],
)
def test_sizes_that_do_not_fit(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(TINY, **wrong)

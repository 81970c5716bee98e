"""Captured graphs: which collectives they have, and that all ranks' graphs together compute the model's gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import spanwise
from spanwise.overlap.fx.capture import CaptureConfig, capture
from spanwise.overlap.fx.decoder import Axis, shapes
from tests.lockstep import Lockstep

TINY = CaptureConfig(layers=1, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=16, batch=2, vocab=24, device="cpu")
OPS = torch.ops._c10d_functional


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

    x = F.embedding(data[0], next(take))
    for _ in range(config.layers):
        h = norm(x)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(heads(h)), rotate(heads(h)), heads(h)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(out.permute(2, 0, 1, 3).flatten(2), next(take))
        h = norm(x)
        gate, up = F.linear(h, next(take)), F.linear(h, next(take))
        x = x + F.linear(F.silu(gate) * up, next(take))
    return F.cross_entropy(F.linear(norm(x), next(take)).flatten(0, 1), data[1].flatten())


CUT_OVER_TP = [None, 0, 0, 0, 1, None, 0, 0, 1]  # dim of each of a layer's parameters; every rank has norms whole


@pytest.mark.parametrize(
    ("sizes", "exchange"),
    [
        ({"dp": 2, "tp": 2}, ""),
        pytest.param({"cp": 2}, "needed", marks=pytest.mark.compiles),
        pytest.param({"cp": 4}, "ring", marks=[pytest.mark.slow, pytest.mark.compiles]),
    ],
    ids=str,
)
def test_all_ranks_together_compute_the_gradients_of_the_model(sizes: dict[str, int], exchange: str) -> None:
    config = dataclasses.replace(TINY, dtype=torch.float64, **sizes)
    plan = causal_plan(config, exchange) if exchange else None
    torch.manual_seed(0)
    table = config.vocab or 0, config.dim
    whole = [table, *shapes(dataclasses.replace(config, tp=1)) * config.layers, (config.dim,), table]
    cuts = [0, *CUT_OVER_TP * config.layers, None, 0]
    weights = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in whole]
    angle = torch.randn(config.seq_len, 1, 1, config.head_dim // 2, dtype=torch.float64)
    data = [[torch.randint(table[0], (config.seq_len, config.batch)) for _ in range(2)] for _ in range(config.dp)]
    losses = [reference(config, angle.cos(), angle.sin(), of_dp, weights) for of_dp in data]
    torch.autograd.backward(losses)

    graphs, inputs, replicas = [], [], config.tp * config.cp
    for rank in range(config.num_ranks):
        given: list[torch.Tensor] = []
        graphs.append(capture(dataclasses.replace(config, rank=rank), attention_of(plan, given) if plan else None))
        axes = graphs[-1].axes
        mine = slice(None) if plan is None else tokens_of(plan, axes["cp"].index)
        own = [x[mine] for x in (angle.cos(), angle.sin(), *data[rank // replicas])]
        inputs.append([*own, *(_shard(w.detach(), c, axes) for w, c in zip(weights, cuts, strict=True)), *given])
        for module in (graphs[-1].forward, graphs[-1].backward) if plan else ():  # K/V, and their gradients back
            exchanges = [n for n in module.graph.nodes if n.target is OPS.all_to_all_single.default]
            assert len(exchanges) == (config.cp - 1 if exchange == "ring" else 1) * config.layers
            assert all(axes["cp"].name in n.args for n in exchanges)
    of_ranks = [g.axes for g in graphs]
    results = Lockstep([g.forward for g in graphs], of_ranks).run(inputs)
    saved = [[*result[1:], torch.ones_like(result[0])] for result in results]
    for dp, loss in enumerate(losses):
        of_dp = [result[0] for result in results[dp * replicas : (dp + 1) * replicas]]
        torch.testing.assert_close(torch.stack(of_dp).mean(), loss.detach())
    for graph, grad in zip(graphs, Lockstep([g.backward for g in graphs], of_ranks).run(saved), strict=True):
        names = [node.name for node in graph.backward.graph.find_nodes(op="placeholder")]
        assert [name for name in names if name.startswith("tangents")] == names[-1:]
        for shard, weight, of_tp in zip(grad[4 : 4 + len(weights)], weights, cuts, strict=True):
            torch.testing.assert_close(shard, _shard(weight.grad / config.dp, of_tp, graph.axes))


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


def test_sizes_that_do_not_fit() -> None:
    for wrong in ({"tp": 4}, {"dp": 3}, {"seq_len": 15, "tp": 2}, {"rank": 1}, {"layers": 0}, {"device": "tpu"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong.values()))}"):
            dataclasses.replace(TINY, **wrong)  # type: ignore[arg-type]

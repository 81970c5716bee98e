"""Captured graphs: which collectives they have, and that all ranks' graphs together compute the model's gradients."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.interpreter import Interpreter
from torch.nn import functional as F

from spanwise.overlap.capture import Axis, CaptureConfig, Graphs, capture, fake_world, shapes

TINY = CaptureConfig(layers=2, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=16, batch=2, device="cpu")
OPS = torch.ops._c10d_functional


def collectives(module: torch.fx.GraphModule, axes: dict[str, Axis]) -> Counter[tuple[str, str]]:
    """How many starts there are, by kind and axis."""
    axis = {group.name: name for name, group in axes.items()}
    starts = [n for n in module.graph.nodes if str(n.target).startswith("_c10d_functional") and "wait" not in n.name]
    return Counter((str(n.target).split(".")[1], axis[n.args[-1]]) for n in starts)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_collectives_of_a_layer(device: str) -> None:
    config = dataclasses.replace(TINY, dp=2, tp=2, dtype=torch.bfloat16, device=device)
    graphs = capture(config)
    layers, matrices = config.layers, len(shapes(config))
    assert collectives(graphs.forward, graphs.axes) == {
        ("all_gather_into_tensor", "dp"): matrices * layers,
        ("all_gather_into_tensor", "tp"): 2 * layers,
        ("reduce_scatter_tensor", "tp"): 2 * layers,
    }
    assert collectives(graphs.backward, graphs.axes) == {
        ("all_gather_into_tensor", "dp"): matrices * layers,
        ("reduce_scatter_tensor", "dp"): matrices * layers,
        ("all_gather_into_tensor", "tp"): 2 * layers,
        ("reduce_scatter_tensor", "tp"): 2 * layers,
        ("all_reduce", "tp"): 2 * layers,
    }
    assert not dist.is_initialized()


def test_bytes_of_a_layer() -> None:
    config = dataclasses.replace(TINY, layers=1, dp=2, tp=2, dtype=torch.bfloat16)
    graphs = capture(config)
    dp = graphs.axes["dp"].name
    gathered = sum(torch.Size(s).numel() for s in shapes(config))
    for module in (graphs.forward, graphs.backward):
        starts = module.graph.find_nodes(op="call_function", target=OPS.all_gather_into_tensor.default)
        of_dp = [n.meta["val"] for n in starts if n.args[-1] == dp]
        assert sum(x.numel() * x.element_size() for x in of_dp) == 2 * gathered
        activations = [n.meta["val"] for n in starts if n.args[-1] != dp]
        assert {(tuple(x.shape), x.dtype) for x in activations} == {((16, 2, 32), torch.bfloat16)}
    starts = graphs.backward.graph.find_nodes(op="call_function", target=OPS.reduce_scatter_tensor.default)
    reduced = [n.args[0].meta["val"] for n in starts if n.args[-1] == dp]
    assert {x.dtype for x in reduced} == {torch.float32} and sum(x.numel() for x in reduced) == gathered


def test_starts_and_waits_are_apart_and_values_say_their_device() -> None:
    graphs = capture(dataclasses.replace(TINY, dp=2, tp=2, vocab=64, device="cuda"))
    for module in (graphs.forward, graphs.backward):
        module.graph.lint()
        values = [n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        assert {x.device for x in values} == {torch.device("cuda", 0)}
        assert not any(torch.device("cpu") in (*n.args, *n.kwargs.values()) for n in module.graph.nodes)
        for node in module.graph.nodes:
            if str(node.target).startswith("_c10d_functional") and node.target != OPS.wait_tensor.default:
                assert [user.target for user in node.users] == [OPS.wait_tensor.default]


class Lockstep:
    """Runs the graphs of all ranks side by side, node by node; collectives are computed from all ranks' operands."""

    def __init__(self, modules: Sequence[torch.fx.GraphModule], axes: Sequence[dict[str, Axis]]) -> None:
        self.ranks = [Interpreter(module) for module in modules]
        self.axes = [{axis.name: axis for axis in of_rank.values()} for of_rank in axes]

    def run(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple[Any, ...]]:
        nodes = [list(rank.module.graph.nodes) for rank in self.ranks]
        feeds = [iter(of_rank) for of_rank in inputs]
        values: list[dict[torch.fx.Node, Any]] = [{} for _ in self.ranks]
        for row in zip(*nodes, strict=True):
            assert len({(node.op, node.name, str(node.target)) for node in row}) == 1
            operands = [torch.fx.map_arg((n.args, n.kwargs), v.get) for n, v in zip(row, values, strict=True)]
            for rank, node in enumerate(row):
                if node.op == "placeholder":
                    values[rank][node] = next(feeds[rank])
                elif node.op == "output":
                    continue
                elif str(node.target).startswith("_c10d_functional"):
                    values[rank][node] = self.collective(node, rank, [args for args, _ in operands])
                else:
                    args, kwargs = operands[rank]
                    values[rank][node] = node.target(*args, **kwargs)
        return [operands[rank][0][0] for rank in range(len(self.ranks))]

    def collective(self, node: torch.fx.Node, rank: int, args: Sequence[tuple[Any, ...]]) -> torch.Tensor:
        if node.target == OPS.wait_tensor.default:
            return args[rank][0]
        axis = self.axes[rank][args[rank][-1]]
        parts = [args[other][0] for other in axis.ranks]
        if node.target == OPS.all_gather_into_tensor.default:
            return torch.cat(parts)
        stacked = torch.stack(parts)
        total = stacked.amax(0) if args[rank][1] == "max" else stacked.sum(0)
        return total if node.target == OPS.all_reduce.default else total.chunk(axis.size)[axis.index].clone()


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


@pytest.mark.parametrize("sizes", [{}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "vocab": 24}])
def test_all_ranks_together_compute_the_gradients_of_the_model(sizes: dict[str, int]) -> None:
    config = dataclasses.replace(TINY, dtype=torch.float64, **sizes)
    graphs = [capture(dataclasses.replace(config, rank=rank)) for rank in range(config.num_ranks)]
    torch.manual_seed(0)
    whole = [(config.dim,), *shapes(dataclasses.replace(config, tp=1))][1:] * config.layers
    if config.vocab is not None:
        whole = [(config.vocab, config.dim), *whole, (config.dim,), (config.vocab, config.dim)]
    weights = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in whole]
    angle = torch.randn(config.seq_len, 1, 1, config.head_dim // 2, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    shape = config.seq_len, config.batch
    cotangent = torch.randn(*shape, config.dim, dtype=torch.float64) if config.vocab is None else torch.ones(())
    expected, data_of_dp = [], []
    for _ in range(config.dp):
        if config.vocab is None:
            data = [torch.randn(*shape, config.dim, dtype=torch.float64, requires_grad=True)]
        else:
            data = [torch.randint(config.vocab, shape) for _ in range(2)]
        expected.append(reference(config, cos, sin, data, weights))
        data_of_dp.append(data)
    torch.autograd.backward(expected, [cotangent.to(x.dtype) for x in expected])

    inputs = [_rank_inputs(config, g, cos, sin, data_of_dp[r // config.tp], weights) for r, g in enumerate(graphs)]
    axes = [g.axes for g in graphs]
    results = Lockstep([g.forward for g in graphs], axes).run(inputs)
    backward_inputs = []
    for rank, graph in enumerate(graphs):
        tangent = cotangent if config.vocab else cotangent.chunk(config.tp)[rank % config.tp]
        names = [node.name for node in graph.backward.graph.nodes if node.op == "placeholder"]
        assert [n for n in names if n.startswith("tangents")] == names[-1:]
        backward_inputs.append([*results[rank][1:], tangent.to(results[rank][0].dtype)])
    grads = Lockstep([g.backward for g in graphs], axes).run(backward_inputs)
    for rank in range(config.num_ranks):
        dp, tp = divmod(rank, config.tp)
        whole_out = expected[dp]
        torch.testing.assert_close(results[rank][0], whole_out if config.vocab else whole_out.chunk(config.tp)[tp])
        num_data = len(data_of_dp[dp])
        if config.vocab is None:
            torch.testing.assert_close(grads[rank][2], data_of_dp[dp][0].grad.chunk(config.tp)[tp])
        for grad, weight, cut in zip(grads[rank][2 + num_data :], weights, cut_over_tp(config), strict=True):
            mean = weight.grad / config.dp
            torch.testing.assert_close(grad, _shard(mean, cut, config, dp, tp))


def _shard(weight: torch.Tensor, cut: int | None, config: CaptureConfig, dp: int, tp: int) -> torch.Tensor:
    of_tp = weight if cut is None else weight.chunk(config.tp, cut)[tp]
    return of_tp.chunk(config.dp)[dp]


def _rank_inputs(
    config: CaptureConfig, graphs: Graphs, cos: torch.Tensor, sin: torch.Tensor, data: Any, weights: Any
) -> list[torch.Tensor]:
    dp, tp = graphs.axes["dp"].index, graphs.axes["tp"].index
    shards = [_shard(w.detach(), cut, config, dp, tp) for w, cut in zip(weights, cut_over_tp(config), strict=True)]
    own = data if config.vocab else [data[0].detach().chunk(config.tp)[tp]]
    return [cos, sin, *own, *shards]


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


def test_no_groups_are_left_and_none_are_touched() -> None:
    with pytest.raises(ValueError, match="cp = 2: pass attention="):
        capture(dataclasses.replace(TINY, cp=2))
    with pytest.raises(ZeroDivisionError), fake_world(dataclasses.replace(TINY, dp=2)):
        assert dist.get_world_size() == 2
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with fake_world(dataclasses.replace(TINY, dp=2)), pytest.raises(RuntimeError, match="destroy_process_group"):
        capture(TINY)


def test_group_names_and_ranks() -> None:
    config = dataclasses.replace(TINY, dp=2, tp=2, cp=2, rank=5)
    with fake_world(config) as axes:
        assert {name: axis.ranks for name, axis in axes.items()} == {"dp": (1, 3, 5, 7), "cp": (5, 7), "tp": (4, 5)}
        assert [axis.index for axis in axes.values()] == [2, 0, 1]
    with fake_world(config) as again:
        assert again == axes and len({axis.name for axis in again.values()}) == 3

"""One rank of `overlap_link.py`: a model with sharded parameters or activations, compiled in several ways."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from hosts import serve, timed
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.nn import functional as F

from spanwise import CPU_HOST, overlap
from spanwise.hardware import Link
from spanwise.overlap import _torch
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.measure import measure
from spanwise.overlap.costs.roofline import VECTOR_UNITS, CostModel
from spanwise.overlap.dag import Kind
from spanwise.overlap.engine import simulate
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import Cost
from spanwise.overlap.split.choose import PIECES, cut_graphs

GraphPass = Callable[[fx.GraphModule], fx.GraphModule]
Step = Callable[[], list[torch.Tensor]]


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Costs of the step, and of each way what was predicted, measured and computed."""
    torch.compiler.reset()
    tokens, split = job["model"].pop("tokens"), job["split"]
    model = Model(**job["model"], layer=Parallel if split else Feed)
    x = torch.randn(tokens, job["model"]["dim"], generator=torch.Generator().manual_seed(1 + job["rank"]))
    recorder = Recorder()
    steps = {"unscheduled": step_of(model, x, recorder)}
    outputs = {"unscheduled": steps["unscheduled"]()}
    cost = measure(*recorder.graphs.values(), repeats=5, fuse=False)
    if split and job["ways"]:
        graphs = list(recorder.graphs.values())
        pieces = [piece for gm in graphs for piece in cut_graphs(gm, PIECES)]
        here = dataclasses.replace(CPU_HOST, links=(Link(job["rate"] / 8, CPU_HOST.links[-1].latency),))
        rest = CostModel(here, rates=VECTOR_UNITS, fuse=False)  # of copies that no piece has
        cost = measure(*graphs, *pieces, fallback=rest, repeats=5, fuse=False)
    dags = [to_dag(gm, cost).dag for gm in recorder.graphs.values()]
    found: dict[str, Any] = {
        "compute": sum(dag.compute_ms for dag in dags),
        "communication": sum(float(dag.ms[dag.kinds == Kind.START].sum()) for dag in dags),
        "bound": sum(lower_bounds(dag).makespan for dag in dags),
    }
    predicted = {"unscheduled": sum(simulate(dag).makespan for dag in dags)}
    for way in job["ways"]:
        if way == "PyTorch":
            recorder = Recorder(pytorch_pass(cost))
            steps[way] = step_of(model, x, recorder)
            outputs[way] = steps[way]()
            predicted[way] = sum(simulate(to_dag(gm, cost).dag).makespan for gm in recorder.graphs.values())
        elif way in ("spanwise", "spanwise, split"):
            steps[way], outputs[way], results = ours(model, x, "aot_eager", cost, split=way != "spanwise")
            predicted[way] = sum(result.timeline.makespan for result in results)
        elif way == "Inductor":
            steps[way] = step_of(model, x, "inductor")
            outputs[way] = steps[way]()
        elif way == "spanwise, Inductor":
            *_, results = ours(model, x, "inductor", lambda node: 0.0, bucket=False)  # for its graphs
            cost = measure(*(result.graph_module for result in results), repeats=5)
            steps[way], outputs[way], results = ours(model, x, "inductor", cost)
            predicted["Inductor"] = sum(result.before.makespan for result in results)
            predicted[way] = sum(result.timeline.makespan for result in results)
    times = timed({way: steps[way] for way in job["ways"]}, job["repeats"])
    return {"costs": found, "predicted": predicted, "times": times, "outputs": outputs}


def ours(
    model: nn.Module, x: torch.Tensor, name: str, cost: Cost, **options: Any
) -> tuple[Step, list[torch.Tensor], list[overlap.Result]]:
    """The step by our backend, what it returns, and what was made of its graphs."""
    results: list[overlap.Result] = []
    step = step_of(model, x, overlap.backend(name, cost=cost, on_result=results.append, **options))
    return step, step(), results


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Dim 0 of all ranks; its gradient is reduce-scattered."""
    assert dist.group.WORLD is not None
    return all_gather_tensor_autograd(x, 0, dist.group.WORLD)


class Feed(nn.Module):
    """Two linear layers whose weights are gathered for each use (ZeRO-3, FSDP)."""

    dims = 0, 0  # along which the ranks hold parts of the weights

    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts = (w.chunk(ranks, dim)[rank].clone() for w, dim in zip((up, down), self.dims, strict=True))
        self.up, self.down = map(nn.Parameter, parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, gathered(self.up))), gathered(self.down))


class Parallel(Feed):
    """The same over all ranks, activations in shards of the tokens: a gather before, a reduce-scatter after."""

    dims = 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(F.silu(F.linear(gathered(x), self.up)), self.down)
        assert dist.group.WORLD is not None
        return reduce_scatter_tensor_autograd(part, "sum", 0, dist.group.WORLD)


class Model(nn.Module):
    """Residual blocks of two linear layers each, `Feed` or `Parallel`."""

    def __init__(self, layers: int, dim: int, ffn: int, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        weights = torch.Generator().manual_seed(0)  # the same on all ranks

        def draw(out_dim: int, in_dim: int) -> torch.Tensor:
            return torch.randn(out_dim, in_dim, generator=weights) * in_dim**-0.5

        self.layers = nn.ModuleList(layer(draw(ffn, dim), draw(dim, ffn)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, x.shape[-1:]))
        return x.square().mean()


class Recorder:
    """A backend of torch.compile that runs graphs as they are, after a pass.

    Attributes:
        graphs: after the pass, "forward" and "backward".
    """

    def __init__(self, graph_pass: GraphPass = lambda gm: gm) -> None:
        self.graphs: dict[str, fx.GraphModule] = {}

        def keep(name: str, gm: fx.GraphModule) -> Any:
            self.graphs[name] = gm = graph_pass(gm)
            return make_boxed_func(gm.forward)

        self._compile = aot_autograd(
            fw_compiler=lambda gm, inputs: keep("forward", gm),
            bw_compiler=lambda gm, inputs: keep("backward", gm),
            partition_fn=min_cut_rematerialization_partition,
        )

    def __call__(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return self._compile(gm, inputs)


def pytorch_pass(cost: Cost) -> GraphPass:
    """PyTorch's own pass, reordering alone, with the same costs."""

    def run(gm: fx.GraphModule) -> fx.GraphModule:
        def estimate(node: fx.Node, size: int | None) -> float:
            return 0.0 if size == 0 else cost(node)

        return _torch.torch_overlap_pass(copy.deepcopy(gm), estimate, bucket=False)

    return run


def step_of(model: nn.Module, x: torch.Tensor, backend: Any) -> Callable[[], list[torch.Tensor]]:
    """Forward and backward of the compiled model; returns the loss and all gradients."""
    run = torch.compile(model, backend=backend, dynamic=False)
    parameters = list(model.parameters())

    def step() -> list[torch.Tensor]:
        loss = run(x)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return step


if __name__ == "__main__":
    serve(answer)

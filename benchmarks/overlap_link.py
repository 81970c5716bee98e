"""A training step over a slow link, run and timed: unscheduled, by PyTorch's overlap pass, by `spanwise.overlap`.

    sudo python -m benchmarks.overlap_link --inductor --shares 1 0.5 --out benchmarks/results/overlap-link-cpu.json
    sudo python -m benchmarks.overlap_link --layers 2 --repeats 3               # a minute or two

Two hosts (`hosts`) of one process each are joined by a link with a limited rate. A model with sharded parameters
gathers each weight where it is used and reduce-scatters its gradient. One step, forward and backward, is compiled by
``torch.compile``: as AOTAutograd leaves it (unscheduled), with PyTorch's pass on the same graphs and the same costs,
with `overlap.backend("aot_eager")`, and, with `--inductor`, by Inductor as it is and by `overlap.backend("inductor")`.
All are timed in turns within one run.

Costs are measured on the hosts by `overlap.measure`, at a first rate; then the link gets the rate at which
communication equals compute, and what is reported was measured again at that one. Predicted is the simulation of the
order that ran with those costs. Gradients of all ways are compared with those of the unscheduled step.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional as F

from benchmarks.hosts import check, machine, run, spans, timed
from benchmarks.publish import publish
from spanwise import overlap
from spanwise.overlap import _torch
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.measure import measure
from spanwise.overlap.dag import Kind
from spanwise.overlap.engine import simulate
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import Cost

FIRST_RATE = 400e6  # bits/s


class Model(nn.Module):
    """Residual blocks of two linear layers each, whose weights are gathered for each use (ZeRO-3, FSDP)."""

    def __init__(self, layers: int, dim: int, ffn: int) -> None:
        super().__init__()
        weights = torch.Generator().manual_seed(0)  # the same on all ranks
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weights = nn.ParameterList()
        for out_dim, in_dim in ((ffn, dim), (dim, ffn)) * layers:
            weight = torch.randn(out_dim, in_dim, generator=weights) * in_dim**-0.5
            self.weights.append(weight.chunk(ranks)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert dist.group.WORLD is not None
        gathered = functools.partial(all_gather_tensor_autograd, gather_dim=0, group=dist.group.WORLD)
        for up, down in zip(self.weights[::2], self.weights[1::2], strict=True):
            h = F.rms_norm(x, x.shape[-1:])
            x = x + F.linear(F.silu(F.linear(h, gathered(up))), gathered(down))
        return x.square().mean()


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Costs of the step, and of each way what was predicted, measured and computed."""
    size, ways = job["model"], job["ways"]
    model = Model(size["layers"], size["dim"], size["ffn"])
    x = torch.randn(size["tokens"], size["dim"], generator=torch.Generator().manual_seed(1 + job["rank"]))
    steps: dict[str, Callable[[], list[torch.Tensor]]] = {}
    predicted: dict[str, float] = {}

    def compiled(way: str, backend: Any) -> None:
        call = torch.compile(model, backend=backend, dynamic=False)
        parameters = list(model.parameters())

        def step() -> list[torch.Tensor]:
            loss = call(x)
            return [loss.detach(), *torch.autograd.grad(loss, parameters)]

        step()
        steps[way] = step

    def kept(graphs: list[fx.GraphModule], graph_pass: Callable[[fx.GraphModule], fx.GraphModule]) -> Any:
        """A backend that runs graphs as they are after a pass, and keeps them."""

        def schedule(gm: fx.GraphModule) -> fx.GraphModule:
            graphs.append(graph_pass(gm))
            return graphs[-1]

        return lambda gm, inputs: _torch.compile_aot_eager(gm, inputs, schedule)

    def ours(way: str, name: str, cost: Cost, **options: Any) -> list[overlap.Result]:
        results: list[overlap.Result] = []
        compiled(way, overlap.backend(name, cost=cost, on_result=results.append, **options))
        predicted[way] = sum(each.timeline.makespan for each in results)
        return results

    graphs: list[fx.GraphModule] = []
    compiled("unscheduled", kept(graphs, lambda gm: gm))
    cost = measure(*graphs, repeats=5, fuse=False)
    dags = [to_dag(gm, cost).dag for gm in graphs]
    costs = {
        "compute": sum(dag.compute_ms for dag in dags),
        "communication": sum(float(dag.ms[dag.kinds == Kind.START].sum()) for dag in dags),
        "bound": sum(lower_bounds(dag).makespan for dag in dags),
    }
    predicted["unscheduled"] = sum(simulate(dag).makespan for dag in dags)
    if "PyTorch" in ways:
        reordered: list[fx.GraphModule] = []
        compiled("PyTorch", kept(reordered, functools.partial(_pytorch_pass, cost)))
        predicted["PyTorch"] = sum(simulate(to_dag(gm, cost).dag).makespan for gm in reordered)
        ours("spanwise", "aot_eager", cost)
    if "Inductor" in ways:
        compiled("Inductor", "inductor")
        name = "spanwise, Inductor"
        first = ours(name, "inductor", lambda node: 0.0, bucket=False)  # for its graphs
        results = ours(name, "inductor", measure(*(each.graph_module for each in first), repeats=5))
        predicted["Inductor"] = sum(each.before.makespan for each in results)
    outputs = {way: steps[way]() for way in ways}
    times = timed({way: steps[way] for way in ways}, job["repeats"]) if ways else {}
    return {"costs": costs, "predicted": predicted, "times": times, "outputs": outputs}


def _pytorch_pass(cost: Cost, gm: fx.GraphModule) -> fx.GraphModule:
    """PyTorch's own pass, reordering alone, with the same costs."""

    def estimate(node: fx.Node, size: int | None) -> float:
        return 0.0 if size == 0 else cost(node)

    return _torch.torch_overlap_pass(copy.deepcopy(gm), estimate, bucket=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("dim", 768), ("tokens", 1024), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0], help="communication over compute")
    parser.add_argument("--inductor", action="store_true", help="compile by Inductor, too")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    check()
    model = {"layers": args.layers, "dim": args.dim, "ffn": 4 * args.dim, "tokens": args.tokens}
    result: dict[str, Any] = {"machine": machine(), "model": model, "rows": []}
    ways = ["unscheduled", "PyTorch", "spanwise", *(["Inductor", "spanwise, Inductor"] if args.inductor else [])]
    job = {"model": model, "repeats": args.repeats}
    first = run(answer, job | {"ways": []}, 2, FIRST_RATE)[0]["costs"]
    for share in args.shares:
        # A collective's time is its bytes over the rate, to a few percent.
        rate = FIRST_RATE * first["communication"] / (share * first["compute"])
        answers = run(answer, job | {"ways": ways}, 2, rate)
        costs = {name: max(each["costs"][name] for each in answers) for name in first}
        taken = {way: [1e3 * one for one in seconds] for way, seconds in spans(answers).items()}
        result["rows"] += [{"rate": rate, "share": share, **costs, **row_of(way, answers, taken)} for way in ways]
    publish(result, args.out)


def row_of(way: str, answers: list[dict[str, Any]], taken: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of a way, from the first start to the last end, and the largest difference of its gradients."""
    median = statistics.median(taken[way])
    pairs = [pair for each in answers for pair in zip(*(each["outputs"][x] for x in (way, "unscheduled")), strict=True)]
    return {
        "way": way, "predicted": max(each["predicted"][way] for each in answers), "measured": median,
        "least": min(taken[way]), "all": taken[way], "faster": statistics.median(taken["unscheduled"]) / median,
        "difference": max(float((x - y).abs().max()) for x, y in pairs),
    }  # fmt: skip


if __name__ == "__main__":
    main()

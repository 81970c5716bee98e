"""A training step over a slow link, run and timed: unscheduled, by PyTorch's overlap pass, by `spanwise.overlap`.

    sudo python -m benchmarks.overlap_link --inductor --shares 1 0.5 --out benchmarks/results/overlap-link-cpu.json
    sudo python -m benchmarks.overlap_link --split --out benchmarks/results/overlap-link-split-cpu.json
    sudo python -m benchmarks.overlap_link --layers 2 --repeats 3               # a minute or two

Two hosts (`hosts`) of one process each are joined by a link with a limited rate. A model with sharded parameters
gathers each weight where it is used and reduce-scatters its gradient. One step, forward and backward, is compiled by
``torch.compile``: as AOTAutograd leaves it (unscheduled), with PyTorch's pass on the same graphs and the same costs,
with `overlap.backend("aot_eager")`, and, with `--inductor`, by Inductor as it is and by `overlap.backend("inductor")`.
All are timed in turns within one run.

With `--split`, weights are split over the ranks and activations sharded by tokens (tensor and sequence parallelism):
a gather before two linear layers and a reduce-scatter after them, with nothing else to run. Timed are the schedules of
the whole graphs and those in pieces (`split=True`); operators of pieces are measured, too.

Costs are measured on the hosts by `overlap.measure`, at a first rate; then the link gets the rate at which
communication equals compute, and what is reported was measured again at that one. Predicted is the simulation of the
order that ran with those costs; the floor is the larger of all compute and all communication. Gradients of all ways are
compared with those of the unscheduled step.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.nn import functional as F

from benchmarks.hosts import check, machine, run, spans, timed
from benchmarks.publish import write
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

FIRST_RATE = 400e6  # bits/s


class Model(nn.Module):
    """Residual blocks of two linear layers each.

    Their weights are gathered for each use (ZeRO-3, FSDP); with `parallel`, they are split over the ranks and
    activations by tokens: a gather before, a reduce-scatter after.
    """

    def __init__(self, layers: int, dim: int, ffn: int, parallel: bool) -> None:
        super().__init__()
        weights = torch.Generator().manual_seed(0)  # the same on all ranks
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.parallel, self.weights = parallel, nn.ParameterList()
        for _ in range(layers):
            for out_dim, in_dim, axis in ((ffn, dim, 0), (dim, ffn, int(parallel))):
                weight = torch.randn(out_dim, in_dim, generator=weights) * in_dim**-0.5
                self.weights.append(weight.chunk(ranks, axis)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert dist.group.WORLD is not None
        gathered = functools.partial(all_gather_tensor_autograd, gather_dim=0, group=dist.group.WORLD)
        for up, down in zip(self.weights[::2], self.weights[1::2], strict=True):
            h = F.rms_norm(x, x.shape[-1:])
            if self.parallel:
                part = F.linear(F.silu(F.linear(gathered(h), up)), down)
                x = x + reduce_scatter_tensor_autograd(part, "sum", 0, dist.group.WORLD)
            else:
                x = x + F.linear(F.silu(F.linear(h, gathered(up))), gathered(down))
        return x.square().mean()


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Costs of the step, and of each way what was predicted, measured and computed."""
    size, split = job["model"], job["split"]
    model = Model(size["layers"], size["dim"], size["ffn"], split)
    x = torch.randn(size["tokens"], size["dim"], generator=torch.Generator().manual_seed(1 + job["rank"]))
    steps: dict[str, Callable[[], list[torch.Tensor]]] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    predicted: dict[str, float] = {}

    def compiled(way: str, backend: Any) -> None:
        call = torch.compile(model, backend=backend, dynamic=False)
        parameters = list(model.parameters())

        def step() -> list[torch.Tensor]:
            loss = call(x)
            return [loss.detach(), *torch.autograd.grad(loss, parameters)]

        steps[way], outputs[way] = step, step()

    def kept(graphs: list[fx.GraphModule], graph_pass: Callable[[fx.GraphModule], fx.GraphModule]) -> Any:
        """A backend that runs graphs as they are after a pass, and keeps them."""

        def schedule(gm: fx.GraphModule) -> fx.GraphModule:
            graphs.append(graph_pass(gm))
            return graphs[-1]

        return lambda gm, inputs: _torch.compile_aot_eager(gm, inputs, schedule)

    def ours(way: str, name: str, cost: Cost, **options: Any) -> list[overlap.Result]:
        results: list[overlap.Result] = []
        compiled(way, overlap.backend(name, cost=cost, on_result=results.append, **options))
        return results

    graphs: list[fx.GraphModule] = []
    compiled("unscheduled", kept(graphs, lambda gm: gm))
    cost = measure(*graphs, repeats=5, fuse=False)
    if split and job["ways"]:
        pieces = [piece for gm in graphs for piece in cut_graphs(gm, PIECES)]
        here = dataclasses.replace(CPU_HOST, links=(Link(job["rate"] / 8, CPU_HOST.links[-1].latency),))
        rest = CostModel(here, rates=VECTOR_UNITS, fuse=False)  # of copies that no piece has
        cost = measure(*graphs, *pieces, fallback=rest, repeats=5, fuse=False)
    dags = [to_dag(gm, cost).dag for gm in graphs]
    costs = {
        "compute": sum(dag.compute_ms for dag in dags),
        "communication": sum(float(dag.ms[dag.kinds == Kind.START].sum()) for dag in dags),
        "bound": sum(lower_bounds(dag).makespan for dag in dags),
    }
    predicted["unscheduled"] = sum(simulate(dag).makespan for dag in dags)
    for way in job["ways"]:
        if way == "PyTorch":
            reordered: list[fx.GraphModule] = []
            compiled(way, kept(reordered, functools.partial(_pytorch_pass, cost)))
            predicted[way] = sum(simulate(to_dag(gm, cost).dag).makespan for gm in reordered)
        elif way in ("spanwise", "spanwise, split"):
            results = ours(way, "aot_eager", cost, split=way != "spanwise")
            predicted[way] = sum(each.timeline.makespan for each in results)
        elif way == "Inductor":
            compiled(way, "inductor")
        elif way == "spanwise, Inductor":
            first = ours(way, "inductor", lambda node: 0.0, bucket=False)  # for its graphs
            results = ours(way, "inductor", measure(*(each.graph_module for each in first), repeats=5))
            predicted["Inductor"] = sum(each.before.makespan for each in results)
            predicted[way] = sum(each.timeline.makespan for each in results)
    times = timed({way: steps[way] for way in job["ways"]}, job["repeats"])
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
    parser.add_argument("--split", action="store_true", help="tensor parallelism, and schedules in pieces")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    check()
    model = {"layers": args.layers, "dim": args.dim, "ffn": 4 * args.dim, "tokens": args.tokens}
    result: dict[str, Any] = {"machine": machine(), "model": model, "rows": []}
    print(f"{result['machine']}\n{model}")
    ways = ["unscheduled", "PyTorch", "spanwise", *(["Inductor", "spanwise, Inductor"] if args.inductor else [])]
    ways += ["spanwise, split"] if args.split else []
    job = {"model": model, "split": args.split, "repeats": args.repeats}
    first = run("benchmarks.overlap_link", job | {"rate": FIRST_RATE, "ways": []}, 2, FIRST_RATE)[0]["costs"]
    for share in args.shares:
        # A collective's time is its bytes over the rate, to a few percent.
        rate = FIRST_RATE * first["communication"] / (share * first["compute"])
        answers = run("benchmarks.overlap_link", job | {"rate": rate, "ways": ways}, 2, rate)
        costs = {name: max(each["costs"][name] for each in answers) for name in first}
        print(f"\n{rate / 1e6:.0f} Mbit/s; milliseconds of a step: {costs}")
        print(f"{'':<20}{'predicted':>10}{'measured':>10}{'least':>10}{'faster':>8}{'largest difference':>20}")
        for row in rows(answers):
            result["rows"].append({"rate": rate, "share": share, **costs, **row})
            print(
                f"{row['way']:<20}{row['predicted']:>10.0f}{row['measured']:>10.0f}{row['least']:>10.0f}"
                f"{row['faster']:>7.2f}x{row['difference']:>20.1e}",
                flush=True,
            )
    write(result, args.out)


def rows(answers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One for each way; milliseconds from the first start to the last end."""
    taken_by = {way: [1e3 * one for one in seconds] for way, seconds in spans(answers).items()}
    for way, taken in taken_by.items():
        outputs = [(each["outputs"][way], each["outputs"]["unscheduled"]) for each in answers]
        yield {
            "way": way, "predicted": max(each["predicted"][way] for each in answers),
            "measured": statistics.median(taken), "least": min(taken), "all": taken,
            "faster": statistics.median(taken_by["unscheduled"]) / statistics.median(taken),
            "difference": max(
                float((x - y).abs().max()) for got, wanted in outputs for x, y in zip(got, wanted, strict=True)
            ),
        }  # fmt: skip


if __name__ == "__main__":
    main()

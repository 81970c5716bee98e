"""Public FX graphs of whole steps: `spanwise.overlap`, PyTorch's own pass and the bound, at one table of costs.

    python -m benchmarks.public_graphs DIRECTORY --out FILE

Llama-3 8B and DeepSeek-V3 on 64 and 256 ranks, from meta-pytorch/autoparallel, `tools/overlap_simulator`. DIRECTORY has
its ``repro_*.py`` and ``*.table``, and ``costs/NAME.json``: milliseconds by node. NCCL tables price buckets.
Two memory budgets: the default, and the peak of PyTorch's order. No GPU is needed: CUDA tensors are fake.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._higher_order_ops.triton_kernel_wrap
import torch._inductor.inductor_prims
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks.cuda_compile.pretend import load_guard
from benchmarks.publish import write
from spanwise.overlap.engine import Timeline
from spanwise.overlap.fx.operators import STARTS, group_of, nodes_in, tensors_of
from spanwise.overlap.optimize import optimize
from spanwise.overlap.pytorch_pass import pytorch_order

# All-to-all is in no table: 20 µs, and 330 GB/s of the bytes that leave. Groups without a table: 20 µs and 400 GB/s.
# Tokens that an expert gets from a rank are symbols in one graph.
TOKENS, LATENCY, RATES = 512, 0.02, {"all_to_all": 330e6, "": 400e6}


class Reader:
    """The reader of inputs that the files call; its tensors are fake."""

    def __init__(self) -> None:
        self.args: list[Any] = []

    def storage(self, _: Any, num_bytes: int, *, device: Any = None, dtype_hint: Any = None) -> Any:
        return torch.device(device or "cpu")

    def tensor(self, device: Any, shape: Any, stride: Any = None, *, dtype: Any = torch.float32, **_: Any) -> None:
        empty = torch.empty(shape, dtype=dtype, device=device)
        self.args.append(empty if stride is None else torch.empty_strided(shape, stride, dtype=dtype, device=device))

    def symint(self, value: int, **_: Any) -> None:
        self.args.append(value)


class Kernel:
    """A Triton kernel, which never runs."""

    def __init__(self, function: Any) -> None:
        self.fn, self.__name__, self.arg_names, self.params = function, function.__name__, [], []


def load(path: Path) -> tuple[fx.GraphModule, dict[str, Any]]:
    """The graph of a file, and the names that the file defines."""
    text = re.sub(r"^(os\.environ\[|import triton).*$", "", path.read_text(), flags=re.M)
    triton, language = types.SimpleNamespace(jit=Kernel), types.SimpleNamespace(constexpr=int)
    names: dict[str, Any] = {"triton": triton, "tl": language, "__name__": path.stem}
    exec(compile(text, str(path), "exec"), names)
    reader = Reader()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True):
        names["load_args"](reader)
    with torch.no_grad():
        return make_fx(names["Repro"](), tracing_mode="fake")(*reader.args), names


class Tables:
    """Milliseconds by node; of collectives that a pass makes, by the NCCL table of their group."""

    def __init__(self, ms: Mapping[str, float], table: str, sizes: Mapping[str, int], names: Mapping[str, str]) -> None:
        rows = [line.split() for line in table.splitlines()[2:] if line.strip()]
        self.rows = {(group, kind): np.array(numbers, float) for group, _, kind, *numbers in rows}
        self.ms, self.sizes, self.names = ms, sizes, names

    def __call__(self, node: fx.Node) -> float:
        return self.ms[node.name] if node.name in self.ms else self.merged([node]) if node.target in STARTS else 0.0

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        inputs = [arg for node in nodes for arg in nodes_in(node.args[0])]
        return self.of(nodes[0], sum(t.nbytes for arg in inputs for t in tensors_of(arg)))

    def latency(self, node: fx.Node) -> float:
        return self.of(node, 0)

    def of(self, node: fx.Node, num_bytes: int) -> float:
        kind, group = str(node.target).split(".")[1].replace("_coalesced", "").removesuffix("_out"), group_of(node)
        row = self.rows.get((self.names.get(group, group), kind))
        if row is not None:
            known = 2.0 ** np.arange(len(row))  # MiB
            size = num_bytes / 2**20
            return float(np.interp(size, known, row) * max(1.0, size / known[-1]))
        rate = next(rate for name, rate in RATES.items() if name in kind)
        moved = num_bytes * (self.sizes[group] - 1) * (1 if kind.startswith("all_gather") else 1 / self.sizes[group])
        return LATENCY + moved / rate


def row_of(line: Timeline, **more: float) -> dict[str, float]:
    return {"ms": line.makespan, "gib": line.peak_bytes / 2**30, "launches": len(line.dag.starts), **more}


def case_of(costs: Path) -> dict[str, Any]:
    """All orders of one graph."""
    directory, name = costs.parents[1], costs.stem
    gm, names = load(directory / f"repro_{name}.py")
    sizes = {group: found["size"] for group, found in names["get_pg_config"]().items()}
    table = (directory / names["get_colls_estimations_file"]()).read_text()
    aliases = names.get("get_colls_group_mapping", dict)()
    ranked = sorted(sizes, key=lambda group: -sizes[group])  # the first has all ranks
    called = {group: str(number) for number, group in enumerate(ranked)}  # as torch names groups
    for node in gm.graph.nodes:
        if node.target in STARTS:
            node.args = tuple(called.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args)
    sizes = {called[group]: size for group, size in sizes.items()}
    aliases = {new: aliases.get(group, group) for group, new in called.items()}
    cost = Tables(json.loads(costs.read_text()), table, sizes, aliases)
    found: dict[str, Any] = {"nodes": len(gm.graph.nodes)}
    budgets: dict[str, int | None] = {"": None}
    try:
        ranks = {group: range(size) for group, size in sizes.items()}
        theirs, seconds = pytorch_order(gm, cost, cost.latency, ranks=ranks, bucket=True)
        found["PyTorch"] = row_of(theirs, seconds=seconds)
        budgets[", PyTorch's peak"] = theirs.peak_bytes
    except (RuntimeError, ValueError) as error:
        print(f"PyTorch on {name}: {str(error)[:200]}")
    for budget_name, budget in budgets.items():
        for bucket in (False, True):
            began = time.process_time()
            result = optimize(gm, cost, bucket=bucket, memory_budget=budget, sizes=TOKENS)
            what = ("spanwise, buckets" if bucket else "spanwise") + budget_name
            found[what] = row_of(result.timeline, seconds=time.process_time() - began)
            found["own"] = row_of(result.before)
            found.setdefault("bound", result.bounds.makespan)  # of the whole graph, without buckets
    return {"graph": name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="", help="part of the names of graphs")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    load_guard()
    cases = []
    for costs in sorted(args.directory.glob("costs/*.json")):
        if args.only in costs.stem:
            cases.append(case_of(costs))
            print(json.dumps(cases[-1]), flush=True)
            write({"torch": torch.__version__, "cases": cases}, args.out)


if __name__ == "__main__":
    main()

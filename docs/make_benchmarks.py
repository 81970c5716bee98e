"""Write the tables of benchmarks.md from benchmarks/results/*.json.

    python docs/make_benchmarks.py

No measured number of that page is typed: a table, or a sentence with figures, stands between two comments and is made
here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import DOCS, filled, table

RESULTS = DOCS.parent / "benchmarks" / "results"
Row = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def pick(rows: list[Row], **values: Any) -> Row:
    """The one row with these values."""
    found = [row for row in rows if all(row[key] == value for key, value in values.items())]
    assert len(found) == 1, (values, len(found))
    return found[0]


def distinct(rows: list[Row], *keys: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def kernels() -> str:
    rows = load("kernels-cpu")["rows"]
    lengths = sorted({row["tokens"] for row in rows})

    def ratios(mask: str, tokens: int) -> str:
        of_mask = [row for row in rows if (row["mask"], row["tokens"]) == (mask, tokens)]
        return ", ".join(f"{row['ratio']:.2f}" for row in sorted(of_mask, key=lambda row: row["dim"]))

    short = {"blocks at the causal rate": "causal rate"}
    bases = distinct(rows, "mask", "baseline")
    body = [[mask, *(ratios(mask, n) for n in lengths), short.get(base, base)] for mask, base in bases]
    return table(["mask", *(f"{n:,} tokens" for n in lengths), "compared with"], body)


def kernel_memory() -> str:
    memory = load("kernels-cpu")["memory"]
    ours, theirs = (f"{memory[name] / 2**20:,.0f} MiB" for name in ("peak_bytes", "torch_peak_bytes"))
    return (
        f"Peak memory of a causal forward and backward at {memory['tokens']:,} tokens, {memory['heads']} heads of "
        f"{memory['dim']}: {ours}; torch takes {theirs}."
    )


def link_name(row: Row) -> str:
    scenario = row["scenario"]
    name = scenario["name"]
    if scenario["kind"] == "causal":
        name += f" {scenario['seq_len']:,}, {scenario['balancer']}"
    return f"{name}; {scenario['num_hosts']}"


def slow_link() -> str:
    body = []
    for row in load("slow-link-cpu")["rows"]:
        gather, chunked = (pick(row["variants"], name=name) for name in ("all_gather", "needed, 4 pieces"))
        seconds = chunked["compute_seconds"], gather["step_seconds"], chunked["step_seconds"]
        ratios = chunked["reached"], chunked["predicted"]["step_ratio"]
        body.append([link_name(row), *(f"{one:.2f}" for one in (*seconds, *ratios))])
    header = ["mask; hosts", "compute", "`all_gather`", "`needed`", "times as fast", "predicted / measured"]
    return table(header, body)


def slow_link_errors() -> str:
    rows = [*load("slow-link-cpu")["rows"], *load("slow-link-exchanges-cpu")["rows"]]
    worst = max(e for row in rows for one in row["variants"] for e in one["relative_error"].values())
    return f"Outputs and gradients differ from float64 on one device by at most {worst:.1e} of the largest entry."


def exchanges() -> str:
    body = []
    for row in load("slow-link-exchanges-cpu")["rows"]:
        if row["scenario"]["kind"] != "documents":
            continue
        for one in row["variants"]:
            figures = one["step_seconds"], one["compute_seconds"], one["predicted"]["step_ratio"]
            body.append([f"{row['scenario']['num_hosts']}", one["name"], *(f"{figure:.2f}" for figure in figures)])
    header = ["hosts", "exchange", "step", "compute", "predicted / measured"]
    return table(header, body)


def peers() -> str:
    rows = load("slow-link-peers-cpu")["rows"]

    def verdict(row: Row) -> str:
        if "refused" in row or "failed" in row:
            return "refused" if "refused" in row else "fails"
        return f"{row['ratio']:.1f}" + (f" (wrong {', '.join(row['wrong'])})" if row["wrong"] else "")

    def cell(peer: str, kind: str) -> str:
        own = [row for row in rows if row["peer"] == peer and row["scenario"]["kind"] == kind]
        return " / ".join(verdict(row) for row in sorted(own, key=lambda row: row["scenario"]["num_hosts"]))

    body = [[peer, cell(peer, "documents"), cell(peer, "causal")] for (peer,) in distinct(rows, "peer")]
    return table(["package and variant", "documents, 2 / 4 hosts", "causal, 2 / 4 hosts"], body)


def orders(rows: list[Row]) -> list[Row]:
    """The rows of one graph: as given, PyTorch, PyTorch with buckets, spanwise, spanwise with buckets."""
    names = ("own", "PyTorch", "PyTorch, buckets", "spanwise", "spanwise, buckets")
    return [pick(rows, order=name) for name in names]


def with_bound(row: Row) -> str:
    return f"{row['makespan']:.1f} ({row['makespan'] / row['bound']:.3f})"


def overlap() -> str:
    rows = load("overlap-peers")["rows"]
    body = []
    for graph, batch in sorted(distinct(rows, "graph", "batch")):
        own = [row for row in rows if (row["graph"], row["batch"]) == (graph, batch)]
        given, theirs, their_buckets, ours, our_buckets = orders(own)
        peaks = [f"{one['peak']:.2f}" for one in (their_buckets, our_buckets)]
        made = f"{theirs['makespan']:.1f}, {their_buckets['makespan']:.1f}"
        ratio = f"{our_buckets['seconds'] / their_buckets['seconds']:.2f}"
        makespans = f"{given['makespan']:.1f}", made, f"{with_bound(ours)}, {with_bound(our_buckets)}"
        body.append([f"{graph}, {batch}", *makespans, *peaks, ratio])
    header = ["graph, batch", "as given", "PyTorch; buckets", "spanwise; buckets", "peak, PyTorch", "peak, spanwise",
              "pass time"]  # fmt: skip
    return table(header, body)


def pieces() -> str:
    body = []
    for row in load("overlap-split")["rows"]:
        times = [f"{row[key]:.1f}" for key in ("whole", "whole_bound", "floor", "split")]
        body.append([f"{row['graph']}, {row['batch']}", *times, str(row["pieces"])])
    return table(["graph, batch", "whole", "bound", "floor", "in pieces", "pieces"], body)


def offload() -> str:
    body = []
    for row in (row for row in load("overlap-offload")["rows"] if row["layers"] == 8):
        times = [f"{row[key]:.1f}" for key in ("pytorch", "spanwise", "floor")]
        body.append([f"{row['percent']} %", *times, f"{row['bytes'] / 1e9:.2f}"])
    return table(["budget", "PyTorch's rule", "spanwise", "floor", "GB that leave"], body)


def public_graphs() -> str:
    body = []
    for row in load("public-graphs")["cases"]:
        theirs = row.get("PyTorch")
        cells = [f"{row[key]['ms']:.1f} ({row[key]['launches']})" if key in row else "fails"
                 for key in ("PyTorch", "spanwise, buckets")]  # fmt: skip
        at_peak = row.get("spanwise, buckets, PyTorch's peak")
        same = f"{at_peak['ms']:.1f} ({at_peak['ms'] / theirs['ms']:.3f})" if at_peak and theirs else "–"
        body.append([row["graph"], f"{row['nodes']:,}", f"{row['own']['ms']:.1f}", *cells, same, f"{row['bound']:.1f}"])
    return table(["graph", "nodes", "as given", "PyTorch", "spanwise", "at PyTorch's peak", "bound, no buckets"], body)


def zoo() -> str:
    header = ["order / compared with", "cases", "longer", "worst", "mean"]
    found = load("overlap-zoo")
    body = [
        [pair, str(row["cases"]), str(row["longer"]), f"{row['worst']:.3f}", f"{row['mean']:.3f}"]
        for pair, row in found["summary"].items()
    ]
    lines = ["CPU time:", ""]
    for ours, theirs in (("spanwise", "PyTorch"), ("spanwise, buckets", "PyTorch, buckets")):
        small = max(case["orders"][ours]["seconds"] for case in found["cases"] if case["nodes"] < 500)
        large = [case["orders"] for case in found["cases"] if case["nodes"] > 2_000 and theirs in case["orders"]]
        ratios = [orders[ours]["seconds"] / orders[theirs]["seconds"] for orders in large]
        mean = sum(ratios) / len(ratios)
        most = f"{mean:.2f} of the time of {theirs} in the mean, at most {max(ratios):.2f}"
        lines.append(f"- {ours}: at most {small:.2f} s below 500 nodes; above 2,000 nodes {most}")
    return table(header, body) + "\n\n" + "\n".join(lines)


def noise() -> str:
    rows = load("overlap-peers")["noise"]
    ahead, draws = sum(row["ahead"] for row in rows), sum(row["draws"] for row in rows)
    low, high = min(row["sigma"] for row in rows), max(row["sigma"] for row in rows)
    worst = max(row["worst"] for row in rows)
    return (
        f"Costs are guesses. With every node's cost off by a log-normal factor (σ from {low} to {high}, "
        f"{rows[0]['draws']} draws for each graph and batch), the order of spanwise is ahead of PyTorch's in "
        f"{ahead} of {draws} draws. The worst draw takes {worst:.4f} of PyTorch's time."
    )


def overlap_link(name: str = "overlap-link-cpu") -> str:
    body = [
        [row["way"], f"{row['predicted']:,.0f}", f"{row['measured']:,.0f}", f"{row['bound']:,.0f}",
         f"{row['faster']:.2f}", f"{row['difference']:.1e}" if row["difference"] else "0"]
        for row in load(name)["rows"]
        if row["share"] == 1
    ]  # fmt: skip
    return table(["step", "predicted", "measured", "lower bound", "times as fast", "difference"], body)


def packed() -> str:
    body = []
    for row in load("packed-cpu")["rows"]:
        if row["num_ranks"] != 8:
            continue
        name = f"{row['corpus'].removeprefix('median ')}; {row['documents']}"
        tokens = f"{row['padded']['recv_mean']:,.0f}, {row['local']['recv_mean']:,.0f}"
        ratios = [f"{row[way]['ratio']:.2f}" for way in ("unpadded", "local")]
        body.append([name, f"{row['padding_share']:.1%}", *ratios, tokens])
    header = ["median length; documents", "padding", "same order, unpadded", "`local`",
              "K/V tokens a rank receives: padded, `local`"]  # fmt: skip
    return table(header, body)


def layouts() -> str:
    rows = load("layout-cpu")["rows"]
    balancers = ("contiguous", "head_tail", "lpt", "local", "MagiAttention MinHeap", "MagiAttention ToppHeap")

    def cell(mask: str, ranks: int, balancer: str) -> str:
        found = [row for row in rows if (row["mask"], row["num_ranks"], row["balancer"]) == (mask, ranks, balancer)]
        return f"{found[0]['imbalance']:.3f}, {found[0]['recv_mean']:,.0f}" if found else "–"

    body = [
        [f"{mask}, {ranks}", *(cell(mask, ranks, name) for name in balancers)]
        for mask, ranks in distinct(rows, "mask", "num_ranks")
        if mask not in ("documents 1", "documents 2", "documents + window") and (ranks == 8 or mask == "documents 0")
    ]
    return table(["mask, ranks", *balancers], body)


def planning() -> str:
    body = []
    for row in load("plan-cpu")["rows"]:
        if row["balancer"] in ("auto", "local"):
            name = f"auto ({row['chosen']})" if row["balancer"] == "auto" else row["balancer"]
            reads = f"{row['reads_tokens_mean']:,.0f}"
            size = f"{row['seq_len']:,}", f"{row['num_ranks']}"
            body.append([*size, name, f"{row['total_ms']:.0f}", f"{row['imbalance']:.3f}", reads])
    return table(["tokens", "ranks", "balancer", "ms", "imbalance", "K/V tokens received, mean"], body)


def versions() -> str:
    results = [load(path.stem) for path in sorted(RESULTS.glob("*.json"))]
    made = {found.get("torch") or found.get("machine", {}).get("torch") for found in results} - {None}
    return f"All results are from two CPU cores, with torch {', '.join(sorted(made))}."


def linear_loss() -> str:
    rows = load("linear-loss-cpu")["rows"]
    body = [
        [row["name"], f"{row['seconds']:.2f}", f"{row['ratio']:.2f}",
         f"{row['peak_bytes'] / 2**20:,.0f}", f"{row['memory_ratio']:.2f}"]
        for row in rows
    ]  # fmt: skip
    return table(["variant", "seconds", "to all logits", "MiB", "to all logits"], body)


def linear_loss_shape() -> str:
    found = load("linear-loss-cpu")
    flops, seconds = found["floor_flops"] / 1e9, 3 * found["product_seconds"]
    return (
        f"{found['tokens']:,} tokens, a vocabulary of {found['vocab']:,}, hidden size {found['dim']}, float32. "
        f"The floor of three products, {flops:,.0f} GFLOP, took {seconds:.2f} s."
    )


def recurrence() -> str:
    found = load("recurrence-cpu")
    body = []
    for row in found["rows"]:
        floor = f"{row['floor_flops'] / 1e9:.1f} GFLOP" if row["floor_flops"] else f"{row['floor_bytes'] / 1e6:.0f} MB"
        figures = [f"{row[key]:.2f}" for key in ("seconds", "ratio")]
        body.append([f"`{row['name']}`", *figures, floor, f"{row['of_floor']:.0f}"])
    return table(["layer", "seconds", "to transformers", "floor", "seconds to floor"], body)


def published() -> str:
    found = load("published")
    kinds = {
        "MagiAttention, causal and full": ("causal_mask", "full_mask"), "MagiAttention, packed": ("varlen",),
        "ring-flash-attention": ("ring-flash",), "torchtitan, Llama 3, NeMo": ("torchtitan@", "Llama 3", "NeMo"),
        "maxtext, LoongTrain, diffusion": ("maxtext", "LoongTrain", "diffusers", "xDiT"),
    }  # fmt: skip
    body = []
    for name, words in kinds.items():
        varlen = "varlen" in words
        own = [x for x in found["rows"] if any(w in x["source"] for w in words) and ("varlen" in x["source"]) == varlen]
        errors = sorted(abs(x["ratio"] - 1) for x in own if "ratio" in x and not x["fitted"])
        body.append([name, f"{statistics.median(errors):.0%}", f"{errors[-1]:.0%}"])
    every = found["all"]
    said = (
        f"{every['expressed']} of {every['rows']} rows are expressed. Errors: {every['median']:.1%} in the median, "
        f"{every['nine_tenths']:.0%} at most for nine tenths; for packed masks {found['packed']['median']:.1%} and "
        f"{found['packed']['nine_tenths']:.0%}. Order of methods: Kendall's τ {every['tau']:.2f} over "
        f"{every['groups']} comparisons."
    )
    return said + "\n\n" + table(["source", "median error", "worst"], body)


BLOCKS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "kernels": kernels,
    "kernel memory": kernel_memory,
    "slow link": slow_link,
    "slow link errors": slow_link_errors,
    "exchanges": exchanges,
    "peers": peers,
    "overlap": overlap,
    "pieces": pieces,
    "noise": noise,
    "offload": offload,
    "public graphs": public_graphs,
    "overlap link": overlap_link,
    "zoo": zoo,
    "pieces over a link": lambda: overlap_link("overlap-link-split-cpu"),
    "packed": packed,
    "linear loss": linear_loss,
    "linear loss shape": linear_loss_shape,
    "recurrence": recurrence,
    "layouts": layouts,
    "planning": planning,
    "published": published,
}


def page(text: str) -> str:
    """benchmarks.md with every block made anew."""
    return filled(text, Path(__file__).name, {name: make() for name, make in BLOCKS.items()})


if __name__ == "__main__":
    path = DOCS / "benchmarks.md"
    path.write_text(page(path.read_text()))

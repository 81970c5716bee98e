"""Write the tables of benchmarks.md from benchmarks/results/*.json.

    python docs/make_benchmarks.py

No measured number of that page is typed: a table, or a sentence with figures, stands between two comments and is made
here.
"""

from __future__ import annotations

import itertools
import json
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

    body = [[mask, *(ratios(mask, n) for n in lengths), base] for mask, base in distinct(rows, "mask", "baseline")]
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
    inside = f" of {scenario['per_host']} ranks" if scenario.get("per_host", 1) > 1 else ""
    return f"{name}; {scenario['num_hosts']}{inside}"


def slow_link() -> str:
    body = []
    for row in load("slow-link-cpu")["rows"]:
        gather, needed, chunked = (pick(row["variants"], name=n) for n in ("all_gather", "needed", "needed, 4 pieces"))
        steps = [f"{one['exchange_seconds']:.2f}, {one['step_seconds']:.2f}" for one in (gather, needed)]
        ratios = ", ".join(f"{one['predicted']['step_ratio']:.2f}" for one in (gather, needed, chunked))
        body.append(
            [link_name(row), f"{chunked['compute_seconds']:.2f}", *steps, f"{chunked['step_seconds']:.2f}",
             f"{chunked['reached']:.2f}; {chunked['possible']:.2f}", f"{chunked['exposed_share']:.0%}", ratios]
        )  # fmt: skip
    header = ["mask; hosts", "compute", "all_gather: exchange, step", "needed: exchange, step", "step in 4 chunks",
              "times as fast; possible", "exposed", "predicted / measured"]  # fmt: skip
    return table(header, body)


def slow_link_errors() -> str:
    rows = [*load("slow-link-cpu")["rows"], *load("slow-link-exchanges-cpu")["rows"]]
    worst = max(e for row in rows for one in row["variants"] for e in one["relative_error"].values())
    return f"Outputs and gradients differ from float64 on one device by at most {worst:.1e} of the largest entry."


def exchanges() -> str:
    body = []
    for row in load("slow-link-exchanges-cpu")["rows"]:
        for i, one in enumerate(row["variants"]):
            name = one["name"].replace("ulysses, ", "ulysses inside, ")
            seconds = [f"{one[key]:.2f}" for key in ("step_seconds", "compute_seconds", "exchange_seconds")]
            floor, ratio = f"{one['floor_seconds']:.2f}", f"{one['predicted']['step_ratio']:.2f}"
            body.append([link_name(row) if i == 0 else "", name, *seconds, floor, ratio])
    header = ["mask; hosts", "exchange", "step", "compute", "exchange alone", "floor", "predicted / measured"]
    return table(header, body)


def peers() -> str:
    rows = load("slow-link-cpu")["peers"]

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
    names = ("original", "PyTorch, reorder", "PyTorch, buckets", "spanwise", "spanwise, buckets")
    return [pick(rows, order=name) for name in names]


def with_bound(row: Row) -> str:
    return f"{row['makespan']:.1f} ({row['makespan'] / row['bound']:.3f})"


def overlap() -> str:
    rows = load("overlap-peers")["rows"]
    body = []
    for graph, costs, batch in sorted(distinct(rows, "graph", "costs", "batch")):
        own = [row for row in rows if (row["graph"], row["costs"], row["batch"]) == (graph, costs, batch)]
        given, theirs, their_buckets, ours, our_buckets = orders(own)
        peaks = [f"{a['peak']:.2f}, {b['peak']:.2f}" for a, b in ((theirs, their_buckets), (ours, our_buckets))]
        times = ours["seconds"] / theirs["seconds"], our_buckets["seconds"] / their_buckets["seconds"]
        body.append(
            [f"{graph}, {costs}, {batch}", f"{given['makespan']:.1f}", f"{theirs['makespan']:.1f}",
             f"{their_buckets['makespan']:.1f}", with_bound(ours), with_bound(our_buckets), *peaks,
             ", ".join(f"{ratio:.2f}" for ratio in times)]
        )  # fmt: skip
    header = ["graph, costs, batch", "as given", "PyTorch", "PyTorch, buckets", "spanwise", "spanwise, buckets",
              "peak, PyTorch", "peak, spanwise", "pass time"]  # fmt: skip
    return table(header, body)


def hidden() -> str:
    rows = [row for row in load("overlap-peers")["rows"] if (row["graph"], row["costs"]) == ("backward", "calibrated")]
    body = []
    for (batch,) in distinct(rows, "batch"):
        for order in ("PyTorch, reorder", "spanwise"):
            body.append([f"{batch}", order.split(",")[0], *pick(rows, batch=batch, order=order)["hidden"].split("/")])
    return table(["batch", "order", "hidden wholly", "partly", "not at all"], body)


def pieces() -> str:
    body = []
    for row in load("overlap-split")["rows"]:
        times = [f"{row[key]:.1f}" for key in ("whole", "whole_bound", "floor", "split")]
        cut = [row["copies"], row["sensitivity"]["128"], row["sensitivity"]["512"]] if row["pieces"] > 1 else []
        figures = [*times, f"{row['share']:.3f}", str(row["pieces"]), *(f"{ms:.1f}" for ms in cut)]
        body.append([f"{row['graph']}, {row['batch']}", *figures, *[""] * (9 - len(figures))])
    header = ["graph, batch", "whole", "bound", "floor", "in pieces", "share", "pieces", "copies", "n = 128", "n = 512"]
    return table(header, body)


def zoo() -> str:
    known = load("overlap-zoo")
    header = ["order / compared with", "cases", "longer", "worst", "mean"]
    body = [
        [pair, str(found["cases"]), str(found["longer"]), f"{found['worst']:.3f}", f"{found['mean']:.3f}"]
        for pair, found in known["summary"].items()
    ]
    return "\n".join(
        [table(header, body), "", "CPU time of the passes:", "", *(f"- {line}" for line in known["times"])]
    )


def noise() -> str:
    rows = load("overlap-peers")["noise"]
    ahead, draws = sum(row["ahead"] for row in rows), sum(row["draws"] for row in rows)
    low, high = min(row["sigma"] for row in rows), max(row["sigma"] for row in rows)
    worst = max(row["worst"] for row in rows)
    return (
        f"Costs are guesses. With every node's cost off by a log-normal factor (σ from {low} to {high}, "
        f"{rows[0]['draws']} draws for each graph, cost and batch), the order of spanwise is ahead of PyTorch's in "
        f"{ahead} of {draws} draws. The worst draw takes {worst:.4f} of PyTorch's time."
    )


def growth() -> str:
    rows = load("overlap-growth")["rows"]
    body = []
    for graph, layers, nodes in sorted(distinct(rows, "graph", "layers", "nodes")):
        own = [row for row in rows if (row["graph"], row["layers"]) == (graph, layers)]
        _, *four = orders(own)
        theirs, their_buckets, ours, our_buckets = four
        seconds = [f"{a['seconds']:.2f}, {b['seconds']:.2f}" for a, b in ((theirs, their_buckets), (ours, our_buckets))]
        shares = ours["seconds"] / theirs["seconds"], our_buckets["seconds"] / their_buckets["seconds"]
        body.append(
            [f"{graph}, {layers}", f"{nodes:,}", f"{theirs['makespan']:.1f}, {their_buckets['makespan']:.1f}",
             with_bound(ours), with_bound(our_buckets), *seconds, ", ".join(f"{share:.2f}" for share in shares)]
        )  # fmt: skip
    header = ["graph, layers", "fx nodes", "PyTorch; with buckets", "spanwise", "spanwise, buckets", "s, PyTorch",
              "s, spanwise", "share"]  # fmt: skip
    return table(header, body)


def overlap_link(name: str = "overlap-link-cpu") -> str:
    body = [
        [f"{row['share']:g}", row["way"], f"{row['predicted']:,.0f}", f"{row['measured']:,.0f}",
         f"{row['bound']:,.0f}", f"{row['faster']:.2f}", f"{row['difference']:.1e}" if row["difference"] else "0"]
        for row in load(name)["rows"]
    ]  # fmt: skip
    header = ["communication / compute", "step", "predicted", "measured", "lower bound", "times as fast", "difference"]
    return table(header, body)


def packed() -> str:
    body = []
    for row in load("packed-cpu")["rows"]:
        name = f"{row['num_ranks']}; {row['corpus'].removeprefix('median ')}; {row['documents']}"
        tokens = f"{row['padded']['recv_mean']:,.0f}, {row['local']['recv_mean']:,.0f}"
        ratios = [f"{row[way]['ratio']:.2f}" for way in ("unpadded", "local")]
        body.append([name, f"{row['padding_share']:.1%}", *ratios, tokens])
    header = ["ranks; median length; documents", "padding", "same order, unpadded", "`local`",
              "K/V tokens a rank receives: padded, `local`"]  # fmt: skip
    return table(header, body)


WAYS = {"all_gather": "all_gather", "needed": "needed", "ring": "ring", "ulysses": "ulysses",
        "ulysses x 2, needed": "ulysses inside 2, needed", "ulysses x 2, ring": "ulysses inside 2, ring"}  # fmt: skip


def memory() -> str:
    rows = load("memory-cpu")["planned"]

    def units(row: Row) -> str:
        return ", ".join(f"{row[key] / row['shard']:.2f}".removesuffix(".00") for key in ("resident", "saved"))

    body = []
    for mask, tokens in [*itertools.product(["documents"], (16_384, 131_072, 1_048_576)), ("causal", 131_072),
                         ("window", 131_072)]:  # fmt: skip
        body.append([f"{tokens:,} {mask}", *(units(pick(rows, mask=mask, tokens=tokens, way=way)) for way in WAYS)])
    return table(["tokens, mask", *WAYS.values()], body)


def memory_measured() -> str:
    rows = load("memory-cpu")["measured"]
    plain = [row for row in rows if "ulysses" not in row["way"]]
    equal = all(row[f"{key}_measured"] == row[key] for row in plain for key in ("resident", "saved"))
    assert equal
    most = max(row["resident_measured"] / row["resident"] for row in rows)
    lengths = sorted({row["tokens"] for row in rows})
    return (
        f"The benchmark also measures the memory on 8 processes, at {lengths[0]:,} to {lengths[-1]:,} tokens. Without "
        f"Ulysses every measured figure equals the plan to the byte. With Ulysses the measurement includes results of "
        f"kernels and merges, and is up to {most:.2f} times the plan."
    )


def layouts() -> str:
    rows = load("layout-cpu")["rows"]
    balancers = ("contiguous", "head_tail", "ptrr", "lpt", "local")
    solvers = ("MagiAttention MinHeap", "MagiAttention ToppHeap")

    def cell(mask: str, ranks: int, balancer: str) -> str:
        found = [row for row in rows if (row["mask"], row["num_ranks"], row["balancer"]) == (mask, ranks, balancer)]
        return f"{found[0]['imbalance']:.3f}, {found[0]['recv_mean']:,.0f}" if found else "–"

    body = [
        [f"{mask}, {ranks}", *(cell(mask, ranks, name) for name in (*balancers, *solvers))]
        for mask, ranks in distinct(rows, "mask", "num_ranks")
    ]
    return table(["mask, ranks", *(f"{name}" for name in (*balancers, *solvers))], body)


def planning() -> str:
    body = []
    for row in load("plan-cpu")["rows"]:
        name = f"auto ({row['chosen']})" if row["balancer"] == "auto" else row["balancer"]
        reads = f"{row['reads_tokens_mean']:,.0f}", f"{row['reads_tokens_max']:,}"
        body.append(
            [f"{row['seq_len']:,}", f"{row['num_ranks']}", name, f"{row['total_ms']:.1f}", f"{row['imbalance']:.3f}",
             *reads, f"{row['all_gather_tokens_mean']:,.0f}"]
        )  # fmt: skip
    header = ["tokens", "ranks", "balancer", "ms", "imbalance", "reads, mean", "reads, most", "all_gather moves"]
    return table(header, body)


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


def global_batch() -> str:
    """Means over the batches of each number of ranks; predicted and measured seconds, and times those of one plan."""
    body = []
    batches = load("global-batch-cpu")["measured"]
    for ranks in sorted({batch["ranks"] for batch in batches}):
        found = [batch["ways"] for batch in batches if batch["ranks"] == ranks]

        def mean(name: str, key: str, found: list[list[Row]] = found) -> float:
            values = [pick(ways, name=name)[key] for ways in found]
            return sum(max(value) if isinstance(value, list) else value for value in values) / len(values)

        for way in found[0]:
            cells = [str(ranks), way["name"]]
            for key in ("seconds", "measured", "cpu"):
                first = mean("one plan", key) if key in way else 0.0
                cells.append(f"{mean(way['name'], key):.2f}; {mean(way['name'], key) / first:.2f}" if first else "–")
            body.append(cells)
    return table(["ranks", "way", "predicted", "measured", "CPU, busiest rank"], body)


def global_batch_load() -> str:
    loads = [batch["load_before"] for batch in load("global-batch-cpu")["measured"]]
    return f"Load averages before the batches: {min(loads):.0f} to {max(loads):.0f}, on two cores."


def grids() -> str:
    body = []
    rows = load("global-batch-cpu")["predicted"]
    for median, sigma in distinct(rows, "median", "sigma"):
        batches = [row["ways"] for row in rows if row["median"] == median]
        for way in batches[0]:
            same = [pick(ways, dp=way["dp"], documents=way["documents"]) for ways in batches]
            ones = [pick(ways, documents="one plan") for ways in batches]
            spread = [
                f"{min(one[key] for one in same):.2f} to {max(one[key] for one in same):.2f}"
                for key in ("work_imbalance", "token_imbalance")
            ]
            seconds = sum(one["seconds"] for one in same) / sum(one["seconds"] for one in ones)
            body.append(
                [f"{median:,}, σ {sigma}", f"{way['dp']} × {way['cp']}, {way['documents']}", f"{seconds:.2f}", *spread]
            )
    return table(["documents: median", "dp × cp", "step to one plan", "work", "tokens"], body)


def plan_scale() -> str:
    body = []
    for row in load("plan-scale")["rows"]:
        body.append(
            [row["mask"], f"{row['ranks']:,}", f"{row['plan_seconds']:.2f} ({row['floor_seconds']:.2f})",
             f"{row['auto_seconds']:.2f}", row["auto_choice"], f"{row['tensor_seconds']:.2f}",
             f"{row['imbalance']:.3f}", f"{row['received_a_rank']:,.0f}"]
        )  # fmt: skip
    header = ["mask", "ranks", "local (floor), s", "auto, s", "auto takes", "tensors, s", "imbalance",
              "K/V tokens received a rank"]  # fmt: skip
    return table(header, body)


def hosts() -> str:
    body = []
    for row in load("plan-scale")["rows"]:
        both = row, row["hierarchical"]
        over = ["–" if x["between_over_bound"] is None else f"{x['between_over_bound']:.2f}" for x in both]
        steps = [f"{1e3 * row['hierarchical'][key]:,.0f}" for key in ("needed_step_seconds", "step_seconds")]
        body.append(
            [row["mask"], f"{row['ranks']:,}", *(f"{x['inside_share']:.0%}" for x in both),
             *(f"{x['between_a_rank']:,.0f}" for x in both), *over, *steps,
             f"{row['hierarchical']['relay_seconds']:.2f}"]
        )  # fmt: skip
    header = ["mask", "ranks", "inside hosts: needed", "hierarchical", "tokens between hosts, a rank: needed",
              "hierarchical", "over its bound: needed", "hierarchical", "step, ms: needed", "hierarchical",
              "relays, s"]  # fmt: skip
    return table(header, body)


def by_host() -> str:
    body = []
    for row in load("plan-scale")["rows"]:
        if found := row["by_host"]:
            usual = row["hierarchical"]
            body.append(
                [row["mask"], f"{row['ranks']:,}", *(f"{x['inside_share']:.0%}" for x in (usual, found)),
                 *(f"{x['between_a_rank']:,.0f}" for x in (usual, found)),
                 *(f"{x['between_over_bound']:.2f}" for x in (usual, found)),
                 *(f"{1e3 * x['step_seconds']:,.0f}" for x in (usual, found)),
                 f"{row['imbalance']:.3f}", f"{found['imbalance']:.3f}", f"{found['plan_seconds']:.2f}"]
            )  # fmt: skip
    header = ["mask", "ranks", "inside hosts: local", "by host", "tokens between hosts, a rank: local", "by host",
              "over the bound: local", "by host", "step, ms: local", "by host", "imbalance: local", "by host",
              "by host, s"]  # fmt: skip
    return table(header, body)


def recurrence() -> str:
    found = load("recurrence-cpu")
    body = []
    for row in found["rows"]:
        floor = f"{row['floor_flops'] / 1e9:.1f} GFLOP" if row["floor_flops"] else f"{row['floor_bytes'] / 1e6:.0f} MB"
        figures = [f"{row[key]:.2f}" for key in ("seconds", "ratio")]
        body.append([f"`{row['name']}`", *figures, floor, f"{row['of_floor']:.0f}"])
    return table(["layer", "seconds", "to transformers", "floor", "seconds to floor"], body)


def recurrence_maps() -> str:
    found = load("recurrence-cpu")
    body = [
        [row["documents"], row["balancer"], str(row["runs"]), str(row["maps"]), f"{row['recv_bytes'] / 2**20:,.0f}",
         f"{row['work_imbalance']:.2f}"]
        for row in found["maps"]
    ]  # fmt: skip
    header = ["documents", "balancer", "runs a rank", "maps", "MiB received, busiest rank", "attention, busiest : mean"]
    return table(header, body)


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
    "hidden": hidden,
    "noise": noise,
    "growth": growth,
    "overlap link": overlap_link,
    "zoo": zoo,
    "pieces over a link": lambda: overlap_link("overlap-link-split-cpu"),
    "global batch": global_batch,
    "global batch load": global_batch_load,
    "grids": grids,
    "packed": packed,
    "memory": memory,
    "memory measured": memory_measured,
    "linear loss": linear_loss,
    "linear loss shape": linear_loss_shape,
    "recurrence": recurrence,
    "recurrence maps": recurrence_maps,
    "layouts": layouts,
    "planning": planning,
    "plan scale": plan_scale,
    "hosts": hosts,
    "by host": by_host,
}


def page(text: str) -> str:
    """benchmarks.md with every block made anew."""
    return filled(text, Path(__file__).name, {name: make() for name, make in BLOCKS.items()})


if __name__ == "__main__":
    path = DOCS / "benchmarks.md"
    path.write_text(page(path.read_text()))

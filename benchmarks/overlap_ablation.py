"""What each part of the overlap search earns: the zoo without it, or with another constant.

    python benchmarks/overlap_ablation.py --graphs FOLDER --out cases.json
    python benchmarks/overlap_ablation.py --graphs FOLDER --out cases.json --own-peak
    python benchmarks/overlap_ablation.py --graphs FOLDER --out cases.json --in-flight 2
    python benchmarks/overlap_ablation.py --show cases.json --summary benchmarks/results/overlap-ablation.json

`FOLDER` holds the graphs of `overlap_zoo.py --graphs`. A variant changes one thing for the time of a schedule. Variants
of the search are compared without buckets; variants of the buckets begin at the same schedule. Printed is the makespan
as a multiple of today's: in the worst case for the variant, in its best, and in the mean; in how many cases it is more
than 0.5 % longer, or shorter; the same mean at costs that are wrong (each node's time by a log-normal factor, 0.1 for
compute and 0.3 for collectives); memory; launches; seconds. All but the seconds are simulated: load does not matter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from overlap_zoo import LINKS, MARGIN

from spanwise.overlap.bucketing import bucket as bucket_file
from spanwise.overlap.bucketing import greedy as greedy_file
from spanwise.overlap.bucketing import moves as moves_file
from spanwise.overlap.bucketing import slack
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.fx.emit import bucket_keys
from spanwise.overlap.fx.files import load_graphs
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.simulate import simulate
from spanwise.overlap.search import greedy as plain_file
from spanwise.overlap.search import list_scheduler
from spanwise.overlap.search import schedule as schedule_file

NOISE, SEEDS = {Kind.COMPUTE: 0.1, Kind.START: 0.3, Kind.WAIT: 0.0}, 3
Variant = Callable[[], contextlib.AbstractContextManager[Any]]


def constants(file: Any, **values: Any) -> Variant:
    return lambda: mock.patch.multiple(file, **values)


def without(orders: str, number: int) -> Variant:
    """The search without one of its first, plain or near orders."""
    whole = getattr(schedule_file._ScheduleSearch, orders)

    def rest(self: Any, *args: Any) -> Iterator[Any]:
        yield from (found for at, found in enumerate(whole(self, *args)) if at != number)

    return lambda: mock.patch.object(schedule_file._ScheduleSearch, orders, rest)


def without_all(orders: str) -> Variant:
    """The search without its plain or near orders."""
    return lambda: mock.patch.object(schedule_file._ScheduleSearch, orders, lambda self, *args: iter(()))


def simple_wait() -> Any:
    """Of waits, always the one that is first by priority."""

    def choose(self: Any) -> int:
        candidates = [self.by_priority[at] for at in self.ended] + [i for _, i in self.waits]
        return min((i for i in candidates if not self.has_run[i]), key=self.rank.__getitem__, default=-1)

    return mock.patch.object(list_scheduler._ListScheduler, "choose_wait", choose)


def no_turns() -> Any:
    whole = list_scheduler._ListScheduler.__init__

    def init(self: Any, problem: Any, *rest: Any) -> None:
        whole(self, problem, *rest)
        self.problem = problem = __import__("copy").copy(problem)
        problem.feeds_stream = [False] * len(problem.ms)

    return mock.patch.object(list_scheduler._ListScheduler, "__init__", init)


def cases_of(name: str, value: Any) -> Variant:
    return lambda: mock.patch.object(bucket_file._BucketSearch, name, value)


def greedy_method(name: str, value: Any) -> Variant:
    return lambda: mock.patch.object(greedy_file._GreedyBucketing, name, value)


def without_cuts() -> Any:
    whole = moves_file.candidate_moves
    return mock.patch.object(
        bucket_file, "candidate_moves", lambda *args: [move for move in whole(*args) if len(move.units) == 2]
    )


def without_merges() -> Any:
    whole = moves_file.candidate_moves
    return mock.patch.object(
        bucket_file, "candidate_moves", lambda *args: [move for move in whole(*args) if len(move.units) == 1]
    )


RULES = schedule_file._RULES
SEARCH: dict[str, Variant] = {
    **{f"without rule {n}": constants(schedule_file, _RULES=(*RULES[:n], *RULES[n + 1 :])) for n in range(4)},
    **{f"without first {n}": without("_first", n) for n in range(4)},
    **{f"without plain {n}": without("_plain", n) for n in range(6)},
    **{f"without near {n}": without("_near", n) for n in range(4)},
    "without plain": without_all("_plain"),
    "without near": without_all("_near"),
    "_SHORT_QUEUE 1/32": constants(schedule_file, _SHORT_QUEUE=schedule_file._EAGER),
    "_BINDING 0": constants(schedule_file, _BINDING=0.0),
    "greedy _LOOKAHEAD 8": constants(plain_file, _LOOKAHEAD=8),
    "_MEMORY_WEIGHT 0": constants(schedule_file, _MEMORY_WEIGHT=0.0),
    "rules without near": constants(schedule_file, _RULES=(RULES[1], RULES[3])),
    "effort 8": lambda: mock.patch.object(schedule_file, "default_effort", lambda dag: 8),
    "effort 16": lambda: mock.patch.object(schedule_file, "default_effort", lambda dag: 16),
    "effort 48": lambda: mock.patch.object(schedule_file, "default_effort", lambda dag: 48),
    "without polish": lambda: mock.patch.object(
        schedule_file, "starts_early_waits_late", lambda problem, order, budget: list(order)
    ),
    "list _LOOKAHEAD 1": constants(list_scheduler, _LOOKAHEAD=1),
    "waits by priority": simple_wait,
    "no early turns": no_turns,
}
BUCKETS: dict[str, Variant] = {
    "without moves": constants(bucket_file, _TRIALS=0),
    "moves without cuts": without_cuts,
    "moves without merges": without_merges,
    "_HOPELESS inf": constants(bucket_file, _HOPELESS=math.inf),
    "_LOW_EFFORT 0": constants(bucket_file, _LOW_EFFORT=0),
    "_SLACKS 0.5, 0.5": constants(bucket_file, _SLACKS=(0.5, 0.5)),
    "_SLACKS 0.1": constants(bucket_file, _SLACKS=(0.1,)),
    "_SLACKS 0.5": constants(bucket_file, _SLACKS=(0.5,)),
    "_SHORT none": constants(bucket_file, _SHORT=()),
    "_SHORT 1/32": constants(bucket_file, _SHORT=(1 / 32,)),
    "_MAX_DISTANCE 1": constants(moves_file, _MAX_DISTANCE=1),
    "_TRIALS 8": constants(bucket_file, _TRIALS=8),
    "_MANY_TRIALS inf": constants(bucket_file, _MANY_TRIALS=math.inf),
    "_ONE_BY_ONE 0": constants(bucket_file, _ONE_BY_ONE=0),
    "_PAYS inf": constants(bucket_file, _PAYS=math.inf),
    "_SHORT 1/128": constants(bucket_file, _SHORT=(1 / 128,)),
    "bucket OPTIMAL 1": constants(bucket_file, OPTIMAL=1.0),
    "_WORTH 1": constants(bucket_file, _WORTH=1.0),
    "without greedy": cases_of("try_greedy", lambda self, slack: None),
    "_FULL inf": constants(greedy_file, _FULL=math.inf),
    "_FULL 16": constants(greedy_file, _FULL=16),
    "_SMALL 0": constants(greedy_file, _SMALL=0.0),
    "_MAX_REFUSED 1": constants(greedy_file, _MAX_REFUSED=1),
    "_MAX_REFUSED inf": constants(greedy_file, _MAX_REFUSED=math.inf),
    "_MAX_EXTRAS 0": constants(greedy_file, _MAX_EXTRAS=0),
    "buckets never wait": greedy_method("is_worth_waiting", lambda self, bucket, more: False),
    "streams not kept busy": greedy_method("keep_streams_busy", lambda self, until: None),
    "_CHEAP 0": constants(slack, _CHEAP=0.0),
    "_HALVINGS 14": constants(slack, _HALVINGS=14),
    "_OVERTAKEN 2": constants(slack, _OVERTAKEN=2),
    "slack _LOOKAHEAD 1": constants(slack, _LOOKAHEAD=1),
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one order: milliseconds, at wrong costs too, gigabytes, launches, seconds of the search."""

    ms: float
    noisy: float
    peak: float
    launches: int
    seconds: float


def noisy(dag: Dag, seed: int) -> Dag:
    draw = random.Random(seed)
    nodes = tuple(
        dataclasses.replace(node, ms=node.ms * math.exp(NOISE[node.kind] * draw.gauss(0, 1))) for node in dag.nodes
    )
    return Dag(nodes, dag.storages)


def figures(timeline: Any, seconds: float) -> Figures:
    order = timeline.order.tolist()
    wrong = [simulate(noisy(timeline.dag, seed), order).makespan for seed in range(SEEDS)]
    return Figures(timeline.makespan, sum(wrong) / SEEDS, timeline.peak_bytes / 1e9, len(timeline.dag.starts), seconds)


def of_case(
    gm: Any, ranks: Any, links: str, chosen: Sequence[str], own_peak: bool = False, in_flight: int | None = None
) -> dict[str, Figures]:
    """Figures of one graph: today's with and without buckets, and those of all variants."""
    model = CostModel(LINKS[links], ranks=ranks)
    captured = to_dag(gm, model)
    contracted, of_nodes = captured.contracted, bucket_keys(captured)
    keys = [of_nodes[unit[0]] for unit in contracted.members]
    price = functools.cache(lambda starts: model.merged([captured.nodes[contracted.members[i][0]] for i in starts]))
    budget = captured.dag.peak_bytes() if own_peak else schedule_file.default_budget(captured.dag)

    def options() -> dict[str, Any]:
        return {"in_flight": in_flight, "effort": schedule_file.default_effort(captured.dag)}

    def searched() -> Any:
        return schedule_file.schedule(contracted.dag, budget=budget, **options())

    def bucketed(found: Any) -> Any:
        return bucket_file.bucket(contracted.dag, found, keys, lambda starts: price(tuple(starts)), **options())[1]

    def timed(function: Callable[[], Any]) -> tuple[Any, Figures]:
        began = time.process_time()
        found = function()
        return found, figures(found.timeline, time.process_time() - began)

    bucketed(searched())  # what a dag caches takes time once
    found, of_search = timed(searched)
    rows = {"search": of_search, "buckets": timed(lambda: bucketed(found))[1]}
    for name, variant in itertools.chain(SEARCH.items(), BUCKETS.items()):
        if not chosen or name in chosen:
            with variant():
                rows[name] = timed(searched if name in SEARCH else lambda: bucketed(found))[1]
    return rows


def summary(found: dict[str, dict[str, Figures]]) -> list[dict[str, Any]]:
    """A row for each variant, over all cases that have it."""
    rows = []
    for name in (*SEARCH, *BUCKETS):
        base = "search" if name in SEARCH else "buckets"
        pairs = [(case[name], case[base]) for case in found.values() if name in case]
        if not pairs:
            continue
        ratios = [a.ms / b.ms for a, b in pairs]

        def mean(what: Callable[[Figures], float], pairs: Any = pairs) -> float:
            return math.exp(sum(math.log(max(what(a), 1e-9) / max(what(b), 1e-9)) for a, b in pairs) / len(pairs))

        rows.append(
            {
                "variant": name,
                "cases": len(pairs),
                "worst": max(ratios),
                "best": min(ratios),
                "mean": mean(lambda f: f.ms),
                "longer": sum(ratio > MARGIN for ratio in ratios),
                "shorter": sum(ratio < 1 / MARGIN for ratio in ratios),
                "noisy": mean(lambda f: f.noisy),
                "peak": mean(lambda f: f.peak),
                "launches": mean(lambda f: f.launches),
                "seconds": mean(lambda f: f.seconds),
            }
        )
    return rows


def by_limits(found: dict[str, dict[str, Figures]]) -> dict[str, dict[str, dict[str, Figures]]]:
    """The cases by their limits, which end their names."""
    tables: dict[str, dict[str, dict[str, Figures]]] = {}
    for name, case in found.items():
        limits = name.split(", ", 3)[3:]
        tables.setdefault(limits[0] if limits else "default budget", {})[name] = case
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="folder of traced graphs, from overlap_zoo.py --graphs")
    parser.add_argument("--families", nargs="+", help="default: all in the folder")
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--variants", nargs="+", default=[], help="default: all")
    parser.add_argument("--own-peak", action="store_true", help="with the peak of the graph's own order as budget")
    parser.add_argument("--in-flight", type=int, help="with so many collectives in flight")
    parser.add_argument("--show", type=Path, nargs="+", help="print files of results, and run nothing")
    parser.add_argument("--summary", type=Path, help="JSON file of the printed rows")
    parser.add_argument("--out", type=Path, help="JSON file; cases in it are not run again")
    args = parser.parse_args()
    found: dict[str, dict[str, Figures]] = {}
    for known in args.show or [path for path in [args.out] if path and path.exists()]:
        for case, rows in json.loads(known.read_text())["cases"].items():
            found[case] = {name: Figures(**row) for name, row in rows.items()}
    for path in [] if args.show else sorted(args.graphs.glob("*.pt")):
        if args.families and path.stem not in args.families:
            continue
        saved = load_graphs(str(path))
        for (name, gm), links in itertools.product(saved.graphs.items(), args.links):
            limits = ", own peak" * args.own_peak + (f", {args.in_flight} in flight" if args.in_flight else "")
            case = f"{path.stem}, {name}, {links}{limits}"
            if case in found or not any("c10d" in str(node.target) for node in gm.graph.nodes):
                continue
            found[case] = of_case(gm, saved.ranks, links, args.variants, args.own_peak, args.in_flight)
            print(case, f"{found[case]['search'].seconds + found[case]['buckets'].seconds:.1f} s", flush=True)
            if args.out:
                cases = {key: {n: dataclasses.asdict(row) for n, row in rows.items()} for key, rows in found.items()}
                text = {"torch": torch.__version__, "summary": summary(found), "cases": cases}
                args.out.write_text(json.dumps(text, indent=1) + "\n")
    tables = {limits: summary(cases) for limits, cases in by_limits(found).items()}
    if args.summary:
        args.summary.write_text(json.dumps({"torch": torch.__version__, **tables}, indent=1) + "\n")
    head = ("worst", "best", "mean", "longer", "shorter", "noisy", "peak", "launches", "seconds")
    for limits, rows in tables.items():
        print(f"{limits:<24}{'cases':>6}" + "".join(f"{what:>9}" for what in head))
        for row in rows:
            print(f"{row['variant']:<24}{row['cases']:>6}" + "".join(
                f"{row[what]:>9}" if isinstance(row[what], int) else f"{row[what]:>9.4f}" for what in head
            ))  # fmt: skip


if __name__ == "__main__":
    main()

"""``spanwise fuzz``: random cases, counts by kind, and one line for each failure that reruns it."""

from __future__ import annotations

import collections
import contextlib
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spanwise.cli.fuzz.cases import Case, random_case
from spanwise.cli.fuzz.check import TOLERANCES, Outcome, check
from spanwise.cli.fuzz.ranks import Ranks
from spanwise.cli.output import check_writable, json_text, write_text
from spanwise.cli.report.terminal import console


@dataclass(frozen=True)
class FuzzOptions:
    """Options of ``spanwise fuzz``.

    Attributes:
        cases: random cases; each is an attention call with its gradients, or a wrong call that must be refused.
        seed: of the cases; the same seed gives the same cases.
        case: SEED:INDEX: run this case alone.
        ranks: run only the cases with so many ranks; other cases do not change.
        only: run only cases of this kind, such as ring, sdpa, bfloat16 or documents; several must all apply.
        out: file for the counts, errors and failures as JSON.
    """

    num_cases: int = 300
    seed: int = 0
    case: str | None = None
    ranks: int | None = None
    only: tuple[str, ...] = ()
    out: str | None = None

    def __post_init__(self) -> None:
        if self.num_cases < 1 or self.seed < 0:
            raise ValueError(f"cases must be at least 1 and seed at least 0, got {self.num_cases} and {self.seed}")
        if self.ranks is not None and not 1 <= self.ranks <= 8:
            raise ValueError(f"ranks must be between 1 and 8, got {self.ranks}")
        if self.case is not None:
            self.named()

    def named(self) -> tuple[int, int]:
        """Seed and index of ``--case``."""
        parts = (self.case or "").split(":")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise ValueError(f"a case is SEED:INDEX, such as 0:17, got {self.case!r}")
        return int(parts[0]), int(parts[1])

    def chosen(self) -> Iterator[Case]:
        """The cases to run."""
        if self.case is not None:
            yield random_case(*self.named())
            return
        for index in range(self.num_cases):
            case = random_case(self.seed, index)
            kinds = case.kinds()
            words = {word for kind in kinds.values() for word in kind.split(", ")} | {case.exchange}
            words |= {group.removeprefix("option ") for group in kinds}
            if self.ranks in (None, case.num_ranks) and words.issuperset(self.only):
                yield case


def fuzz(options: FuzzOptions) -> int:
    """Compare random calls with dense attention. Runs local ranks; outputs and gradients, in float64."""
    check_writable(options.out)
    cases = list(options.chosen())
    if not cases:
        raise ValueError(f"none of {options.num_cases} cases is {' and '.join(options.only)}: leave out a filter")
    begin = time.perf_counter()
    outcomes = run(cases)
    if not outcomes:
        raise ValueError("stopped before the first case had run")
    result = summary(options, len(cases), outcomes, time.perf_counter() - begin)
    if options.case is not None:
        print(cases[0])
    else:
        for table in tables(result):
            console().print(table)
    for failure in result["failures"]:
        print(f"spanwise fuzz --case {failure['case']}\n    {failure['error']}", flush=True)
    print(f"{len(outcomes) - len(result['failures'])} of {len(outcomes)} cases passed in {result['seconds']:.0f} s")
    if result["lost"]:
        print(f"ranks ended or hung at the first attempt, and ran again: {', '.join(result['lost'])}")
    write_text(options.out, lambda: json_text(result))
    return 1 if result["failures"] else 0


def run(cases: Sequence[Case]) -> list[Outcome]:
    """The outcome of each case, with a progress display; after Ctrl-C, of those that have run."""
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    outcomes = []
    # One pool of the largest size: its ranks idle in smaller cases.
    with Ranks(max(case.num_ranks for case in cases)) as ranks, Progress(*columns, console=console()) as progress:
        task = progress.add_task("cases", total=len(cases))
        with contextlib.suppress(KeyboardInterrupt):
            for case in cases:
                outcomes.append(check(case, ranks))
                progress.advance(task)
    return outcomes


def summary(options: FuzzOptions, chosen: int, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Counts by kind of the `chosen` cases, largest errors by dtype and result, and failures, as JSON holds them."""
    num_cases = options.num_cases if len(outcomes) == chosen else outcomes[-1].case.index + 1  # stopped early
    filters = [] if options.ranks is None else ["--ranks", str(options.ranks)]
    filters += [word for kind in options.only for word in ("--only", kind)]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    worst: dict[str, dict[str, float]] = {dtype: {} for dtype in TOLERANCES}
    for outcome in outcomes:
        for group, kind in outcome.case.kinds().items():
            head, _, option = group.partition(" ")
            counts[head][option or kind] += 1
        errors = worst[outcome.case.dtype]
        for name, error in outcome.worst.items():
            errors[name] = max(errors.get(name, 0.0), error)
    return {
        "command": shlex.join(["spanwise", "fuzz", "--cases", str(num_cases), "--seed", str(options.seed), *filters]),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {platform.system()}",
        "cases": len(outcomes),
        "failures": [{"case": x.case.name, "error": x.error} for x in outcomes if x.error],
        "lost": [x.case.name for x in outcomes if x.lost],
        "refused": sum(x.case.refusal is not None and not x.error for x in outcomes),
        "counts": {group: dict(sorted(found.items())) for group, found in sorted(counts.items())},
        "tolerances": TOLERANCES,
        "worst_errors": worst,
        "seconds": round(seconds, 1),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """Counts by kind, and the largest errors."""
    kinds = Table("kind", "cases", title="cases by kind")
    for group, found in result["counts"].items():
        kinds.add_row(group, ", ".join(f"{kind} {count}" for kind, count in found.items()))
    errors = Table("dtype", "tolerance", "largest error", title="errors, relative to the sum of absolute terms")
    for dtype, found in result["worst_errors"].items():
        text = ", ".join(f"{name} {error:.2g}" for name, error in sorted(found.items()))
        errors.add_row(dtype, f"{result['tolerances'][dtype]:g}", text)
    return [kinds, errors]

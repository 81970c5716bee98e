"""Orders improved by moving nodes as late or as early as dependencies and limits allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spanwise.overlap.ir.memory import AllLimits, ResourceLimit
from spanwise.overlap.search.priorities import SchedulingProblem


def as_late_as_possible(problem: SchedulingProblem, order: Sequence[int], movable: Sequence[bool]) -> list[int]:
    """The same order, but each `movable` node comes right before its first user."""
    deps = problem.deps
    has_run = bytearray(len(order))
    found: list[int] = []

    def run(i: int) -> None:
        has_run[i] = True
        found.append(i)

    for i in order:
        if not movable[i]:
            _run_with_deps(i, deps, has_run, run)
    for i in order:
        _run_with_deps(i, deps, has_run, run)
    return found


def _run_with_deps(i: int, deps: Sequence[Sequence[int]], has_run: bytearray, run: Callable[[int], None]) -> None:
    """Run a node after all dependencies that have not run; `run` must set `has_run`."""
    stack = [i]
    while stack:
        i = stack[-1]
        before = [dep for dep in deps[i] if not has_run[dep]]
        if before:
            stack += before
            continue
        stack.pop()
        if not has_run[i]:
            run(i)


def starts_early_waits_late(problem: SchedulingProblem, order: Sequence[int], budget: int) -> list[int]:
    """An order with every start as early, and every wait as late, as dependencies and limits allow.

    Compute keeps its order, and so does every stream. The new order takes no longer than the old one at any costs. If a
    collective takes longer than estimated, or compute before it does, more time is left until its first reader.

    Args:
        order: one that keeps all limits of the problem, and `budget`.
        budget: most bytes of the new order.
    """
    stream, deps, users = problem.stream, problem.deps, problem.users
    most = [budget, *(limit.budget for limit in problem.limits[1:])]
    limits = AllLimits(
        [ResourceLimit(old.lifetimes, new, order) for old, new in zip(problem.limits, most, strict=True)]
    )
    streams: list[list[int]] = [[] for _ in range(problem.num_streams)]  # starts, the next one last
    for i in reversed(order):
        if stream[i] > 0:
            streams[stream[i]].append(i)
    missing = [len(before) for before in deps]
    has_run = bytearray(len(order))
    found: list[int] = []
    passed: dict[int, None] = {}  # waits whose turn is over; in that order

    def run(i: int) -> None:
        limits.run(i)
        has_run[i] = True
        passed.pop(i, None)
        found.append(i)
        for user in users[i]:
            missing[user] -= 1

    def issue(i: int) -> None:
        _run_with_deps(i, deps, has_run, run)

    def start_all() -> None:
        for starts in streams:
            while starts and (has_run[starts[-1]] or (not missing[starts[-1]] and limits.is_safe(starts[-1]))):
                issue(starts.pop())

    for i in order:
        if has_run[i]:
            continue
        if stream[i] < 0 and users[i]:
            passed[i] = None
            continue
        for dep in deps[i]:
            issue(dep)
        if not limits.is_safe(i):  # back to the known order, which always fits
            for wait in list(passed):
                issue(wait)
        issue(i)
        start_all()
    for i in list(passed):
        issue(i)
    return found

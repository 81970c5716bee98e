"""Errors of collectives, and calls in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType


class ExchangeError(RuntimeError):
    """A collective failed: a rank is gone, stuck or too late.

    Afterwards the gloo groups of this process are unusable, also those of other collectives: their connections are
    closed.

    Attributes:
        what: the collective.
        rank: this rank in the group of the collective.
        lost: lost ranks of the group, as far as this rank knows. Empty on a rank whose peers failed because of a rank
            of another group.
        lost_global: lost ranks, as global ranks, in this group or in the group where the failure began.
        calls: the last calls of each rank that reported, by rank of the group: number, mask, shapes, dtype, ….

    >>> issubclass(ExchangeError, RuntimeError), ExchangeError("rank 1 is lost").lost
    (True, ())
    """

    what: str = ""
    rank: int = -1
    lost: tuple[int, ...] = ()
    lost_global: tuple[int, ...] = ()
    calls: Mapping[int, tuple[str, ...]] = MappingProxyType({})


class MismatchError(ExchangeError, ValueError):
    """Ranks made different calls: another plan, mask, kernel, dtype, shape, … at the same place. Raised on every rank.

    If every rank raises in the call itself, the groups stay usable. A rank that had gone on, because its call was the
    expected one, raises where it waits for the others, at its next call or in the backward; then the gloo groups of the
    process are unusable. So they are after a call, or a backward, that failed on one rank: every rank raises this then.

    >>> issubclass(MismatchError, ValueError)
    True
    """


def ranks_in_words(ranks: Sequence[object], prefix: str = "rank") -> str:
    """Ranks for a message.

    >>> ranks_in_words([1]), ranks_in_words([0, 2], "global rank")
    ('rank 1', 'global ranks 0, 2')
    """
    return f"{prefix}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def in_words(facts: dict[str, str]) -> str:
    """``name(plan 1f…, dtype float32, …)``."""
    rest = ", ".join(f"{label} {value}" for label, value in facts.items() if label != "call")
    return f"{facts['call']}({rest})"


def calls_in_words(number: int, name: str, told: dict[int, list[tuple[int, dict[str, str]]]]) -> str:
    """The text of a mismatch in call `number`.

    >>> def calls(dtype): return [(1, {"call": "f", "plan": "1f", "dtype": "float32"}),
    ...                           (2, {"call": "f", "plan": "1f", "dtype": dtype})]
    >>> print(calls_in_words(2, "group 'cp'", {0: calls("float32"), 1: calls("float16"), 2: calls("float32")}))
    ranks disagree on call 2 in group 'cp': ranks 0, 2: f(plan 1f, dtype float32); rank 1: dtype float16. The call \
before, on all ranks: f(plan 1f, dtype float32). Every rank must make the same calls in the same order
    """
    by_facts: dict[str, list[int]] = {}
    for rank, calls in sorted(told.items()):
        facts = next((facts for n, facts in calls if n == number), {"call": "an unknown call"})
        by_facts.setdefault(json.dumps(facts), []).append(rank)
    first: dict[str, str] | None = None
    parts = []
    for text, ranks in by_facts.items():
        facts = json.loads(text)
        said = in_words(facts)
        if first is not None and facts.keys() == first.keys() and facts["call"] == first["call"]:
            said = ", ".join(f"{label} {value}" for label, value in facts.items() if first[label] != value)
        first = first or facts
        parts.append(f"{ranks_in_words(ranks)}: {said}")
    before = {json.dumps([facts for n, facts in calls if n == number - 1]) for calls in told.values()}
    earlier = json.loads(before.pop()) if len(before) == 1 else []
    tail = f" The call before, on all ranks: {in_words(earlier[0])}." if earlier else ""
    return (
        f"ranks disagree on call {number} in {name}: {'; '.join(parts)}.{tail} Every rank must make the same "
        f"calls in the same order"
    )

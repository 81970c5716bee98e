"""Errors of collectives."""

from __future__ import annotations

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
    process are unusable.

    >>> issubclass(MismatchError, ValueError)
    True
    """


def ranks_in_words(ranks: Sequence[object], prefix: str = "rank") -> str:
    """Ranks for a message.

    >>> ranks_in_words([1]), ranks_in_words([0, 2], "global rank")
    ('rank 1', 'global ranks 0, 2')
    """
    return f"{prefix}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

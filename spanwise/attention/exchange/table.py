"""The exchanges by name, one line each; simplest first."""

from __future__ import annotations

import inspect
from typing import Any

from spanwise.attention.exchange.all_gather import AllGather
from spanwise.attention.exchange.base import Exchange
from spanwise.attention.exchange.hierarchical import Hierarchical
from spanwise.attention.exchange.needed import Needed
from spanwise.attention.exchange.ring import Ring
from spanwise.attention.exchange.ulysses import Ulysses

ULYSSES = Ulysses()  # also the trade inside groups of another exchange
EXCHANGES: dict[str, Exchange] = {
    "all_gather": AllGather(),
    "needed": Needed(),
    "hierarchical": Hierarchical(),
    "ring": Ring(),
    "ulysses": ULYSSES,
}


def resolve(exchange: str | Exchange) -> Exchange:
    """The exchange of a name; an `Exchange` as it is; ``ValueError`` for others, and for one that breaks its promises.

    >>> resolve("needed")
    Needed()
    """
    if isinstance(exchange, Exchange):
        if type(exchange) not in map(type, EXCHANGES.values()):
            _check_own(exchange)
        return exchange
    given: Any = exchange
    if isinstance(given, type) and issubclass(given, Exchange):
        raise ValueError(f"an exchange is an object, got the class {given.__name__}: pass {given.__name__}()")
    if not isinstance(given, str) or given not in EXCHANGES:
        raise ValueError(f"unknown exchange {given!r}; choose one of {[*EXCHANGES, 'auto']} or an Exchange object")
    return EXCHANGES[given]


def _check_own(exchange: Exchange) -> None:
    """``ValueError`` for an exchange of the caller that no plan can hold, or that would leave ranks waiting."""
    cls = type(exchange)
    if not exchange.name or exchange.name in (*EXCHANGES, "auto"):
        raise ValueError(
            f"the exchange {cls.__name__} needs another name than {exchange.name!r}: files and fingerprints know an "
            f"exchange by its name"
        )
    if exchange.levels(2) != (2, 1):
        raise ValueError(
            f"exchange {exchange.name!r} must move K/V between all ranks, levels(n) == (n, 1); got levels(2) == "
            f"{exchange.levels(2)}. Only 'ulysses' trades heads for tokens"
        )
    if inspect.isgeneratorfunction(cls.start):
        raise ValueError(
            f"exchange {exchange.name!r}: start is a generator function, so nothing is in flight when it returns; "
            f"start the collectives, then return an iterator"
        )

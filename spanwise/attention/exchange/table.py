"""The exchanges by name, one line each; simplest first."""

from __future__ import annotations

from typing import Any

from spanwise.attention.exchange.all_gather import AllGather
from spanwise.attention.exchange.base import Exchange
from spanwise.attention.exchange.needed import Needed
from spanwise.attention.exchange.ring import Ring
from spanwise.attention.exchange.ulysses import Ulysses

EXCHANGES: dict[str, Exchange] = {
    "all_gather": AllGather(),
    "needed": Needed(),
    "ring": Ring(),
    "ulysses": Ulysses(),
}


def resolve(exchange: str | Exchange) -> Exchange:
    """The exchange of a name; passes an `Exchange` through.

    Raises:
        ValueError: an unknown name, or an object that is not an `Exchange`.

    >>> resolve("needed")
    Needed()
    """
    if isinstance(exchange, Exchange):
        return exchange
    given: Any = exchange
    if isinstance(given, type) and issubclass(given, Exchange):
        raise ValueError(f"an exchange is an object, got the class {given.__name__}: pass {given.__name__}()")
    if given not in EXCHANGES:
        raise ValueError(f"unknown exchange {given!r}; choose one of {[*EXCHANGES, 'auto']} or an Exchange object")
    return EXCHANGES[given]

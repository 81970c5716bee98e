"""Compiles the loops of the balancers; import it lazily, because it loads numba."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from numba import njit  # type: ignore[import-untyped, unused-ignore]
from numba.core import event  # type: ignore[import-untyped, unused-ignore]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The function as machine code, kept on disk where that is possible."""
    try:
        fast = njit(cache=True)(function)
    except RuntimeError:  # no writable place for the cache: a read-only installation without a home
        fast = njit(function)
    return cast(_Function, fast)


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Log a line where the calls inside compile first: some seconds, once an installation."""
    with event.install_listener("numba:compile", _Notice()):
        yield


class _Notice(event.Listener):  # type: ignore[misc, unused-ignore]
    def on_start(self, event: Any) -> None:
        _notice()

    def on_end(self, event: Any) -> None:
        pass


@functools.cache
def _notice() -> None:
    logging.getLogger("spanwise").warning("spanwise: compiling the search of layouts, once; this takes some seconds")

"""Compiles the loops of the local balancer; import it lazily, because it loads numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit  # type: ignore[import-untyped, unused-ignore]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The function as machine code, kept on disk where that is possible."""
    try:
        fast = njit(cache=True)(function)
    except RuntimeError:  # no writable place for the cache: a read-only installation without a home
        fast = njit(function)
    return cast(_Function, fast)

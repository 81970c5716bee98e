"""Module paths of version 0.1 and an argument's old name, kept for one release: they work and warn.

`spanwise.__path__` includes this folder, so that ``from spanwise.cost import H100`` still works. Version 0.3 deletes
this folder and the lines that name it. docs/moved.md lists old and new paths.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

MODULES = (
    "balancers",
    "cost",
    "layout",
    "mask",
    "packed",
    "packing",
    "parallel",
    "plan",
    "planner",
    "ptrr",
    "rank_plan",
    "thd_order",
)


def mask_name(new: str, old: str | None, *, wrappers: int = 0) -> str:
    """The value of an argument `mask_name` that was called `mask`; warns where the old name was used.

    Args:
        wrappers: decorators around the function that asks.
    """
    if old is None:
        return new
    if new not in ("default", old):
        raise ValueError(f"mask_name={new!r} and its old name mask={old!r} were both given; leave mask out")
    if not isinstance(old, str):
        raise ValueError(f"mask= named one of the plan's masks and is now mask_name=; got a {type(old).__name__}")
    # The caller of the function that asks. Compiled code has no caller to name.
    if not torch.compiler.is_compiling():
        text = f"mask={old!r} is now mask_name={old!r}; the old name goes with spanwise 0.3"
        warnings.warn(text, DeprecationWarning, stacklevel=3 + wrappers)
    return old


def forward(old: str, *new: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for the module `old`: finds its names in the modules `new`, with a ``DeprecationWarning``."""

    def find(name: str) -> Any:
        if not name.startswith("__"):
            for path in new:
                found = getattr(importlib.import_module(path), name, None)
                # Names of our own: loaders of graphs ask packages for modules such as torch.
                if str(getattr(found, "__module__", "")).startswith("spanwise."):
                    text = f"{old}.{name} is now {path}.{name}; the old path goes with spanwise 0.3"
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                    return found
        raise AttributeError(f"module {old!r} has no attribute {name!r}; its names are now in {', '.join(new)}")

    return find

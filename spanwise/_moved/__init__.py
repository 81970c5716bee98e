"""Module paths of version 0.1, kept for one release: each file forwards names to their new modules and warns.

`spanwise.__path__` includes this folder, so that ``from spanwise.cost import H100`` still works. Version 0.3 deletes
this folder and the lines that name it in `spanwise`, `attention` and `batch`. docs/moved.md lists old and new paths.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

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

"""Checks of the arguments of `make_plan`; each returns the checked value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spanwise import hardware as rates
from spanwise.masks.span_mask import SpanMask
from spanwise.planning import memory
from spanwise.routes.exchanges import EXCHANGES, Exchange

_LARGEST = 2**31  # of any number given


def as_masks(mask: Any) -> dict[str, SpanMask]:
    """Masks by name, from one or several."""
    named = dict(mask) if isinstance(mask, Mapping) else {"default": mask}
    if not named:
        raise ValueError("make_plan needs at least one mask, got an empty mapping")
    masks: dict[str, SpanMask] = {}
    for name, value in named.items():
        if isinstance(value, SpanMask):
            masks[name] = value
        elif hasattr(value, "kv_num_blocks") and hasattr(value, "mask_mod"):
            masks[name] = SpanMask.from_block_mask(value)
        else:
            raise ValueError(
                f"mask {name!r} is a {type(value).__name__}; make_plan takes a SpanMask or a BlockMask. A dense "
                f"mask or a mask_mod becomes one with SpanMask.from_mask_mod"
            )
    return masks


def levels(num_ranks: Any, exchange: Exchange | None) -> tuple[int, int]:
    """``(groups, ranks of a group)`` from `num_ranks` and the exchange, None for "auto"."""
    if not isinstance(num_ranks, (tuple, list)):
        size = required("num_ranks", num_ranks)
        return (size, 1) if exchange is None else exchange.levels(size)
    if len(num_ranks) != 2:
        raise ValueError(f"num_ranks must be an integer or (outer, inner), got {num_ranks!r}")
    outer, inner = (required("each of num_ranks", size) for size in num_ranks)
    if exchange is not None and exchange.heads:
        between = [name for name, each in EXCHANGES.items() if not each.heads]
        raise ValueError(
            f"num_ranks={num_ranks!r} has Ulysses on its inner axis already: exchange is the outer one's, one of "
            f"{[*between, 'auto']}"
        )
    return outer, inner


def shape(num_q_heads: Any, num_kv_heads: Any, head_dim: Any, v_head_dim: Any, inner: int) -> dict[str, int | None]:
    """Heads and head dims with defaults filled in; `inner` ranks must be able to share the heads."""
    q_heads, dim = number("num_q_heads", num_q_heads), number("head_dim", head_dim)
    kv_heads = number("num_kv_heads", num_kv_heads) or q_heads
    if q_heads is not None and kv_heads is not None:
        memory.check_heads(q_heads, kv_heads, inner)
    v_dim = number("v_head_dim", v_head_dim) or dim
    return {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": dim, "v_head_dim": v_dim}


def number(name: str, value: Any, largest: int = _LARGEST) -> int | None:
    """`required`, or None where the value is None."""
    return None if value is None else required(name, value, largest)


def required(name: str, value: Any, largest: int = _LARGEST) -> int:
    """The value as a positive integer."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 0 < value < largest:
        raise ValueError(f"{name} must be a positive integer, got {value!r}; at most {largest - 1}")
    return int(value)


def check_hardware(hardware: Any) -> None:
    """``ValueError`` unless it is a Hardware or None."""
    if hardware is not None and not isinstance(hardware, rates.Hardware):
        raise ValueError(
            f"hardware must be a spanwise.Hardware, such as spanwise.H100 or Hardware.load(path), got {hardware!r}"
        )

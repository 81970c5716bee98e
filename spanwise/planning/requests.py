"""Request: the arguments of `make_plan`, checked and in one form. All errors about arguments are raised here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from spanwise import hardware as rates
from spanwise.layouts.packing import Packing
from spanwise.masks.span_mask import SpanMask
from spanwise.planning import memory, recurrence
from spanwise.routes.exchanges import EXCHANGES, Exchange, resolve

_LARGEST = 2**31  # of any number given
_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Request(NamedTuple):
    """Checked arguments of `make_plan`.

    Attributes:
        fields: of every plan of the request, except what its layout decides.
        levels: ``(groups, ranks of a group)``.
        exchange: None for "auto".
        stages, keep_kv: None where left open.
        block_size: as given.
        budget: bytes, or None.
    """

    fields: dict[str, Any]
    levels: tuple[int, int]
    exchange: Exchange | None
    stages: int | None
    keep_kv: bool | None
    block_size: int
    budget: int | None


def checked(
    mask: Any, num_ranks: Any, *, exchange: Any, stages: Any, keep_kv: Any, block_size: Any,
    num_q_heads: Any, num_kv_heads: Any, head_dim: Any, v_head_dim: Any, kv_row_dim: Any, dtype: Any, hardware: Any,
    memory_budget: Any, cu_seqlens: Any, packing: Any, recurrences: Any,
) -> Request:  # fmt: skip
    """The request of these arguments of `make_plan`; ``ValueError`` names a wrong one, its value and a remedy."""
    masks = _as_masks(mask)
    chosen = None if exchange == "auto" else resolve(exchange)
    levels = _levels(num_ranks, chosen)
    shape = _shape(num_q_heads, num_kv_heads, head_dim, v_head_dim, levels[1])
    if keep_kv is not None and not isinstance(keep_kv, bool):
        raise ValueError(f"keep_kv must be True, False or None, got {keep_kv!r}")
    if keep_kv is False and levels[0] == 1 and levels[1] > 1:
        raise ValueError(
            "keep_kv=False drops K/V that another exchange brought; Ulysses alone brings none: leave it out"
        )
    check_hardware(hardware)
    hardware = hardware or rates.DEFAULT
    stages = _count("stages", stages)
    if chosen is not None and not chosen.counts(stages):
        raise ValueError(
            f"exchange {chosen.name!r} chooses its number of chunks itself, got stages={stages}; use exchange='needed'"
        )
    if chosen is not None and chosen.by_host and len(hardware.links) == 1:
        raise ValueError(
            f"exchange {chosen.name!r} needs hardware that has hosts, such as spanwise.H100 or "
            f"spanwise.H100.with_host_size(4); got {hardware.name!r} with one level of links"
        )
    if packing is not None:
        if not isinstance(packing, Packing) or cu_seqlens is not None:
            raise ValueError(f"give a spanwise.Packing or cu_seqlens, not both; got {packing!r} and {cu_seqlens!r}")
        for each in masks.values():
            packing.check_mask(each)
    if memory_budget is not None and (num_q_heads is None or head_dim is None):
        raise ValueError("a memory_budget needs num_q_heads and head_dim (and num_kv_heads): bytes follow from them")
    name = str(dtype).removeprefix("torch.")
    if name not in _ITEMSIZES:
        raise ValueError(f"dtype must be one of {sorted(_ITEMSIZES)} or the torch dtype of that name, got {dtype!r}")
    fields = {
        "masks": masks, **shape, "kv_row_dim": _count("kv_row_dim", kv_row_dim), "dtype": name,
        "itemsize": _ITEMSIZES[name], "hardware": hardware, "packing": packing,
        "recurrences": recurrence.checked(recurrences),
    }  # fmt: skip
    budget = _count("memory_budget", memory_budget, largest=2**63)
    return Request(fields, levels, chosen, stages, keep_kv, _required("block_size", block_size), budget)


def check_hardware(hardware: Any) -> None:
    """``ValueError`` unless it is a Hardware or None."""
    if hardware is not None and not isinstance(hardware, rates.Hardware):
        raise ValueError(
            f"hardware must be a spanwise.Hardware, such as spanwise.H100 or Hardware.load(path), got {hardware!r}"
        )


def check_sizes(num_ranks: Any, block_size: Any) -> int:
    """All ranks; ``ValueError`` for sizes that `make_plan` refuses with any mask."""
    outer, inner = _levels(num_ranks, None)
    _required("block_size", block_size)
    return outer * inner


def _levels(num_ranks: Any, exchange: Exchange | None) -> tuple[int, int]:
    """``(outer, inner)`` from `num_ranks` and the exchange."""
    if not isinstance(num_ranks, (tuple, list)):
        size = _required("num_ranks", num_ranks)
        return (size, 1) if exchange is None else exchange.levels(size)
    if len(num_ranks) != 2:
        raise ValueError(f"num_ranks must be an integer or (outer, inner), got {num_ranks!r}")
    outer, inner = (_required("each of num_ranks", size) for size in num_ranks)
    if exchange is not None and exchange.heads:
        between = [name for name, each in EXCHANGES.items() if not each.heads]
        raise ValueError(
            f"num_ranks={num_ranks!r} has Ulysses on its inner axis already: exchange is the outer one's, one of "
            f"{[*between, 'auto']}"
        )
    return outer, inner


def _shape(num_q_heads: Any, num_kv_heads: Any, head_dim: Any, v_head_dim: Any, inner: int) -> dict[str, int | None]:
    """Heads and head dims with defaults filled in; `inner` ranks must be able to share the heads."""
    q_heads, dim = _count("num_q_heads", num_q_heads), _count("head_dim", head_dim)
    kv_heads = _count("num_kv_heads", num_kv_heads) or q_heads
    if q_heads is not None and kv_heads is not None:
        memory.check_heads(q_heads, kv_heads, inner)
    v_dim = _count("v_head_dim", v_head_dim) or dim
    return {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": dim, "v_head_dim": v_dim}


def _count(name: str, value: Any, largest: int = _LARGEST) -> int | None:
    """`value` as an integer, None where it is None."""
    return None if value is None else _required(name, value, largest)


def _required(name: str, value: Any, largest: int = _LARGEST) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 0 < value < largest:
        raise ValueError(f"{name} must be a positive integer, got {value!r}; at most {largest - 1}")
    return int(value)


def _as_masks(mask: Any) -> dict[str, SpanMask]:
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

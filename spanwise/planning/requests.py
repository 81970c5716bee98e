"""Request: the arguments of `make_plan`, checked and in one form. All errors about arguments are raised here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from spanwise import hardware as rates
from spanwise.layouts.packing import Packing
from spanwise.masks.span_mask import SpanMask
from spanwise.planning import heads, recurrence
from spanwise.planning.recurrence import Recurrence
from spanwise.routes.exchanges import EXCHANGES, Exchange, resolve

_LARGEST = 2**31  # of any number given
_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked arguments of `make_plan`.

    Attributes:
        masks: by name.
        levels: ``(groups, ranks of a group)``.
        exchange: None for "auto".
        stages, keep_kv: None where left open.
        num_q_heads, num_kv_heads, head_dim, v_head_dim, kv_row_dim: None where not given.
        dtype, itemsize: name of the K/V dtype, bytes of an element.
        budget: whether there is a memory budget.
        recurrences: layers that carry a state, by name, or None.
    """

    masks: dict[str, SpanMask]
    levels: tuple[int, int]
    exchange: Exchange | None
    stages: int | None
    keep_kv: bool | None
    block_size: int
    num_q_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None
    kv_row_dim: int | None
    dtype: str
    itemsize: int
    hardware: rates.Hardware
    packing: Packing | None
    budget: bool
    recurrences: dict[str, Recurrence] | None

    def exchanges(self) -> list[Exchange]:
        """The exchanges to consider between groups, simplest first."""
        if self.exchange is not None:
            return [self.exchange]
        return [
            exchange
            for exchange in EXCHANGES.values()
            if not exchange.heads
            and exchange.counts(self.stages)
            and (exchange.keeps_kv or (self.budget and self.stages is None))
            and (not exchange.by_host or self.hardware.groups_on_a_host(*self.levels))
        ]

    def keeps_kv(self, exchange: Exchange) -> bool:
        """Whether received K/V are kept with this exchange."""
        return exchange.keeps_kv if self.keep_kv is None else self.keep_kv

    def fields(self) -> dict[str, Any]:
        """Fields of a plan that follow from the request alone; its exchange is replaced later."""
        names = (
            "masks", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "kv_row_dim", "dtype", "itemsize",
            "hardware", "packing", "recurrences",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "kv_exchange": EXCHANGES["all_gather"],
            "stages": 1,
            "keep_kv": self.keep_kv is not False,
        }


def checked(
    mask: Any, num_ranks: Any, *, exchange: Any, stages: Any, keep_kv: Any, block_size: Any,
    num_q_heads: Any, num_kv_heads: Any, head_dim: Any, v_head_dim: Any, kv_row_dim: Any, dtype: Any, hardware: Any,
    memory_budget: Any, cu_seqlens: Any, packing: Any, recurrences: Any,
) -> Request:  # fmt: skip
    """The request of these arguments of `make_plan`; ``ValueError`` names a wrong one, its value and a remedy."""
    masks = _as_masks(mask)
    chosen = None if exchange == "auto" else resolve(exchange)
    levels = _levels(num_ranks, chosen)
    _check_count("block_size", block_size)
    if stages is not None:
        _check_count("stages", stages)
    shape = _shape(num_q_heads, num_kv_heads, head_dim, v_head_dim, levels[1])
    if kv_row_dim is not None:
        _check_count("kv_row_dim", kv_row_dim)
        kv_row_dim = int(kv_row_dim)
    if keep_kv is not None and not isinstance(keep_kv, bool):
        raise ValueError(f"keep_kv must be True, False or None, got {keep_kv!r}")
    if keep_kv is False and levels[0] == 1 and levels[1] > 1:
        raise ValueError(
            "keep_kv=False drops K/V that another exchange brought; Ulysses alone brings none: leave it out"
        )
    check_hardware(hardware)
    if chosen is not None and not chosen.counts(stages):
        raise ValueError(
            f"exchange {chosen.name!r} chooses its number of chunks itself, got stages={stages}; use exchange='needed'"
        )
    hardware = hardware or rates.DEFAULT
    if chosen is not None and chosen.by_host and len(hardware.links) == 1:
        raise ValueError(
            f"exchange {chosen.name!r} needs hardware that has hosts, such as spanwise.H100 or "
            f"spanwise.H100.with_host_size(4); got {hardware.name!r} with one level of links"
        )
    if packing is not None:
        _check_packing(packing, masks, cu_seqlens)
    if memory_budget is not None:
        _check_count("memory_budget", memory_budget, largest=2**63)
        if num_q_heads is None or head_dim is None:
            raise ValueError(
                "a memory_budget needs num_q_heads and head_dim (and num_kv_heads): bytes follow from them"
            )
    name, itemsize = _dtype(dtype)
    return Request(
        masks, levels, chosen, None if stages is None else int(stages), keep_kv, int(block_size), *shape, kv_row_dim,
        name, itemsize, hardware, packing, memory_budget is not None, recurrence.checked(recurrences),
    )  # fmt: skip


def check_hardware(hardware: Any) -> None:
    """``ValueError`` unless it is a Hardware or None."""
    if hardware is not None and not isinstance(hardware, rates.Hardware):
        raise ValueError(
            f"hardware must be a spanwise.Hardware, such as spanwise.H100 or Hardware.load(path), got {hardware!r}"
        )


def check_sizes(num_ranks: Any, block_size: Any) -> int:
    """All ranks; ``ValueError`` for sizes that `make_plan` refuses with any mask."""
    _check_count("block_size", block_size)
    outer, inner = _levels(num_ranks, None)
    return outer * inner


def _levels(num_ranks: Any, exchange: Exchange | None) -> tuple[int, int]:
    """``(outer, inner)`` from `num_ranks` and the exchange."""
    if isinstance(num_ranks, (tuple, list)):
        if len(num_ranks) != 2:
            raise ValueError(f"num_ranks must be an integer or (outer, inner), got {num_ranks!r}")
        for value in num_ranks:
            _check_count("each of num_ranks", value)
        if exchange is not None and exchange.heads:
            between = [name for name, each in EXCHANGES.items() if not each.heads]
            raise ValueError(
                f"num_ranks={num_ranks!r} has Ulysses on its inner axis already: exchange is the outer one's, one of "
                f"{[*between, 'auto']}"
            )
        return int(num_ranks[0]), int(num_ranks[1])
    _check_count("num_ranks", num_ranks)
    return (int(num_ranks), 1) if exchange is None else exchange.levels(int(num_ranks))


def _shape(*given: Any) -> tuple[int | None, int | None, int | None, int | None]:
    """Heads and head dims as integers, defaults filled in; the last argument is the ranks of a group."""
    *shape, inner = given
    for name, value in zip(("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"), shape, strict=True):
        if value is not None:
            _check_count(name, value)
    num_q_heads, num_kv_heads, head_dim, v_head_dim = (None if value is None else int(value) for value in shape)
    num_kv_heads, v_head_dim = num_kv_heads or num_q_heads, v_head_dim or head_dim
    if num_q_heads is not None and num_kv_heads is not None:
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads={num_q_heads} is not a multiple of num_kv_heads={num_kv_heads}; each K/V head "
                f"serves as many query heads as the others"
            )
        heads.check_heads(num_q_heads, num_kv_heads, inner)
    return num_q_heads, num_kv_heads, head_dim, v_head_dim


def _check_count(name: str, value: Any, largest: int = _LARGEST) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value >= largest:
        raise ValueError(f"{name} must be less than {largest}, got {value}")


def _check_packing(packing: Any, masks: dict[str, SpanMask], cu_seqlens: Any) -> None:
    if not isinstance(packing, Packing):
        raise ValueError(f"packing must be a spanwise.Packing, got a {type(packing).__name__}")
    if cu_seqlens is not None:
        raise ValueError("the packing says where documents are: give packing or cu_seqlens, not both")
    for mask in masks.values():
        packing.check_mask(mask)


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


def _dtype(dtype: Any) -> tuple[str, int]:
    name = str(dtype).removeprefix("torch.")
    if name not in _ITEMSIZES:
        raise ValueError(f"dtype must be one of {sorted(_ITEMSIZES)} or the torch dtype of that name, got {dtype!r}")
    return name, _ITEMSIZES[name]

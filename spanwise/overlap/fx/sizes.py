"""Numbers for symbolic sizes while a graph is scheduled.

Costs and memory need numbers, and the same ones on all ranks: the sizes a rank saw when it compiled would lead to other
decisions elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import storage_of, tensors_of

_ALIGNED = 16  # bytes, a multiple of every element's

Sizes = int | Mapping[str, int]
"""A number for each symbol, or one for all."""


@contextlib.contextmanager
def assumed(gm: fx.GraphModule, size: Sizes) -> Iterator[Callable[[fx.GraphModule], None]]:
    """Inside, tensors in ``meta["val"]`` of all nodes have numeric sizes: those of `size`.

    Shared storages stay shared. Afterwards the old values are back, also in new nodes that took a value of an old one.
    Yields a function that puts them back in a copy of the graph. ``ValueError`` if `size` lacks a symbol or has a
    number below 1.
    """
    mode = _torch.fake_mode()
    tensors = [t for node in gm.graph.nodes for t in tensors_of(node)]
    storages = {storage_of(t) for t in tensors if not _is_static(t)} - {None}
    if not storages:
        yield lambda other: None
        return
    num_bytes: dict[int, int] = {}
    try:
        for t in tensors:
            if (storage := storage_of(t)) in storages and storage is not None:
                num_bytes[storage] = max(num_bytes.get(storage, 0), _extent(t, size))
    except KeyError as missing:
        raise ValueError(f"sizes has {size}, and the graph has {missing.args[0]} as well: give all of them") from None
    made: dict[int, torch.Tensor] = {}  # by the old storage
    before: dict[int, Any] = {}  # old values by the identity of the new ones

    def replace(value: Any) -> Any:
        storage = storage_of(value) if isinstance(value, torch.Tensor) else None
        if storage not in num_bytes or storage is None:
            return value
        with mode:
            if storage not in made:
                made[storage] = torch.empty(num_bytes[storage], dtype=torch.uint8, device=value.device)
            whole = made[storage].view(value.dtype)
            shape, strides, offset = _layout(value, size)
            number = torch.as_strided(whole, shape, strides, offset)
        before[id(number)] = value
        return number

    def restore(other: fx.GraphModule) -> None:
        _replace_values(other, lambda value: before.get(id(value), value))

    _replace_values(gm, replace)
    try:
        yield restore
    finally:
        restore(gm)


def has_symbols(gm: fx.GraphModule) -> bool:
    """Whether a tensor of the graph has a size without a number."""
    return not all(_is_static(tensor) for node in gm.graph.nodes for tensor in tensors_of(node))


def check_sizes(size: Any) -> None:
    """``ValueError`` unless `size` is a whole number of at least 1, or has such numbers by symbol."""
    numbers = size if isinstance(size, Mapping) else {"all symbols": size}
    if wrong := {name: number for name, number in numbers.items() if type(number) is not int or number < 1}:
        given = wrong if isinstance(size, Mapping) else repr(size)
        raise ValueError(f'sizes must be whole numbers of at least 1, as 4096 or {{"s0": 4096}}, got {given}')


def _replace_values(gm: fx.GraphModule, replace: Any) -> None:
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _torch.tree_map(replace, node.meta["val"])


def _is_static(tensor: torch.Tensor) -> bool:
    return all(type(size) is int for size in (*tensor.shape, tensor.untyped_storage().nbytes()))


def _layout(tensor: torch.Tensor, size: Sizes) -> tuple[list[int], list[int], int]:
    """Shape, strides and offset in elements; a negative size becomes 0."""
    numbers = [max(0, _torch.assume_symbols(n, size)) for n in (*tensor.shape, *tensor.stride())]
    return numbers[: tensor.ndim], numbers[tensor.ndim :], _torch.assume_symbols(tensor.storage_offset(), size)


def _extent(tensor: torch.Tensor, size: Sizes) -> int:
    """Bytes of its storage, at least as many as the tensor reaches."""
    shape, strides, offset = _layout(tensor, size)
    reach = offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    whole = _torch.assume_symbols(tensor.untyped_storage().nbytes(), size)
    return -(-max(whole, reach * tensor.element_size()) // _ALIGNED) * _ALIGNED

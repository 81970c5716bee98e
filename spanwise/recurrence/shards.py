"""Shards as rows, one a token, as routes number them; and back."""

# B batch, T tokens of this rank, R rows: T, or B * T where batch rows have layouts or documents of their own

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from spanwise.attention._limits import fix_sizes
from spanwise.recurrence.route import RecurrenceRoute


def check_route(route: RecurrenceRoute, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """``ValueError`` for anything but a route, such as a plan, and for DTensors."""
    if not isinstance(route, RecurrenceRoute):
        raise ValueError(f"route must come from recurrence_route(plan, mesh), got a {type(route).__name__}")
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise ValueError(f"{name} is a DTensor {x.placements}; give whole heads or channels by {name}.to_local()")


def to_rows(name: str, x: torch.Tensor, route: RecurrenceRoute, features: int) -> torch.Tensor:
    """``[R, b, …]`` from a shard ``[B, T, …]`` or ``[T, …]``; b is 1 where R has the batch rows, else B.

    ``ValueError`` names the tensor, whose dims after T are `features`.
    """
    before = x.dim() - features
    if before not in (1, 2) or x.shape[before - 1] != route.tokens.shape[0]:
        tokens = f"this rank's {route.tokens.shape[0]} tokens"
        raise ValueError(f"{name} must be {tokens} and {features} dims after them, got shape {tuple(x.shape)}")
    fix_sizes(*x.shape[before:])
    if before == 1:
        x = x.unsqueeze(0)
    if route.rows == 1:
        return x.transpose(0, 1)
    if x.shape[0] != route.rows:
        raise ValueError(f"{name} must have a batch dim of {route.rows}, as the route, got shape {tuple(x.shape)}")
    return x.flatten(0, 1).unsqueeze(1)


def from_rows(rows: torch.Tensor, route: RecurrenceRoute, flat: bool) -> torch.Tensor:
    """The inverse of `to_rows`; `flat` if the shard has no batch dim."""
    if route.rows == 1:
        x = rows.transpose(0, 1)
        return x.squeeze(0) if flat else x
    return rows.squeeze(1).unflatten(0, (route.rows, route.tokens.shape[0]))

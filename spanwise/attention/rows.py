"""How tensors lie in the rows that travel, one row for each token: `Form`, of which the executor takes any."""

# T tokens, R rows, F features of a row; B batch, H heads of K/V, D head dim of K, E of V

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

Tensors = tuple[torch.Tensor, ...]


class Form(Protocol):
    """How tensors lie in rows, on their way out and when they have come; a tuple of numbers.

    Attributes:
        sums: whether gradients travel in float32 at least, because several of them are summed.
    """

    @property
    def sums(self) -> bool: ...
    def leaving(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows ``[R, F]`` of the rank's own tensors."""

    def came_home(self, rows: torch.Tensor) -> Tensors:
        """Gradients of these tensors, from rows of gradients."""

    def arrived(self, rows: torch.Tensor) -> Tensors:
        """The tensors of a step, from its rows in order."""

    def going_home(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows of gradients of these tensors."""


class Rows(NamedTuple):
    """One tensor of rows, as it is."""

    sums: bool = True

    def leaving(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0]

    def came_home(self, rows: torch.Tensor) -> Tensors:
        return (rows,)

    def arrived(self, rows: torch.Tensor) -> Tensors:
        return (rows,)

    def going_home(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return gradients[0]


class KV(NamedTuple):
    """K ``[B, H, T, D]`` and V ``[B, H, T, E]`` as rows ``[T, B * H * (D + E)]``.

    Attributes:
        batch, heads, k_dim, v_dim: B, H, D and E.
        shard: whether the rows hold all of K as ``[B, H, T, D]``, then all of V, instead of both token by token.
    """

    batch: int
    heads: int
    k_dim: int
    v_dim: int
    shard: bool
    sums: bool = True

    def leaving(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        k, v = tensors
        if not self.shard:
            return torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=-1).flatten(1)
        rows = k.new_empty(k.shape[2], self.batch * self.heads * (self.k_dim + self.v_dim))
        for part, x in zip(self.arrived(rows), (k, v), strict=True):
            part.copy_(x)
        return rows

    def arrived(self, rows: torch.Tensor) -> Tensors:
        if not self.shard:
            both = rows.view(-1, self.batch, self.heads, self.k_dim + self.v_dim).permute(1, 2, 0, 3)
            return both[..., : self.k_dim], both[..., self.k_dim :]
        tokens, shape = rows.shape[0], (self.batch, self.heads, rows.shape[0])
        flat = rows.view(-1).split([self.batch * self.heads * tokens * dim for dim in (self.k_dim, self.v_dim)])
        return flat[0].view(*shape, self.k_dim), flat[1].view(*shape, self.v_dim)

    def came_home(self, rows: torch.Tensor) -> Tensors:
        return self.arrived(rows)

    def going_home(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.leaving(gradients)

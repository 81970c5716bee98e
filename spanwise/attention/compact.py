"""Rows that travel in place of K and V, and are expanded where they arrive: latents of multi-head latent attention."""

# B batch, h heads of rows, H heads, T tokens, d dims of rows, D head dim of K, E of V

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from spanwise.attention.executor import Tensors


@dataclasses.dataclass(frozen=True)
class Compact:
    """Rows from which K and V are expanded, such as the latents of multi-head latent attention.

    Autograd saves the rows and expands them again in the backward, once for the attention and once for the gradients
    of the rows: that is little compute beside attention, and expanded K/V are many times as large.

    Attributes:
        expand: K ``[B, Hkv, T, D]`` and V ``[B, Hkv, T, E]`` from the two tensors of rows; token by token.
        rows: two tensors ``[B, h, T, d]``.
        fetch: fetches rows in the backward that autograd is not to save; None if it saves them.
    """

    expand: Callable[[torch.Tensor, torch.Tensor], Any]
    rows: Tensors
    fetch: Callable[[], Tensors] | None = None

    def expanded(self) -> Tensors:
        """K and V, contiguous."""
        expand = functools.partial(_expand, self.expand)
        if self.fetch is None:
            return checkpoint(expand, *self.rows, use_reentrant=False, preserve_rng_state=False)
        first, fetch, needs_grad = [self.rows], self.fetch, [x.requires_grad for x in self.rows]

        def of_fetched() -> Tensors:
            if first:
                return expand(*first.pop())
            # The same graph as in the forward, or other tensors would be saved.
            return expand(*[x.detach().requires_grad_(y) for x, y in zip(fetch(), needs_grad, strict=True)])

        return checkpoint(of_fetched, use_reentrant=False, preserve_rng_state=False)

    @property
    def again(self) -> Callable[[], Tensors] | None:
        """Expands K and V again, without a graph; None in compiled code, whose partitioner decides."""
        if torch.compiler.is_compiling():
            return None
        expand, device = self.expand, self.rows[0].device.type
        fetch = self.fetch or functools.partial(tuple, self.rows)
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        @torch.no_grad()
        def expand_again() -> Tensors:
            with torch.autocast(device, dtype, enabled):  # as in the forward
                return _expand(expand, *fetch())

        return expand_again


def _expand(expand: Callable[[torch.Tensor, torch.Tensor], Any], *rows: torch.Tensor) -> Tensors:
    """K and V, contiguous; ``ValueError`` unless these are two tensors ``[B, H, T, D]`` of the rows' tokens."""
    batch, _, tokens, _ = rows[0].shape
    # Many functions reshape by -1, which fails without tokens. Compiled code does not know how many there are.
    spare = torch.compiler.is_compiling() or tokens == 0
    made = expand(*(torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in rows) if spare else rows)
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not all(isinstance(x, torch.Tensor) for x in made):
        raise ValueError(f"expand must return K and V, got {type(made).__name__}")
    if any(x.dim() != 4 or (x.shape[0], x.shape[2]) != (batch, tokens + spare) for x in made):
        raise ValueError(
            f"expand must return K and V as [batch, heads, tokens, head_dim] of the same batch and tokens, got "
            f"{tuple(made[0].shape)} and {tuple(made[1].shape)} from {tuple(rows[0].shape)} and {tuple(rows[1].shape)}"
        )
    k, v = (x[:, :, :tokens].clone(memory_format=torch.contiguous_format) if spare else x.contiguous() for x in made)
    return k, v


def check_rows(k: torch.Tensor, v: torch.Tensor, expand: object, tokens: int) -> None:
    """``ValueError`` unless `k` and `v` can travel and be expanded."""
    if not callable(expand):
        raise ValueError(f"expand must be a function from two tensors of rows to K and V, got {expand!r}")
    alike = k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and k.dtype == v.dtype
    if not alike or k.shape[2] != tokens:
        raise ValueError(
            f"with expand, k and v are [batch, heads, {tokens} tokens of this rank, dim] of one dtype and, but for "
            f"dim, of one shape, got {tuple(k.shape)} {k.dtype} and {tuple(v.shape)} {v.dtype}"
        )

"""Copies around a trade of tokens for heads: heads of tokens into the order in which they travel, and back."""

# n ranks of the group; T tokens of this rank, S of the group; B batch; H heads of a token, h of them on a rank;
# D head dim; F features of a head on the wire: D, or K and V side by side; W rows on the wire

from __future__ import annotations

import torch


def split_heads(xs: tuple[torch.Tensor, ...], count: int, firsts: tuple[int, ...]) -> torch.Tensor:
    """Rows to send: for rank j `count` heads from ``firsts[j]`` on, of each ``[B, H, T, D]``, side by side.

    One copy; two where the ranks' windows of heads overlap in part.
    """
    num_ranks, num_heads = len(firsts), xs[0].shape[1]
    parts = []
    for x in xs:
        if num_heads == num_ranks * count:
            split = x.unflatten(1, (num_ranks, 1, count))
        elif num_ranks % num_heads == 0:
            split = x[:, :, None, None].expand(-1, -1, num_ranks // num_heads, -1, -1, -1)
        else:
            split = torch.cat([x[:, first : first + count] for first in firsts], dim=1)
            split = split.unflatten(1, (num_ranks, 1, count))
        parts.append(split.permute(1, 2, 4, 0, 3, 5))
    return torch.cat(parts, dim=-1).flatten(0, 2).flatten(1)


def join_heads(x_nTBhF: torch.Tensor, num_heads: int, firsts: tuple[int, ...]) -> torch.Tensor:
    """Reverse of `split_heads`: sums each head over the ranks that had it; ``[groups, T, B, heads of a group, F]``."""
    num_ranks, count = x_nTBhF.shape[0], x_nTBhF.shape[3]
    if num_heads == num_ranks * count:
        return x_nTBhF
    if num_ranks % num_heads == 0:
        return x_nTBhF.unflatten(0, (num_heads, num_ranks // num_heads)).sum(1)
    total = x_nTBhF.new_zeros(1, *x_nTBhF.shape[1:3], num_heads, x_nTBhF.shape[4])
    for first, x_TBhF in zip(firsts, x_nTBhF.unbind(0), strict=True):
        total[0, :, :, first : first + count] += x_TBhF
    return total


def by_head(x_gTBhD: torch.Tensor) -> torch.Tensor:
    """``[B, g * h, T, D]`` with the heads of a token adjacent in memory, as projections want them."""
    return x_gTBhD.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _readers(reads: tuple[int, ...]) -> list[int]:
    """Number of query heads that read each of the heads from ``reads[0]`` to ``reads[-1]``."""
    return [reads.count(head) for head in range(reads[0], reads[-1] + 1)]


def for_queries(x_BShF: torch.Tensor, reads: tuple[int, ...]) -> torch.Tensor:
    """The heads that the query heads read, equally many query heads each; otherwise repeated (a copy)."""
    readers = _readers(reads)
    x_BShF = x_BShF[:, :, reads[0] : reads[-1] + 1]
    if len(set(readers)) == 1:
        return x_BShF
    parts = [x.expand(-1, -1, n, -1) for x, n in zip(x_BShF.split(1, dim=2), readers, strict=True)]
    return torch.cat(parts, dim=2)


def from_queries(grad_BhSD: torch.Tensor, reads: tuple[int, ...], count: int, dtype: torch.dtype) -> torch.Tensor:
    """Reverse of `for_queries`: gradients of all `count` received heads, zero for heads that are not read."""
    readers = _readers(reads)
    grad_BhSD = grad_BhSD.to(dtype)
    if len(set(readers)) > 1:
        grad_BhSD = torch.cat([part.sum(1, keepdim=True) for part in grad_BhSD.split(readers, dim=1)], dim=1)
    if len(readers) == count:
        return grad_BhSD
    return torch.nn.functional.pad(grad_BhSD, (0, 0, 0, 0, reads[0], count - 1 - reads[-1]))

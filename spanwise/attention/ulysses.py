"""Ulysses: trade token shards for head shards, and back, by all-to-alls within a group of ranks.

Before attention each rank sends every other rank of the group that rank's heads of its tokens. Then each rank holds
some heads of all tokens of the group. After attention the output goes the other way. Source: Jacobs et al. 2023,
"DeepSpeed Ulysses" (arXiv 2309.14509). Here shards may be uneven or empty, and ranks may outnumber K/V heads
(`heads`).

A trade is a step of the executor whose rows are tokens with a rank's heads. Gradients take the reverse trade. The
transfers of q and of K/V both start before the first wait, forward and backward alike.
"""

# n ranks of the group; T tokens of this rank, S of the group; B batch; H heads of a token, h of them on a rank;
# D head dim; F features of a head on the wire: D, or K and V side by side
# On the wire a row is a token and holds [B, h, F]; W rows: n * T on the way to heads, S on the way back to tokens

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.chunks import on_device, size
from spanwise.attention.compare import Compared
from spanwise.attention.executor import Link, RankStep, Tensors, bring
from spanwise.planning.heads import check_heads, kv_heads_held, kv_heads_of, kv_heads_read


@dataclasses.dataclass(frozen=True)
class Trade:
    """How a group of ranks trades the tokens of its members for heads; a pytree of tensors.

    Attributes:
        heads, tokens: the steps there and back. Where batch rows have layouts of their own, a row that travels is a
            batch row's token.
        rank, num_ranks: in the group, plain numbers.
        rows: batch rows with layouts of their own, or 1.
    """

    heads: RankStep
    tokens: RankStep
    rank: int
    num_ranks: int
    rows: int

    @property
    def num_tokens(self) -> int:
        """S: tokens of the group."""
        assert self.heads.order is not None
        return self.heads.order.shape[0] // self.rows


_torch.register_pytree_dataclass(Trade, static=("rank", "num_ranks", "rows"))


def trade_of(tokens: Sequence[np.ndarray], rank: int, device: torch.device) -> Trade:
    """The trade of a group whose ranks have these tokens, ``[rows, T]`` each, ascending; `rank` is in the group."""
    order = np.argsort(np.concatenate(tokens, axis=1), axis=1, kind="stable")
    places = np.argsort(order, axis=1, kind="stable")
    rows, length = order.shape
    row = np.arange(rows)[:, None]
    order, places = (order * rows + row).reshape(-1), (places + length * row).T.reshape(-1)
    # Not unbacked for the rank itself: its number of tokens is a dim of q.
    sizes = tuple(
        _torch.mark_dynamic(torch.empty(x.size, 0, device=device), 0) if r == rank else size(x.size, device)
        for r, x in enumerate(tokens)
    )
    own = (sizes[rank],) * len(tokens)
    in_order, by_rank = (_torch.mark_dynamic(on_device(x, device), 0) for x in (order, places))
    heads, back = RankStep(None, in_order, own, sizes), RankStep(by_rank, None, sizes, own)
    return Trade(heads, back, rank, len(tokens), rows)


def to_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    trade: Trade,
    name: str,
    label: str,
    *,
    kv_trade: Trade | None = None,
    call: Compared | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's heads of all tokens of the group, in ascending order of the tokens.

    A collective call of the group. A rank receives ``B * (S - T) * (Hq / n * Dk + c * (Dk + Dv))`` elements, where c is
    the first result of `heads.kv_heads_of`. Where ranks share K/V heads, the gradients of K and V travel in float32 at
    least and are summed in it.

    Args:
        q: ``[B, Hq, T, Dk]``, ``Hq % n == 0``; k ``[B, Hkv, T, Dk]``, ``Hq % Hkv == 0``; v ``[B, Hkv, T, Dv]``.
        name: of the process group.
        kv_trade: of K and V, where their tokens differ from those of q.
        call: the attention call, if it is compared.

    Returns:
        q ``[B, Hq / n, S, Dk]``, k ``[B, c', S, Dk]``, v ``[B, c', S, Dv]``, strided views. c' divides Hq / n: the K/V
        heads that the query heads read, or one for each query head where no grouping of equal parts fits.
    """
    kv_trade = trade if kv_trade is None else kv_trade
    num_ranks, num_heads = trade.num_ranks, q.shape[1]
    count, firsts = kv_heads_of(num_heads, k.shape[1], num_ranks)
    own = num_heads // num_ranks
    reads = tuple(h - firsts[trade.rank] for h in kv_heads_read(num_heads, k.shape[1], num_ranks, trade.rank))
    batch, rows = q.shape[0], trade.rows
    of_q = _Heads(batch, rows, num_heads, own, tuple(range(0, num_heads, own)), tuple(range(own)), (q.shape[3],))
    of_kv = _Heads(batch, rows, k.shape[1], count, firsts, reads, (k.shape[3], v.shape[3]))
    arriving = [
        bring(tensors, [each.heads], Link(name, num_ranks, f"heads of {what}, {label}", call), form)
        for tensors, each, what, form in (((q,), trade, "q", of_q), ((k, v), kv_trade, "K/V", of_kv))
    ]
    (q,), (k, v) = (next(each) for each in arriving)
    return q, k, v


def traded_like(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trade: Trade, kv_trade: Trade | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors without memory, like q, k and v after the trade; ``ValueError`` if the heads do not divide for it."""
    check_heads(q.shape[1], k.shape[1], trade.num_ranks)
    heads = q.shape[1] // trade.num_ranks, kv_heads_held(q.shape[1], k.shape[1], trade.num_ranks, trade.rank)
    tokens = trade.num_tokens, (kv_trade or trade).num_tokens

    def like(x: torch.Tensor, side: int) -> torch.Tensor:
        made = x.detach().new_zeros(()).expand(x.shape[0], heads[side], tokens[side], x.shape[3])
        return made if torch.compiler.is_compiling() else made.requires_grad_(x.requires_grad)

    return like(q, 0), like(k, 1), like(v, 1)


def to_tokens(x: torch.Tensor, trade: Trade, name: str, label: str, *, call: Compared | None = None) -> torch.Tensor:
    """All heads of this rank's tokens, in their own order: the inverse of `to_heads` for q, or for an lse.

    A collective call of the group. A rank receives ``B * T * (Hq - Hq / n) * D`` elements of others' heads. `x` is
    ``[B, Hq / n, S, D]`` or ``[B, Hq / n, S]``, the result ``[B, Hq, T, D]`` or ``[B, Hq, T]``, a strided view.
    """
    x_BhSD = x if x.dim() == 4 else x.unsqueeze(-1)
    batch, count, _, dim = x_BhSD.shape
    heads = trade.num_ranks * count
    form = _Heads(batch, trade.rows, heads, count, tuple(range(0, heads, count)), tuple(range(count)), (dim,))
    ((x_BHTD,),) = bring((x_BhSD,), [trade.tokens], Link(name, trade.num_ranks, label, call), _Back(form))
    return x_BHTD if x.dim() == 4 else x_BHTD.squeeze(-1)


class _Heads(NamedTuple):
    """Tensors ``[B, H, T, D]`` on their way to the ranks that compute some heads; an `executor.Form`.

    Attributes:
        batch, rows: B, and batch rows with layouts of their own, 1 or B.
        heads: H; `width` and `firsts` are each rank's window of them.
        reads: the head of its window that each of the rank's query heads reads.
        dims: D of each tensor.
    """

    batch: int
    rows: int
    heads: int
    width: int
    firsts: tuple[int, ...]
    reads: tuple[int, ...]
    dims: tuple[int, ...]
    whole: bool = False

    @property
    def sums(self) -> bool:
        """Gradients of a head that several ranks have are summed."""
        return self.width * len(self.firsts) > self.heads

    @property
    def readers(self) -> list[int]:
        """Number of query heads that read each of the heads from ``reads[0]`` to ``reads[-1]``."""
        return [self.reads.count(head) for head in range(self.reads[0], self.reads[-1] + 1)]

    def leaving(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """For each rank its window of heads. One copy; two where windows overlap in part."""
        num_ranks, parts = len(self.firsts), []
        for x in tensors:
            if not self.sums:
                split = x.unflatten(1, (num_ranks, 1, self.width))
            elif num_ranks % self.heads == 0:
                split = x[:, :, None, None].expand(-1, -1, num_ranks // self.heads, -1, -1, -1)
            else:
                split = torch.cat([x[:, first : first + self.width] for first in self.firsts], dim=1)
                split = split.unflatten(1, (num_ranks, 1, self.width))
            parts.append(split.permute(1, 2, 4, 0, 3, 5))
        features = self.batch // self.rows * self.width * sum(self.dims)
        return torch.cat(parts, dim=-1).flatten(0, 2).flatten(1).view(-1, features)

    def came_home(self, rows: torch.Tensor) -> Tensors:
        """Each head summed over the ranks that had it; a token's heads adjacent in memory, as projections want them."""
        num_ranks = len(self.firsts)
        x_nTBhF = rows.view(num_ranks, -1, self.batch, self.width, sum(self.dims))
        if self.sums and num_ranks % self.heads == 0:
            x_nTBhF = x_nTBhF.unflatten(0, (self.heads, num_ranks // self.heads)).sum(1)
        elif self.sums:
            total = x_nTBhF.new_zeros(1, *x_nTBhF.shape[1:3], self.heads, x_nTBhF.shape[4])
            for first, x_TBhF in zip(self.firsts, x_nTBhF.unbind(0), strict=True):
                total[0, :, :, first : first + self.width] += x_TBhF
            x_nTBhF = total
        split = x_nTBhF.split(self.dims, dim=-1)
        return tuple([x.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2) for x in split])

    def arrived(self, rows: torch.Tensor) -> Tensors:
        """The heads that the query heads read, equally many query heads each; otherwise repeated (a copy)."""
        if self.rows == 1:
            x_BShF = rows.view(-1, self.batch, self.width, sum(self.dims)).transpose(0, 1)
        else:
            x_BShF = rows.view(self.batch, -1, self.width, sum(self.dims))
        x_BShF, readers = x_BShF[:, :, self.reads[0] : self.reads[-1] + 1], self.readers
        if len(set(readers)) > 1:
            parts = [x.expand(-1, -1, n, -1) for x, n in zip(x_BShF.split(1, dim=2), readers, strict=True)]
            x_BShF = torch.cat(parts, dim=2)
        return tuple([x.transpose(1, 2) for x in x_BShF.split(self.dims, dim=-1)])

    def going_home(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of all received heads, zero for heads that are not read."""
        dtype, readers = gradients[0].dtype, self.readers
        if self.sums:
            dtype = torch.promote_types(dtype, torch.float32)
        grad_BhSF = torch.cat([x.to(dtype) for x in gradients], dim=-1) if gradients[1:] else gradients[0].to(dtype)
        if len(set(readers)) > 1:
            grad_BhSF = torch.cat([x.sum(1, keepdim=True) for x in grad_BhSF.split(readers, dim=1)], dim=1)
        if len(readers) < self.width:
            after = self.width - 1 - self.reads[-1]
            grad_BhSF = torch.nn.functional.pad(grad_BhSF, (0, 0, 0, 0, self.reads[0], after))
        if self.rows == 1:
            return grad_BhSF.permute(2, 0, 1, 3).flatten(1)
        return grad_BhSF.transpose(1, 2).flatten(0, 1).flatten(1)


class _Back(NamedTuple):
    """The way back of tensors, each rank's own heads of all tokens, to the ranks whose tokens they are."""

    there: _Heads
    sums: bool = False
    whole: bool = False

    def leaving(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.there.going_home(tensors)

    def came_home(self, rows: torch.Tensor) -> Tensors:
        return self.there.arrived(rows)

    def arrived(self, rows: torch.Tensor) -> Tensors:
        return self.there.came_home(rows)

    def going_home(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.there.leaving(gradients)

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
from spanwise.attention.executor import Link, RankStep, bring
from spanwise.attention.head_rows import by_head, for_queries, from_queries, join_heads, split_heads
from spanwise.attention.rows import Tensors
from spanwise.layouts.layout import Layout
from spanwise.layouts.runs import positions_in
from spanwise.planning.heads import kv_heads_of, kv_heads_read


@dataclasses.dataclass(frozen=True)
class Trade:
    """Tokens of each rank of a group, and the order in which the group reads them; a pytree of tensors.

    Attributes:
        sizes: for each rank of the group a tensor ``[tokens, 0]``; carries a size in its shape.
        order: int64 ``[B or 1, S]``, for each of the group's tokens in ascending order its place among the received
            rows, those of rank 0 first.
        places: int64 ``[B or 1, S]``, the inverse permutation.
        rank, num_ranks: in the group, plain numbers.
    """

    sizes: tuple[torch.Tensor, ...]
    order: torch.Tensor
    places: torch.Tensor
    rank: int
    num_ranks: int


_torch.register_pytree_dataclass(Trade, static=("rank", "num_ranks"))


def trade_of(layout: Layout, groups: Layout, inner: int, rank: int, device: torch.device) -> Trade:
    """How the group of `rank` trades the tokens of `layout` for heads; `groups` are the tokens of all groups."""
    group = rank // inner
    members = range(group * inner, (group + 1) * inner)
    places = np.stack(
        [
            np.concatenate([positions_in(layout.indices(r, row), groups.runs(group, row)) for r in members])
            for row in range(layout.batch_size)
        ]
    )
    return Trade(
        # Not unbacked for the rank itself: its number of tokens is a dim of q.
        sizes=tuple(
            _torch.mark_dynamic(torch.empty(layout.num_tokens(r), 0, device=device), 0)
            if r == rank
            else size(layout.num_tokens(r), device)
            for r in members
        ),
        order=_torch.mark_dynamic(on_device(np.argsort(places, axis=1, kind="stable"), device), 1),
        places=_torch.mark_dynamic(on_device(places, device), 1),
        rank=rank - members[0],
        num_ranks=inner,
    )


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
    batch, rows = q.shape[0], trade.order.shape[0]
    of_q = _Heads(batch, rows, num_heads, own, tuple(range(0, num_heads, own)), tuple(range(own)), (q.shape[3],))
    of_kv = _Heads(batch, rows, k.shape[1], count, firsts, reads, (k.shape[3], v.shape[3]))
    arriving = [
        bring(tensors, [_step(each, heads=True)], Link(name, num_ranks, f"heads of {what}, {label}", call), form)
        for tensors, each, what, form in (((q,), trade, "q", of_q), ((k, v), kv_trade, "K/V", of_kv))
    ]
    (q,), (k, v) = (next(each) for each in arriving)
    return q, k, v


def to_tokens(x: torch.Tensor, trade: Trade, name: str, label: str, *, call: Compared | None = None) -> torch.Tensor:
    """All heads of this rank's tokens, in their own order: the inverse of `to_heads` for q, or for an lse.

    A collective call of the group. A rank receives ``B * T * (Hq - Hq / n) * D`` elements of others' heads. `x` is
    ``[B, Hq / n, S, D]`` or ``[B, Hq / n, S]``, the result ``[B, Hq, T, D]`` or ``[B, Hq, T]``, a strided view.
    """
    x_BhSD = x if x.dim() == 4 else x.unsqueeze(-1)
    batch, count, _, dim = x_BhSD.shape
    form = _Tokens(batch, trade.order.shape[0], count, trade.num_ranks, dim)
    ((x_BHTD,),) = bring((x_BhSD,), [_step(trade, heads=False)], Link(name, trade.num_ranks, label, call), form)
    return x_BHTD if x.dim() == 4 else x_BHTD.squeeze(-1)


def _step(trade: Trade, *, heads: bool) -> RankStep:
    """The all-to-all of heads, or the one back to tokens. Where layouts differ, a row is a batch row's token."""
    rows, length = trade.order.shape
    of_ranks = trade.sizes if rows == 1 else tuple([x.repeat(rows, 1) for x in trade.sizes])
    own = (of_ranks[trade.rank],) * trade.num_ranks
    row = torch.arange(rows, device=trade.order.device).unsqueeze(1)
    if heads:
        order = trade.order[0] if rows == 1 else (trade.order * rows + row).flatten()
        return RankStep(None, order, own, of_ranks)
    send = trade.places[0] if rows == 1 else (trade.places + length * row).t().flatten()
    return RankStep(send, None, of_ranks, own)


class _Heads(NamedTuple):
    """Tensors ``[B, H, T, D]`` on their way to the ranks that compute some heads; `rows.Form`.

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

    @property
    def sums(self) -> bool:
        """Gradients of a head that several ranks have are summed."""
        return self.width * len(self.firsts) > self.heads

    def leaving(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return split_heads(tuple(tensors), self.width, self.firsts).view(-1, self._features)

    def came_home(self, rows: torch.Tensor) -> Tensors:
        shape = (len(self.firsts), -1, self.batch, self.width, sum(self.dims))
        joined = join_heads(rows.view(shape), self.heads, self.firsts)
        return tuple([by_head(x) for x in joined.split(self.dims, dim=-1)])

    def arrived(self, rows: torch.Tensor) -> Tensors:
        x_BShF = _of_rows(rows, self.batch, self.rows, self.width, sum(self.dims))
        return tuple([x.transpose(1, 2) for x in for_queries(x_BShF, self.reads).split(self.dims, dim=-1)])

    def going_home(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = gradients[0].dtype
        if self.sums:
            dtype = torch.promote_types(dtype, torch.float32)
        folded = [from_queries(grad, self.reads, self.width, dtype) for grad in gradients]
        return _to_rows(folded[0] if len(folded) == 1 else torch.cat(folded, dim=-1), self.rows)

    @property
    def _features(self) -> int:
        return self.batch // self.rows * self.width * sum(self.dims)


class _Tokens(NamedTuple):
    """A tensor ``[B, h, S, D]`` on its way to the ranks whose tokens it holds; `rows.Form`.

    Attributes:
        batch, rows: as in `_Heads`.
        width: h, the same on all of `num_ranks` ranks.
        dim: D.
    """

    batch: int
    rows: int
    width: int
    num_ranks: int
    dim: int
    sums: bool = False

    def leaving(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return _to_rows(tensors[0], self.rows)

    def came_home(self, rows: torch.Tensor) -> Tensors:
        return (_of_rows(rows, self.batch, self.rows, self.width, self.dim).transpose(1, 2),)

    def arrived(self, rows: torch.Tensor) -> Tensors:
        return (by_head(rows.view(self.num_ranks, -1, self.batch, self.width, self.dim)),)

    def going_home(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        heads = self.num_ranks * self.width
        sent = split_heads(tuple(gradients), self.width, tuple(range(0, heads, self.width)))
        return sent.view(-1, self.batch // self.rows * self.width * self.dim)


def _to_rows(x_BhSD: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows by token, or by batch row and token."""
    return x_BhSD.permute(2, 0, 1, 3).flatten(1) if rows == 1 else x_BhSD.transpose(1, 2).flatten(0, 1).flatten(1)


def _of_rows(rows: torch.Tensor, batch: int, num_rows: int, count: int, dim: int) -> torch.Tensor:
    """``[B, S, h, D]`` from rows as `_to_rows` makes them."""
    if num_rows == 1:
        return rows.view(-1, batch, count, dim).transpose(0, 1)
    return rows.view(batch, -1, count, dim)

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
from spanwise.planning.heads import kv_heads_held


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
    `heads.kv_heads_held`. Where ranks share K/V heads, gradients of K and V travel in float32 at least and are summed
    in it.

    Args:
        q: ``[B, Hq, T, Dk]``, ``Hq % n == 0``; k ``[B, Hkv, T, Dk]``, ``Hq % Hkv == 0``; v ``[B, Hkv, T, Dv]``.
        name: of the process group.
        kv_trade: of K and V, where their tokens differ from those of q.
        call: the attention call, if it is compared.

    Returns:
        q ``[B, Hq / n, S, Dk]``, k ``[B, c, S, Dk]``, v ``[B, c, S, Dv]``, strided views; c divides Hq / n.
    """
    kv_trade = trade if kv_trade is None else kv_trade
    num_ranks, num_heads, held = trade.num_ranks, q.shape[1], kv_heads_held(q.shape[1], k.shape[1], trade.num_ranks)
    repeats = held * num_ranks // k.shape[1]
    of_q = _Heads(num_ranks, q.shape[0], trade.rows, num_heads // num_ranks, 1, (q.shape[3],))
    of_kv = _Heads(num_ranks, q.shape[0], trade.rows, held, repeats, (k.shape[3], v.shape[3]))
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
    heads = q.shape[1] // trade.num_ranks, kv_heads_held(q.shape[1], k.shape[1], trade.num_ranks)
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
    form = _Heads(trade.num_ranks, batch, trade.rows, count, 1, (dim,))
    ((x_BHTD,),) = bring((x_BhSD,), [trade.tokens], Link(name, trade.num_ranks, label, call), _Back(form))
    return x_BHTD if x.dim() == 4 else x_BHTD.squeeze(-1)


class _Heads(NamedTuple):
    """Tensors ``[B, H, T, D]`` on their way to the ranks that compute some heads; an `executor.Form`.

    Attributes:
        num_ranks: n.
        batch, rows: B, and batch rows with layouts of their own, 1 or B.
        width: heads that each rank gets.
        repeats: how often each head is repeated, so that the heads divide over the ranks.
        dims: D of each tensor.
    """

    num_ranks: int
    batch: int
    rows: int
    width: int
    repeats: int
    dims: tuple[int, ...]
    whole: bool = False

    @property
    def sums(self) -> bool:
        """Gradients of a head that several ranks have are summed."""
        return self.repeats > 1

    def leaving(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """For each rank its heads."""
        repeated = [x.repeat_interleave(self.repeats, 1) if self.sums else x for x in tensors]
        parts = [x.unflatten(1, (-1, self.width)).permute(1, 3, 0, 2, 4) for x in repeated]
        return torch.cat(parts, dim=-1).flatten(0, 1).view(-1, self.batch // self.rows * self.width * sum(self.dims))

    def came_home(self, rows: torch.Tensor) -> Tensors:
        """Each head summed over the ranks that had it; a token's heads adjacent in memory, as projections want them."""
        x_nTBhF = rows.view(self.num_ranks, -1, self.batch, self.width, sum(self.dims))
        x_BTHF = x_nTBhF.permute(2, 1, 0, 3, 4).flatten(2, 3)
        if self.sums:
            x_BTHF = x_BTHF.unflatten(2, (-1, self.repeats)).sum(3)
        return tuple([x.transpose(1, 2) for x in x_BTHF.split(self.dims, dim=-1)])

    def arrived(self, rows: torch.Tensor) -> Tensors:
        """The rank's heads of all tokens of the group."""
        if self.rows == 1:
            x_BShF = rows.view(-1, self.batch, self.width, sum(self.dims)).transpose(0, 1)
        else:
            x_BShF = rows.view(self.batch, -1, self.width, sum(self.dims))
        return tuple([x.transpose(1, 2) for x in x_BShF.split(self.dims, dim=-1)])

    def going_home(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of all received heads."""
        dtype = gradients[0].dtype
        if self.sums:
            dtype = torch.promote_types(dtype, torch.float32)
        grad_BhSF = torch.cat([x.to(dtype) for x in gradients], dim=-1) if gradients[1:] else gradients[0].to(dtype)
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

"""Ulysses: trade token shards for head shards, and back, by all-to-alls within a group of ranks.

Before attention each rank sends every other rank of the group that rank's heads of its tokens. Then each rank holds
some heads of all tokens of the group. After attention the output goes the other way. Source: Jacobs et al. 2023,
"DeepSpeed Ulysses" (arXiv 2309.14509). Here shards may be uneven or empty, and ranks may outnumber K/V heads.

A trade is a step of the executor whose rows are tokens with a rank's heads. Gradients take the reverse trade. The
transfers of q and of K/V both start before the first wait, forward and backward alike.
"""

# n ranks of the group; T tokens of this rank, S of the group; B batch; H heads of a token, h of them on a rank;
# D head dim; F features of a head on the wire: D, or K and V side by side

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.chunks import on_device, size
from spanwise.attention.compare import Compared
from spanwise.attention.executor import Link, RankStep, bring
from spanwise.planning.memory import kv_heads_held


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
    compare: Compared | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's heads of all tokens of the group, in ascending order of the tokens.

    A collective call of the group. A rank receives ``B * (S - T) * (Hq / n * Dk + c * (Dk + Dv))`` elements, where c is
    `planning.memory.kv_heads_held`. Where ranks share K/V heads, gradients of K and V travel in float32 at least and
    are summed in it.

    Args:
        q: ``[B, Hq, T, Dk]``, ``Hq % n == 0``; k ``[B, Hkv, T, Dk]``, ``Hq % Hkv == 0``; v ``[B, Hkv, T, Dv]``.
        name: of the process group.
        kv_trade: of K and V, where their tokens differ from those of q.
        compare: compares what a backward starts, called with its name; None in compiled code and without comparison.

    Returns:
        q ``[B, Hq / n, S, Dk]``, k ``[B, c, S, Dk]``, v ``[B, c, S, Dv]``, strided views; c divides Hq / n.
    """
    kv_trade = trade if kv_trade is None else kv_trade
    num_ranks, batch, kv_heads, dims = trade.num_ranks, q.shape[0], k.shape[1], (k.shape[3], v.shape[3])
    held = kv_heads_held(q.shape[1], kv_heads, num_ranks)
    shared = held * num_ranks > kv_heads
    step = _head_by_head(kv_trade.heads, kv_heads, held, num_ranks) if shared else kv_trade.heads
    of_q, of_kv = (Link(name, num_ranks, f"heads of {what}, {label}", compare) for what in ("q", "K/V"))
    # Without names for the rows: a name would keep those that leave alive while others arrive.
    arriving_q = bring(_by_rank([q], trade, num_ranks), [trade.heads], of_q, sums=False)
    arriving_kv = bring(_by_rank([k, v], kv_trade, kv_heads if shared else num_ranks), [step], of_kv, sums=shared)
    own = q.shape[1] // num_ranks
    (q,) = _from_tokens(next(arriving_q), trade, batch, own, [q.shape[3]])
    k, v = _from_tokens(next(arriving_kv), kv_trade, batch, held, dims)
    return q, k, v


def to_tokens(x: torch.Tensor, trade: Trade, name: str, label: str, *, compare: Compared | None = None) -> torch.Tensor:
    """All heads of this rank's tokens, in their own order: the inverse of `to_heads` for q, or for an lse.

    A collective call of the group. A rank receives ``B * T * (Hq - Hq / n) * D`` elements of others' heads. `x` is
    ``[B, Hq / n, S, D]`` or ``[B, Hq / n, S]``, the result ``[B, Hq, T, D]`` or ``[B, Hq, T]``, a strided view.
    """
    x_BhSD = x if x.dim() == 4 else x.unsqueeze(-1)
    link = Link(name, trade.num_ranks, label, compare)
    (rows,) = bring(_by_token(x_BhSD, trade), [trade.tokens], link, sums=False)
    x_BHTD = _from_ranks(rows, trade, x.shape[0], x_BhSD.shape[3])
    return x_BHTD if x.dim() == 4 else x_BHTD.squeeze(-1)


# Rows hold [h, B, F] features where one layout serves the batch, and [h, F] of a batch row's token where each row has
# its own. With K/V heads that several ranks get, a row is one head of a token.


def _by_rank(tensors: Sequence[torch.Tensor], trade: Trade, num_parts: int) -> torch.Tensor:
    """``[B, H, T, D]`` each, side by side, as rows of `num_parts` parts of the heads, one part after the other."""
    order = (1, 3, 2, 0, 4) if trade.rows == 1 else (1, 3, 0, 2, 4)
    parts = [x.unflatten(1, (num_parts, -1)).permute(order) for x in tensors]
    return torch.cat(parts, dim=-1).flatten(0, 1 if trade.rows == 1 else 2).flatten(1)


def _from_ranks(rows: torch.Tensor, trade: Trade, batch: int, dim: int) -> torch.Tensor:
    """The inverse for one tensor; a token's heads are adjacent in memory, as projections want them."""
    num_ranks = trade.num_ranks
    if trade.rows == 1:
        x_BTnhD = rows.view(num_ranks, -1, rows.shape[1] // (batch * dim), batch, dim).permute(3, 1, 0, 2, 4)
    else:
        x_BTnhD = rows.view(num_ranks, -1, batch, rows.shape[1] // dim, dim).permute(2, 1, 0, 3, 4)
    return x_BTnhD.flatten(2, 3).transpose(1, 2)


def _from_tokens(rows: torch.Tensor, trade: Trade, batch: int, width: int, dims: Sequence[int]) -> list[torch.Tensor]:
    """Rows of the group's tokens as tensors ``[B, width, S, D]``, strided views."""
    if trade.rows == 1:
        x_BhSF = rows.view(-1, width, batch, sum(dims)).permute(2, 1, 0, 3)
    else:
        x_BhSF = rows.view(batch, -1, width, sum(dims)).transpose(1, 2)
    return list(x_BhSF.split(list(dims), dim=-1))


def _by_token(x: torch.Tensor, trade: Trade) -> torch.Tensor:
    """The inverse for one tensor."""
    return x.permute(2, 1, 0, 3).flatten(1) if trade.rows == 1 else x.transpose(1, 2).flatten(0, 1).flatten(1)


def _head_by_head(step: RankStep, num_heads: int, width: int, num_ranks: int) -> RankStep:
    """The step for rows that are single heads of a token, the heads repeated until each rank has `width` of them."""
    tokens, device = step.send_sizes[0].shape[0], step.send_sizes[0].device
    head = torch.arange(num_ranks * width, device=device) * num_heads // (num_ranks * width)
    send = torch.arange(tokens, device=device).unsqueeze(1) + tokens * head.view(num_ranks, 1, width)
    assert step.order is not None
    order = step.order.unsqueeze(1) * width + torch.arange(width, device=device)
    sizes = [tuple([x.new_empty(x.shape[0] * width, 0) for x in each]) for each in (step.send_sizes, step.recv_sizes)]
    return RankStep(send.flatten(), order.flatten(), sizes[0], sizes[1])

"""Ulysses: trade token shards for head shards, and back, by all-to-alls within a group of ranks.

Before attention each rank sends every other rank of the group that rank's heads of its tokens. Then each rank holds
some heads of all tokens of the group. After attention the output goes the other way. Source: Jacobs et al. 2023,
"DeepSpeed Ulysses" (arXiv 2309.14509). Here shards may be uneven or empty, and ranks may outnumber K/V heads
(`heads`).

Gradients take the reverse trade. As in the other exchanges a trade is two autograd functions, start and wait. So the
transfers of q and of K/V both start before the first wait, forward and backward alike.
"""

# n ranks of the group; T tokens of this rank, S of the group; B batch; H heads of a token, h of them on a rank;
# D head dim; F features of a head on the wire: D, or K and V side by side
# On the wire a row is a token and holds [B, h, F]; W rows: n * T on the way to heads, S on the way back to tokens

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.chunks import on_device, size
from spanwise.attention.exchange import failure
from spanwise.attention.executor import check_first_order, returned
from spanwise.attention.head_rows import (
    by_head,
    for_queries,
    from_queries,
    in_rank_order,
    in_token_order,
    join_heads,
    split_heads,
)
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

    @property
    def tokens(self) -> list[int]:
        """Tokens of rank 0, 1, …"""
        return [x.shape[0] for x in self.sizes]


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's heads of all tokens of the group, in ascending order of the tokens.

    A collective call of the group. A rank receives ``B * (S - T) * (Hq / n * Dk + c * (Dk + Dv))`` elements, where c is
    the first result of `heads.kv_heads_of`. Where ranks share K/V heads, the gradients of K and V travel in float32 at
    least and are summed in it.

    Args:
        q: ``[B, Hq, T, Dk]``, ``Hq % n == 0``; k ``[B, Hkv, T, Dk]``, ``Hq % Hkv == 0``; v ``[B, Hkv, T, Dv]``.
        name: of the process group.
        kv_trade: of K and V, where their tokens differ from those of q.

    Returns:
        q ``[B, Hq / n, S, Dk]``, k ``[B, c', S, Dk]``, v ``[B, c', S, Dv]``, strided views. c' divides Hq / n: the K/V
        heads that the query heads read, or one for each query head where no grouping of equal parts fits.
    """
    kv_trade = trade if kv_trade is None else kv_trade
    num_ranks, num_heads = trade.num_ranks, q.shape[1]
    count, firsts = kv_heads_of(num_heads, k.shape[1], num_ranks)
    own = num_heads // num_ranks
    reads = tuple(h - firsts[trade.rank] for h in kv_heads_read(num_heads, k.shape[1], num_ranks, trade.rank))
    tokens, kv_tokens = trade.tokens, kv_trade.tokens
    q_label, kv_label = f"heads of q, {label}", f"heads of K/V, {label}"
    started_q = _StartHeads.apply(tokens, own, tuple(range(0, num_heads, own)), name, q_label, q)
    started_kv = _StartHeads.apply(kv_tokens, count, firsts, name, kv_label, k, v)
    tables_q, tables_kv = (trade.order, trade.places), (kv_trade.order, kv_trade.places)
    batch, k_dim, v_dim = q.shape[0], k.shape[3], v.shape[3]
    (q,) = _WaitHeads.apply(
        *started_q, *tables_q, trade.rank, batch, tuple(range(own)), (q.shape[3],), name, q_label, *trade.sizes
    )
    k, v = _WaitHeads.apply(
        *started_kv, *tables_kv, trade.rank, batch, reads, (k_dim, v_dim), name, kv_label, *kv_trade.sizes
    )
    return q, k, v


def to_tokens(x: torch.Tensor, trade: Trade, name: str, label: str) -> torch.Tensor:
    """All heads of this rank's tokens, in their own order: the inverse of `to_heads` for q, or for an lse.

    A collective call of the group. A rank receives ``B * T * (Hq - Hq / n) * D`` elements of others' heads. `x` is
    ``[B, Hq / n, S, D]`` or ``[B, Hq / n, S]``, the result ``[B, Hq, T, D]`` or ``[B, Hq, T]``, a strided view.
    """
    x_BhSD = x if x.dim() == 4 else x.unsqueeze(-1)
    started = _StartTokens.apply(x_BhSD, trade.order, trade.places, trade.tokens, trade.rank, name, label)
    batch, dim = x_BhSD.shape[0], x_BhSD.shape[3]
    x_BHTD = _WaitTokens.apply(*started, trade.rank, batch, dim, name, label, *trade.sizes)
    return x_BHTD if x.dim() == 4 else x_BHTD.squeeze(-1)


class _StartHeads(torch.autograd.Function):
    """Sends each rank its heads of own tokens; its backward waits for their gradients and sums those of shared heads.

    Arguments: tokens of each rank, count, firsts, name, label, and the tensors.
    """

    # Arguments are not named, here and below: with as many arguments as names, torch.compile without gradients passes
    # no ctx.
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, count, firsts, name, label, *xs = args
        ctx.count, ctx.firsts, ctx.name, ctx.label = count, firsts, name, label
        ctx.batch, ctx.num_heads, ctx.num_tokens = xs[0].shape[:3]
        ctx.dims, ctx.dtype = [x.shape[3] for x in xs], xs[0].dtype
        sent_WF = split_heads(tuple(xs), count, firsts)
        data = _trade(f"all-to-all of {label}", name, sent_WF, tokens, [ctx.num_tokens] * len(tokens))
        ctx.mark_non_differentiable(data)
        shared = count * len(firsts) > ctx.num_heads
        dtype = torch.promote_types(ctx.dtype, torch.float32) if shared else ctx.dtype
        return data, _anchor(sent_WF, [ctx.num_tokens] * len(tokens), dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, grad_pending: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_WF = failure.wait(grad_pending, f"all-to-all of gradients, {ctx.label}", ctx.name)
        shape = (len(ctx.firsts), ctx.num_tokens, ctx.batch, ctx.count, sum(ctx.dims))
        grad = join_heads(grad_WF.view(shape), ctx.num_heads, ctx.firsts)
        grads = [by_head(part).to(ctx.dtype) for part in grad.split(ctx.dims, dim=-1)]
        return None, None, None, None, None, *grads


class _WaitHeads(torch.autograd.Function):
    """Arguments: data_WF and its anchor, order, places, rank, batch, reads, dims, name, label, and the sizes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        data_WF, anchor_WF, order, places, rank, batch, reads, dims, name, label, *sizes = args
        ctx.save_for_backward(places, *sizes)  # as tensors: torch.compile loses numbers that only a backward uses
        ctx.rank, ctx.reads, ctx.name, ctx.label = rank, reads, name, label
        ctx.count, ctx.sum_dtype = data_WF.shape[1] // (batch * sum(dims)), anchor_WF.dtype
        arrived_WF = failure.wait(data_WF, f"all-to-all of {label}", name)
        x_BShF = in_token_order(arrived_WF, order, batch).unflatten(2, (ctx.count, sum(dims)))
        return tuple(x.transpose(1, 2) for x in for_queries(x_BShF, reads).split(dims, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        check_first_order()
        places, *sizes = ctx.saved_tensors
        tokens = [x.shape[0] for x in sizes]
        folded = [from_queries(grad, ctx.reads, ctx.count, ctx.sum_dtype) for grad in grads]
        sent_WF = in_rank_order(folded, places)
        back = [tokens[ctx.rank]] * len(tokens)
        pending = _trade(f"all-to-all of gradients, {ctx.label}", ctx.name, sent_WF, back, tokens)
        return None, returned(pending), *[None] * (8 + len(sizes))


class _StartTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BhSD: torch.Tensor,
        order: torch.Tensor,
        places: torch.Tensor,
        tokens: list[int],
        rank: int,
        name: str,
        label: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(order)
        ctx.batch, ctx.name, ctx.label, ctx.row = x_BhSD.shape[0], name, label, (x_BhSD.shape[1], x_BhSD.shape[3])
        sent_WF = in_rank_order([x_BhSD], places)
        data = _trade(f"all-to-all of {label}", name, sent_WF, [tokens[rank]] * len(tokens), tokens)
        ctx.mark_non_differentiable(data)
        return data, _anchor(sent_WF, tokens, x_BhSD.dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, grad_pending: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        grad_WF = failure.wait(grad_pending, f"all-to-all of gradients, {ctx.label}", ctx.name)
        grad_BShD = in_token_order(grad_WF, order, ctx.batch).unflatten(2, ctx.row)
        return grad_BShD.transpose(1, 2), *[None] * 6


class _WaitTokens(torch.autograd.Function):
    """Arguments: data_WF and its anchor, rank, batch, dim, name, label, and the sizes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        data_WF, _, rank, batch, dim, name, label, *sizes = args
        ctx.save_for_backward(*sizes)
        ctx.name, ctx.label = name, label
        arrived_WF = failure.wait(data_WF, f"all-to-all of {label}", name)
        ctx.count = arrived_WF.shape[1] // (batch * dim)
        return by_head(arrived_WF.view(len(sizes), sizes[rank].shape[0], batch, ctx.count, dim))

    @staticmethod
    def backward(ctx: Any, grad_BHTD: torch.Tensor) -> tuple[Any, ...]:
        check_first_order()
        tokens = [x.shape[0] for x in ctx.saved_tensors]
        firsts = tuple(range(0, grad_BHTD.shape[1], ctx.count))
        sent_WF = split_heads((grad_BHTD,), ctx.count, firsts)
        sizes = [grad_BHTD.shape[2]] * len(tokens)
        pending = _trade(f"all-to-all of gradients, {ctx.label}", ctx.name, sent_WF, tokens, sizes)
        return None, returned(pending), *[None] * (5 + len(tokens))


def _trade(what: str, name: str, sent_WF: torch.Tensor, recv: list[int], send: list[int]) -> torch.Tensor:
    return failure.start(what, name, _torch.start_all_to_all, sent_WF, recv, send, name)


def _anchor(sent_WF: torch.Tensor, back: list[int], dtype: torch.dtype) -> torch.Tensor:
    """As `_gradients.anchor`: its gradient is the trade of gradients under way, in the dtype in which they travel.

    The number of rows is the same expression as in that collective; compiled code cannot prove others equal.
    """
    return torch.zeros((), dtype=dtype, device=sent_WF.device).expand(sum(back), sent_WF.shape[1])

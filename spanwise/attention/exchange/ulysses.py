"""Token shards traded for head shards, and back, by all-to-alls within a group of ranks (DeepSpeed-Ulysses).

Before attention each rank of the group sends every other one that rank's heads of its own tokens, so that all hold
some heads of the group's tokens; after it the output goes the other way. The source is Jacobs et al. 2023, "DeepSpeed
Ulysses" (arXiv 2309.14509); shards may be uneven or empty, and K/V heads fewer than ranks (`spanwise.planning.heads`).

A gradient takes the reverse trade. As in the other exchanges a trade is two autograd functions, start and wait, so that
both transfers are under way before one of them is waited for, forward and backward alike.
"""

# n ranks of the group; T tokens of this rank, S of the group; B batch; H heads of a token, h of them on a rank;
# D head dim; F features of a head on the wire: D, or K and V side by side
# On the wire rows are tokens and hold [B, h, F]: W rows, n * T of them for heads, S of them for tokens

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from spanwise import _torch
from spanwise.attention.exchange import failure
from spanwise.attention.exchange._gradients import check_first_order, returned
from spanwise.planning.heads import kv_heads_of, kv_heads_read


@dataclasses.dataclass(frozen=True)
class Trade:
    """Whose tokens a group holds and in which order it reads them; a pytree of tensors.

    Attributes:
        sizes: for each rank of the group a tensor ``[tokens, 0]``; only its shape means something.
        order: int64 ``[B or 1, S]``, for each of the group's tokens in ascending order, which of the received rows,
            those of rank 0 first, it is.
        places: int64 ``[B or 1, S]``, the inverse permutation.
        rank, num_ranks: of the group, plain numbers.
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

    A collective call of the group. Elements received of others' tokens, with c as `heads.kv_heads_of` has
    it: ``B * (S - T) * (Hq / n * Dk + c * (Dk + Dv))``. Where ranks share K/V heads, the gradients of K and V travel in
    float32 at least and are summed in it.

    Args:
        q: ``[B, Hq, T, Dk]``, ``Hq % n == 0``.
        k: ``[B, Hkv, T, Dk]``, ``Hq % Hkv == 0``.
        v: ``[B, Hkv, T, Dv]``.
        name: of the group.
        label: what is exchanged, in words, for errors.
        kv_trade: of K and V, where their tokens are not those of q.

    Returns:
        q ``[B, Hq / n, S, Dk]``, k ``[B, c', S, Dk]``, v ``[B, c', S, Dv]``, strided views. c' divides Hq / n: the K/V
        heads that the query heads read, or one for each query head where no grouping of equal parts fits.

    Raises:
        ValueError: heads that do not go with the number of ranks, before anything is sent.
        spanwise.ExchangeError: a rank is gone or too late, here or in the backward.
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
    """All heads of this rank's tokens: what `to_heads` did to q, undone.

    A collective call of the group. A rank receives ``B * T * (Hq - Hq / n) * D`` elements of others' heads.

    Args:
        x: ``[B, Hq / n, S, D]`` or ``[B, Hq / n, S]``, tokens of the group in ascending order.
        name: of the group.
        label: what is exchanged, in words, for errors.

    Returns:
        ``[B, Hq, T, D]`` or ``[B, Hq, T]``, in the rank's own order of its tokens; a strided view.
    """
    x_BhSD = x if x.dim() == 4 else x.unsqueeze(-1)
    started = _StartTokens.apply(x_BhSD, trade.order, trade.places, trade.tokens, trade.rank, name, label)
    batch, dim = x_BhSD.shape[0], x_BhSD.shape[3]
    x_BHTD = _WaitTokens.apply(*started, trade.rank, batch, dim, name, label, *trade.sizes)
    return x_BHTD if x.dim() == 4 else x_BHTD.squeeze(-1)


class _StartHeads(torch.autograd.Function):
    """Deals heads of own tokens out; its backward waits for their gradients and sums those of shared heads.

    Its arguments: tokens of each rank, count, firsts, name, label, and the tensors.
    """

    # Here and below: named, two of what may be any number would make as many arguments as names, and torch.compile
    # without gradients would pass no ctx.
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, count, firsts, name, label, *xs = args
        ctx.count, ctx.firsts, ctx.name, ctx.label = count, firsts, name, label
        ctx.batch, ctx.num_heads, ctx.num_tokens = xs[0].shape[:3]
        ctx.dims, ctx.dtype = [x.shape[3] for x in xs], xs[0].dtype
        sent_WF = _deal(tuple(xs), count, firsts)
        data = _trade(f"all-to-all of {label}", name, sent_WF, tokens, [ctx.num_tokens] * len(tokens))
        ctx.mark_non_differentiable(data)
        shared = count * len(firsts) > ctx.num_heads
        dtype = torch.promote_types(ctx.dtype, torch.float32) if shared else ctx.dtype
        return data, _anchor(sent_WF, [ctx.num_tokens] * len(tokens), dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, grad_pending: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_WF = failure.wait(grad_pending, f"all-to-all of gradients, {ctx.label}", ctx.name)
        shape = (len(ctx.firsts), ctx.num_tokens, ctx.batch, ctx.count, sum(ctx.dims))
        grad = _collect(grad_WF.view(shape), ctx.num_heads, ctx.firsts)
        grads = [_by_head(part).to(ctx.dtype) for part in grad.split(ctx.dims, dim=-1)]
        return None, None, None, None, None, *grads


class _WaitHeads(torch.autograd.Function):
    """Its arguments: data_WF and its anchor, order, places, rank, batch, reads, dims, name, label, and the sizes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        data_WF, anchor_WF, order, places, rank, batch, reads, dims, name, label, *sizes = args
        ctx.save_for_backward(places, *sizes)  # not plain numbers: torch.compile loses those that only a backward uses
        ctx.rank, ctx.reads, ctx.name, ctx.label = rank, reads, name, label
        ctx.count, ctx.sum_dtype = data_WF.shape[1] // (batch * sum(dims)), anchor_WF.dtype
        arrived_WF = failure.wait(data_WF, f"all-to-all of {label}", name)
        x_BShF = _ordered(arrived_WF, order, batch).unflatten(2, (ctx.count, sum(dims)))
        return tuple(x.transpose(1, 2) for x in _for_queries(x_BShF, reads).split(dims, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        check_first_order()
        places, *sizes = ctx.saved_tensors
        tokens = [x.shape[0] for x in sizes]
        folded = [_from_queries(grad, ctx.reads, ctx.count, ctx.sum_dtype) for grad in grads]
        sent_WF = _in_rank_order(folded, places)
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
        sent_WF = _in_rank_order([x_BhSD], places)
        data = _trade(f"all-to-all of {label}", name, sent_WF, [tokens[rank]] * len(tokens), tokens)
        ctx.mark_non_differentiable(data)
        return data, _anchor(sent_WF, tokens, x_BhSD.dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, grad_pending: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        grad_WF = failure.wait(grad_pending, f"all-to-all of gradients, {ctx.label}", ctx.name)
        grad_BShD = _ordered(grad_WF, order, ctx.batch).unflatten(2, ctx.row)
        return grad_BShD.transpose(1, 2), *[None] * 6


class _WaitTokens(torch.autograd.Function):
    """Its arguments: data_WF and its anchor, rank, batch, dim, name, label, and the sizes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        data_WF, _, rank, batch, dim, name, label, *sizes = args
        ctx.save_for_backward(*sizes)
        ctx.name, ctx.label = name, label
        arrived_WF = failure.wait(data_WF, f"all-to-all of {label}", name)
        ctx.count = arrived_WF.shape[1] // (batch * dim)
        return _by_head(arrived_WF.view(len(sizes), sizes[rank].shape[0], batch, ctx.count, dim))

    @staticmethod
    def backward(ctx: Any, grad_BHTD: torch.Tensor) -> tuple[Any, ...]:
        check_first_order()
        tokens = [x.shape[0] for x in ctx.saved_tensors]
        firsts = tuple(range(0, grad_BHTD.shape[1], ctx.count))
        sent_WF = _deal((grad_BHTD,), ctx.count, firsts)
        sizes = [grad_BHTD.shape[2]] * len(tokens)
        pending = _trade(f"all-to-all of gradients, {ctx.label}", ctx.name, sent_WF, tokens, sizes)
        return None, returned(pending), *[None] * (5 + len(tokens))


def _trade(what: str, name: str, sent_WF: torch.Tensor, recv: list[int], send: list[int]) -> torch.Tensor:
    return failure.start(what, name, _torch.start_all_to_all, sent_WF, recv, send, name)


def _anchor(sent_WF: torch.Tensor, back: list[int], dtype: torch.dtype) -> torch.Tensor:
    """As `_gradients.anchor`: its gradient is the trade of gradients under way, in the dtype in which they travel.

    Its rows are spelled as that collective spells them, or compiled code would see two different numbers of rows.
    """
    return torch.zeros((), dtype=dtype, device=sent_WF.device).expand(sum(back), sent_WF.shape[1])


def _deal(xs: tuple[torch.Tensor, ...], count: int, firsts: tuple[int, ...]) -> torch.Tensor:
    """Rows to send: `count` heads from ``firsts[j]`` on for rank j, of each ``[B, H, T, D]``, side by side; one copy.

    Two copies where the ranks' windows of heads are neither apart nor the same for equally many ranks.
    """
    num_ranks, num_heads = len(firsts), xs[0].shape[1]
    parts = []
    for x in xs:
        if num_heads == num_ranks * count:
            dealt = x.unflatten(1, (num_ranks, 1, count))
        elif num_ranks % num_heads == 0:
            dealt = x[:, :, None, None].expand(-1, -1, num_ranks // num_heads, -1, -1, -1)
        else:
            dealt = torch.cat([x[:, first : first + count] for first in firsts], dim=1)
            dealt = dealt.unflatten(1, (num_ranks, 1, count))
        parts.append(dealt.permute(1, 2, 4, 0, 3, 5))
    return torch.cat(parts, dim=-1).flatten(0, 2).flatten(1)


def _collect(x_nTBhF: torch.Tensor, num_heads: int, firsts: tuple[int, ...]) -> torch.Tensor:
    """`_deal` backwards: the sum for each head over the ranks that had it, ``[groups, T, B, heads of a group, F]``."""
    num_ranks, count = x_nTBhF.shape[0], x_nTBhF.shape[3]
    if num_heads == num_ranks * count:
        return x_nTBhF
    if num_ranks % num_heads == 0:
        return x_nTBhF.unflatten(0, (num_heads, num_ranks // num_heads)).sum(1)
    total = x_nTBhF.new_zeros(1, *x_nTBhF.shape[1:3], num_heads, x_nTBhF.shape[4])
    for first, x_TBhF in zip(firsts, x_nTBhF.unbind(0), strict=True):
        total[0, :, :, first : first + count] += x_TBhF
    return total


def _by_head(x_gTBhD: torch.Tensor) -> torch.Tensor:
    """``[B, g * h, T, D]``, heads of a token beside one another in memory, where projections want them."""
    return x_gTBhD.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _ordered(x_WF: torch.Tensor, order: torch.Tensor, batch: int) -> torch.Tensor:
    """Received rows as the group's tokens in ascending order, ``[B, S, h * F]``."""
    if batch == 1:
        return x_WF.index_select(0, order[0]).unsqueeze(0)
    rows = torch.arange(batch, device=order.device).unsqueeze(1)
    return x_WF.unflatten(1, (batch, x_WF.shape[1] // batch))[order.expand(batch, -1), rows]


def _in_rank_order(xs: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """Rows to send: the group's tokens ``[B, h, S, D]``, those of rank 0 first; `_ordered` backwards."""
    batch = xs[0].shape[0]
    if batch == 1:
        parts = [x[0].transpose(0, 1).index_select(0, places[0]).unsqueeze(1) for x in xs]
    else:
        rows = torch.arange(batch, device=places.device)
        parts = [x.permute(2, 0, 1, 3)[places.expand(batch, -1).T, rows] for x in xs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).flatten(1)


def _readers(reads: tuple[int, ...]) -> list[int]:
    """How many query heads read each of the heads from ``reads[0]`` to ``reads[-1]``."""
    return [reads.count(head) for head in range(reads[0], reads[-1] + 1)]


def _for_queries(x_BShF: torch.Tensor, reads: tuple[int, ...]) -> torch.Tensor:
    """The heads that the query heads read, for equally many each; repeated (a copy) where that cannot be."""
    readers = _readers(reads)
    x_BShF = x_BShF[:, :, reads[0] : reads[-1] + 1]
    if len(set(readers)) == 1:
        return x_BShF
    parts = [x.expand(-1, -1, n, -1) for x, n in zip(x_BShF.split(1, dim=2), readers, strict=True)]
    return torch.cat(parts, dim=2)


def _from_queries(grad_BhSD: torch.Tensor, reads: tuple[int, ...], count: int, dtype: torch.dtype) -> torch.Tensor:
    """`_for_queries` backwards, by head: gradients of all `count` received heads, zero for those that are not read."""
    readers = _readers(reads)
    grad_BhSD = grad_BhSD.to(dtype)
    if len(set(readers)) > 1:
        grad_BhSD = torch.cat([part.sum(1, keepdim=True) for part in grad_BhSD.split(readers, dim=1)], dim=1)
    if len(readers) == count:
        return grad_BhSD
    return torch.nn.functional.pad(grad_BhSD, (0, 0, 0, 0, reads[0], count - 1 - reads[-1]))

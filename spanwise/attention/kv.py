"""K/V of each stage as one rank's attention takes them: its own at once, pieces from elsewhere as they arrive.

Stands between the exchanges, which move rows, and `attention`, which wants keys and values by head.
"""

# B batch, H heads, T tokens of this rank, D head dim, R rows (batch row, token) of a padded shard, K keys of a piece,
# F features of a token: K and V side by side

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention.chunks import Stage
from spanwise.attention.exchange import all_gather, needed, ring
from spanwise.attention.exchange.again import Again, Fetched
from spanwise.attention.kernels.merge import Part
from spanwise.attention.rank_plan import RankPlan, outer_group, spread_slots

Arriving = Callable[[], torch.Tensor]  # waits for a piece and returns it, [B, K, F]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Keys and values of one stage.

    Attributes:
        k, v: ``[B, Hkv, K, D]``.
        index: of the piece among those from elsewhere; -1 for the rank's own.
        again: who fetches the pieces again in the backward; None if they are kept.
    """

    k: torch.Tensor
    v: torch.Tensor
    index: int = -1
    again: Again | None = None

    def attended(self, attend: Callable[[torch.Tensor, torch.Tensor], Part]) -> Part:
        """``attend(k, v)``, the kernel's part, without keeping a piece that is fetched again."""
        if self.again is None:
            return attend(self.k, self.v)
        hooks: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.index >= 0:
            hooks = self.again.forgetting(self.index, self.k, self.v)
        with hooks:
            part = attend(self.k, self.v)
        return self.again.remind(self.index, *part)


def kv_pieces(
    k: torch.Tensor,
    v: torch.Tensor,
    stages: tuple[Stage, ...],
    local: RankPlan,
    mesh: DeviceMesh | None,
    mask: str,
) -> Iterator[Piece]:
    """The piece of each stage, in order. A generator: what is computed between two pieces runs while others travel.

    Args:
        k, v: ``[B, Hkv, T, D]``, the rank's own.
        mask: name of the mask, for errors.

    Raises:
        spanwise.ExchangeError: a rank is gone or too late, here or in the backward.
        ValueError: pieces are to be fetched again, and this is compiled code.
    """
    if len(stages) == 1:
        yield Piece(k, v)
        return
    assert mesh is not None
    if not local.keep_kv and torch.compiler.is_compiling():
        raise ValueError(
            "a plan with keep_kv=False is for eager code: in a compiled graph, selective activation checkpointing "
            "decides what is kept; make the plan with keep_kv=True"
        )
    name = outer_group(mesh)
    if stages[1].hop is not None:
        yield from _round_the_ring(k, v, stages, local, name, mask)
        return
    fetch = _needed_pieces if stages[1].route is not None else _gathered_piece
    again = None
    if not local.keep_kv:
        own, label = (k.detach(), v.detach()), f"K/V again for the backward, mask {mask!r}"
        again = Again(
            [functools.partial(_one, fetch, *own, stages[i : i + 1], local, name, label) for i in range(1, len(stages))]
        )
    arriving = fetch(k, v, stages[1:], local, name, f"K/V, mask {mask!r}")
    yield Piece(k, v, again=again)
    for i, arrived in enumerate(arriving):
        pair = _by_head(arrived(), k, v)
        if again is not None:
            pair = (pair[0].contiguous(), pair[1].contiguous())  # or a kernel that wants them so would keep copies
        yield Piece(*pair, i, again)
        del pair  # or this piece would live until the next one has arrived


def _round_the_ring(
    k: torch.Tensor, v: torch.Tensor, stages: tuple[Stage, ...], local: RankPlan, name: str, mask: str
) -> Iterator[Piece]:
    """The rank's own piece, then the shards that come round."""
    hops = [stage.hop for stage in stages if stage.hop is not None]

    def with_spare(i: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A piece as the kernel takes it: a copy where it wants more keys than arrived."""
        if not hops[i].spare:
            return k, v
        spare = stages[i + 1].kv_pos.shape[1] - k.shape[2]
        return torch.nn.functional.pad(k, (0, 0, 0, spare)), torch.nn.functional.pad(v, (0, 0, 0, spare))

    again = None
    if not local.keep_kv:
        dims = (k.shape[0], k.shape[1], k.shape[3], v.shape[3])
        label = f"K/V again for the backward, mask {mask!r}"
        fetches = ring.fetches(k.detach(), v.detach(), hops, local.group, local.num_groups, name, label)
        again = Again(fetches, chained=True, saved=lambda i, buffer: with_spare(i, *ring.unpack(buffer, dims)))
    arriving = ring.start(k, v, hops, local.group, local.num_groups, name, f"K/V, mask {mask!r}")
    yield Piece(k, v, again=again)
    for i in range(len(hops)):  # enumerate would hold what it gave last until the hop after next has been started
        k_piece, v_piece = with_spare(i, *next(arriving))
        yield Piece(k_piece, v_piece, i, again)
        del k_piece, v_piece  # and so would these


def _by_head(data_BKF: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[B, Hkv, K, D]`` of a piece, with the heads and head dims of k and v; views."""
    k_flat, v_flat = data_BKF.split([k.shape[1] * k.shape[3], v.shape[1] * v.shape[3]], dim=-1)
    return (
        k_flat.unflatten(-1, (k.shape[1], k.shape[3])).transpose(1, 2),
        v_flat.unflatten(-1, (v.shape[1], v.shape[3])).transpose(1, 2),
    )


def _side_by_side(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K and V of a token side by side, ``[B, T, F]``: one collective moves both, whatever their head dims."""
    return torch.cat([k.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2)], dim=-1)


def _needed_pieces(
    k: torch.Tensor, v: torch.Tensor, stages: tuple[Stage, ...], local: RankPlan, name: str, label: str
) -> list[Arriving]:
    """Start the exchange of all pieces."""
    batch = k.shape[0]
    routes = [stage.route for stage in stages if stage.route is not None]
    # All batch rows of a token in one row; they go to the same ranks (where they do not, batch is 1 here).
    pending: list[Any] = needed.start(_side_by_side(k, v).transpose(0, 1).flatten(1), routes, name, label)

    def arrived(i: int) -> torch.Tensor:
        one, pending[i] = pending[i], None  # or the buffer would stay for as long as the caller works on the piece
        what = f"{label}, piece {i + 1} of {len(routes)}"
        return needed.wait(one, routes[i], name, what).unflatten(1, (batch, -1)).transpose(0, 1)

    return [functools.partial(arrived, i) for i in range(len(routes))]


def _gathered_piece(
    k: torch.Tensor, v: torch.Tensor, stages: tuple[Stage, ...], local: RankPlan, name: str, label: str
) -> list[Arriving]:
    """Start the gather."""
    batch, take = k.shape[0], stages[0].take
    assert take is not None
    padded = local.kv_padded.shape[0]
    kv_RF = all_gather.pad_tokens(_side_by_side(k, v), padded).flatten(0, 1)
    pending: list[Any] = [all_gather.start(kv_RF, local.num_groups, name, label)]

    def arrived() -> torch.Tensor:
        gathered_PRF = all_gather.wait(pending.pop(), local.num_groups, name, label)
        at = spread_slots(local, take, padded, batch).flatten()
        return gathered_PRF.index_select(0, at).unflatten(0, (batch, -1))

    return [arrived]


def _one(fetch: Callable[..., list[Arriving]], k: torch.Tensor, v: torch.Tensor, *args: Any) -> Fetched:
    """Start the exchange of a single piece; what it returns waits for it and gives its keys and values by head."""
    (arriving,) = fetch(k, v, *args)

    def arrived() -> tuple[torch.Tensor, torch.Tensor]:
        k_piece, v_piece = _by_head(arriving(), k, v)
        return k_piece.contiguous(), v_piece.contiguous()

    return arrived

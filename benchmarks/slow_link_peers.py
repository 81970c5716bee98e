"""Attention calls of other packages as `slow_link` times them beside ours, on gloo and CPU.

Two packages from PyPI, neither of which spanwise needs: axolotl-ringmaster 0.2.7 and ring-attention-pytorch 0.5.20.
Each call is given the layout that it asks for, and its pure-torch kernel: their fast ones need CUDA. What a package
does not take is refused here with the reason; what it computes wrongly shows in the comparison with the reference.
"""

# mypy: disable-error-code=import-not-found

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

INSTALL = (
    "pip install --no-deps --target SITE axolotl-ringmaster==0.2.7 ring-attention-pytorch==0.5.20 "
    "einops beartype jaxtyping wadler-lindig"
)
#: Global positions of this rank's tokens in the order in which the call wants them, and the call: q, k, v
#: ``[1, heads, tokens, head_dim]`` to out of the same shape.
Peer = tuple[torch.Tensor, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]


class Refused(Exception):
    """The package does not take this mask, or does not run here; the text says why."""


def _contiguous(tokens: int, ranks: int, rank: int) -> torch.Tensor:
    return torch.arange(tokens).chunk(ranks)[rank]


def _zigzag(tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Chunks rank and 2P - 1 - rank of 2P."""
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def _ringmaster(balance: str, rotate: str, offsets: torch.Tensor, ranks: int, rank: int) -> Peer:
    from ringmaster.config import Backend, LoadBalance, RingmasterConfig, RotateMethod
    from ringmaster.runtime import CPRuntime, set_runtime
    from ringmaster.strategies.ring import make_ring_attention

    packed = len(offsets) > 2
    if packed and balance == "none" and rotate == "alltoall":
        raise Refused("under documents its contiguous ring is the all-gather one")
    config = RingmasterConfig(
        size=ranks, backend=Backend.RING, ring_size=ranks, ulysses_size=1, load_balance=LoadBalance(balance),
        rotate_method=RotateMethod(rotate),
    )  # fmt: skip
    varlen = (offsets.to(torch.int32), int(offsets.diff().max())) if packed else None
    runtime = CPRuntime(config=config, ring_group=dist.group.WORLD, cp_group=dist.group.WORLD, varlen=varlen)
    set_runtime(runtime)
    # What `ringmaster.setup` registers with transformers, without transformers.
    forward = make_ring_attention("math", "math", config.rotate_method)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, _ = forward(SimpleNamespace(), q, k, v, None, is_causal=True, sliding_window=None)
        return out.transpose(1, 2)

    layout = _zigzag if runtime.shard_load_balance == "head_tail" else _contiguous
    return layout(int(offsets[-1]), ranks, rank), attend


def _ring_attention(offsets: torch.Tensor, ranks: int, rank: int) -> Peer:
    from ring_attention_pytorch import ring_flash_attn

    if len(offsets) > 2:
        raise Refused(
            "ring_flash_attn takes causal=True, a look-back or a mask of padding keys (which it drops when causal): "
            "no document boundaries"
        )
    tokens = _contiguous(int(offsets[-1]), ranks, rank)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out = ring_flash_attn(q, k, v, causal=True, bucket_size=min(512, len(tokens)), ring_reduce_col=True)
        return out.transpose(1, 2)

    return tokens, attend


def _ring_attention_zigzag(offsets: torch.Tensor, ranks: int, rank: int) -> Peer:
    from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

    every = [_zigzag(int(offsets[-1]), ranks, other) for other in range(ranks)]
    queries, keys = every[rank].unsqueeze(1), torch.cat(every)
    document = torch.searchsorted(offsets, keys, right=True)
    visible = (keys <= queries) & (document == torch.searchsorted(offsets, queries, right=True))
    return every[rank], lambda q, k, v: zig_zag_attn(q, k, v, attn_mask=visible)


#: ``(offsets of documents, ranks, rank) -> Peer``.
PEERS: dict[str, Callable[[torch.Tensor, int, int], Any]] = {
    "ringmaster ring, all-gather": functools.partial(_ringmaster, "none", "allgather"),
    "ringmaster ring, p2p": functools.partial(_ringmaster, "none", "alltoall"),
    "ringmaster ring, zigzag": functools.partial(_ringmaster, "head_tail", "alltoall"),
    "ringmaster ring, distflash": functools.partial(_ringmaster, "distflash", "alltoall"),
    "ring-attention-pytorch ring": _ring_attention,
    "ring-attention-pytorch zigzag": _ring_attention_zigzag,
}

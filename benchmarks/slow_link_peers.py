"""Attention calls of other packages as `slow_link_rank.py` times them beside ours, on gloo and CPU.

Two packages from PyPI, neither of which spanwise needs: axolotl-ringmaster 0.2.7 and ring-attention-pytorch 0.5.20.
Each call is given the layout that it asks for, and its pure-torch kernel: their fast ones need CUDA. What a package
does not take is refused here with the reason; what it computes wrongly shows in the comparison with the reference.
"""

# mypy: disable-error-code=import-not-found

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from slow_link_cases import Scenario

INSTALL = (
    "pip install --no-deps --target SITE axolotl-ringmaster==0.2.7 ring-attention-pytorch==0.5.20 "
    "einops beartype jaxtyping wadler-lindig"
)


class Refused(Exception):
    """The package does not take this mask, or does not run here; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One attention call of another package.

    Attributes:
        tokens: int64, this rank's global positions in the order in which the call wants them.
        attend: q, k, v ``[1, heads, tokens, head_dim]`` to out of the same shape.
    """

    tokens: torch.Tensor
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def contiguous(scenario: Scenario, rank: int) -> torch.Tensor:
    length = scenario.seq_len // scenario.num_hosts
    return torch.arange(rank * length, (rank + 1) * length)


def zigzag(scenario: Scenario, rank: int) -> torch.Tensor:
    """Chunks rank and 2P - 1 - rank of 2P."""
    chunks = torch.arange(scenario.seq_len).chunk(2 * scenario.num_hosts)
    return torch.cat([chunks[rank], chunks[2 * scenario.num_hosts - 1 - rank]])


def _ringmaster(balance: str, rotate: str) -> Callable[[Scenario, int], Peer]:
    def make(scenario: Scenario, rank: int) -> Peer:
        from ringmaster.config import Backend, LoadBalance, RingmasterConfig, RotateMethod
        from ringmaster.runtime import CPRuntime, set_runtime
        from ringmaster.strategies.ring import make_ring_attention

        if scenario.kind != "causal" and balance == "none" and rotate == "alltoall":
            raise Refused("under documents and windows its contiguous ring is the all-gather one")
        config = RingmasterConfig(
            size=scenario.num_hosts, backend=Backend.RING, ring_size=scenario.num_hosts, ulysses_size=1,
            load_balance=LoadBalance(balance), rotate_method=RotateMethod(rotate),
        )  # fmt: skip
        varlen = None
        if scenario.kind == "documents":
            offsets = torch.from_numpy(scenario.offsets()).to(torch.int32)
            varlen = (offsets, int(offsets.diff().max()))
        runtime = CPRuntime(config=config, ring_group=dist.group.WORLD, cp_group=dist.group.WORLD, varlen=varlen)
        set_runtime(runtime)
        # What `ringmaster.setup` registers with transformers, without transformers.
        forward = make_ring_attention("math", "math", config.rotate_method)
        # Its window counts the query itself.
        window = None if scenario.window is None else scenario.window + 1

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, _ = forward(SimpleNamespace(), q, k, v, None, is_causal=True, sliding_window=window)
            return out.transpose(1, 2)

        layout = zigzag if runtime.shard_load_balance == "head_tail" else contiguous
        return Peer(layout(scenario, rank), attend)

    return make


def _ring_attention_pytorch(scenario: Scenario, rank: int) -> Peer:
    from ring_attention_pytorch import ring_flash_attn

    if scenario.kind == "documents":
        raise Refused(
            "ring_flash_attn takes causal=True, a look-back or a mask of padding keys (which it drops when causal): "
            "no document boundaries"
        )
    length = scenario.seq_len // scenario.num_hosts
    bucket = min(512, length)
    # Looks back over whole buckets, so that its window is exact only where nothing is masked inside one.
    if scenario.window is not None:
        raise Refused(
            f"ring_flash_attn looks back over whole buckets of keys (max_lookback_seq_len // bucket_size), not over "
            f"exactly {scenario.window} of them"
        )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out = ring_flash_attn(q, k, v, causal=True, bucket_size=bucket, ring_reduce_col=True)
        return out.transpose(1, 2)

    return Peer(contiguous(scenario, rank), attend)


def _ring_attention_zigzag(scenario: Scenario, rank: int) -> Peer:
    from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

    tokens = zigzag(scenario, rank)
    keys = torch.cat([zigzag(scenario, other) for other in range(scenario.num_hosts)])
    mask = scenario.mask()
    visible = torch.zeros(len(tokens), len(keys), dtype=torch.bool)
    for start, end in zip(mask.start[0], mask.end[0], strict=True):
        low, high = (torch.from_numpy(x.copy())[tokens].unsqueeze(1) for x in (start, end))
        visible |= (keys >= low) & (keys < high)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return zig_zag_attn(q, k, v, attn_mask=visible)

    return Peer(tokens, attend)


PEERS: dict[str, Callable[[Scenario, int], Any]] = {
    "ringmaster ring, all-gather": _ringmaster("none", "allgather"),
    "ringmaster ring, p2p": _ringmaster("none", "alltoall"),
    "ringmaster ring, zigzag": _ringmaster("head_tail", "alltoall"),
    "ringmaster ring, distflash": _ringmaster("distflash", "alltoall"),
    "ring-attention-pytorch ring": _ring_attention_pytorch,
    "ring-attention-pytorch zigzag": _ring_attention_zigzag,
}

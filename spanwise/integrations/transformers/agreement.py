"""check_same_batch: the ranks of a cp mesh got the same batch.

Plans are compared anyway, but batches of equal document lengths have equal plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.exchange import failure
from spanwise.attention.exchange.expectation import Call
from spanwise.attention.rank_plan import mesh_ranks


def check_same_batch(batch: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Compare the contents of a batch over `mesh`; one all-reduce of 16 bytes an axis. A compared call itself.

    Embeddings are not compared: ranks may have computed them, and kernels need not give the same bits twice.

    Raises:
        ValueError: batches that differ, on all ranks.
        spanwise.MismatchError: a rank makes another call, as after a backward that it left out.
        spanwise.ExchangeError: a rank is gone or too late.
    """
    failure.compare(Call(b"", "a batch", (), ()), *mesh_ranks(mesh))
    total = torch.zeros((), dtype=torch.int64)
    for index, name in enumerate(sorted(batch)):
        x = batch[name]
        if isinstance(x, torch.Tensor) and name != "inputs_embeds":
            total = total.to(x.device) * 1000003 + (index + 1) * _checksum(x.detach())
    extremes = torch.stack([total, -total])
    extremes = extremes.to(_torch.comparison_device(mesh.get_group(0)))
    extremes = failure.all_reduce(extremes, "max", mesh, "the checksum of a batch")
    largest, smallest = extremes.tolist()
    if largest != -smallest:
        raise ValueError(
            "the ranks of the cp mesh got different batches of equal lengths; every rank of the mesh takes the same "
            "whole batch: give the loader's sampler the data-parallel rank, and equal seeds on all cp ranks"
        )


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """int64: differs, almost surely, where contents or shapes do."""
    if x.is_floating_point():  # the bits, summed by row: images are large
        bits = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        x = bits.flatten(1).sum(1, dtype=torch.int64) if x.dim() > 1 else bits
    x = x.flatten().long()
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 2654435761 + 1
    return (x * weights).sum() + x.numel()

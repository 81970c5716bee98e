"""What the ranks of a cp mesh must share: the same batch, and the same parameters.

Plans are compared anyway, but batches of equal document lengths have equal plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spanwise import _torch
from spanwise.attention import executor
from spanwise.attention.call_log import Call
from spanwise.attention.compare import mesh_ranks, record


class Parameters:
    """Compares the parameters of a model that train: at its first batch, and after each of two optimizer steps.

    Ranks whose gradients nobody averages print equal losses while their weights drift apart. Parameters that are
    sharded or replicated over ranks of the cp mesh, as by FSDP2, are left out: their owner averages gradients.
    """

    _left, _last = 3, 0  # comparisons to come, and the checksum at the last one

    def checksum(self, model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
        """int64 without dims; 0 if nothing is left to compare."""
        own = _own(model, mesh) if self._left else []
        total = _total([_checksum(x) for x in own])
        # By value: fused optimizers, and those that write to `.data`, leave the versions of tensors as they are.
        self._left, self._last = (self._left - (int(total) != self._last) if own else 0), int(total)
        return total


def check_same(batch: Mapping[str, Any], mesh: DeviceMesh, models: Sequence[tuple[nn.Module, Parameters]]) -> None:
    """Compare tensors and numbers of a batch, and parameters of models, over `mesh`; an all-reduce of 32 bytes an axis.

    Embeddings are not compared: ranks may have computed them, and kernels need not give the same bits twice.

    Raises:
        ValueError: batches or parameters that differ, on all ranks.
        spanwise.MismatchError: a rank makes another call, as after a backward that it left out.
        spanwise.ExchangeError: a rank is gone or too late.
    """
    if mesh.size() == 1:
        return
    record(Call("a batch"), *mesh_ranks(mesh))
    compared = [
        n for n, x in sorted(batch.items()) if isinstance(x, (torch.Tensor, int, float)) and n != "inputs_embeds"
    ]
    tensors = [torch.as_tensor(batch[n]) for n in compared]
    weights = _total([x.checksum(model, mesh) for model, x in models if torch.is_grad_enabled()])
    device = _torch.comparison_device(mesh.get_group(0))
    sums = torch.stack([x.to(device) for x in (_total([_checksum(x.detach()) for x in tensors]), weights)])
    extremes = executor.all_reduce(torch.stack([sums, -sums]), "max", mesh, "checksums")
    same_batch, same_weights = (extremes[0] == -extremes[1]).tolist()
    if not same_batch:
        raise ValueError("the ranks of the cp mesh got different batches of equal lengths; give all of them the same")
    if not same_weights:
        raise ValueError(
            "parameters differ between ranks of the cp mesh; average gradients over it, as fully_shard and "
            "DistributedDataParallel do, and start from equal weights; if they differ by design, as local experts, "
            "pass check_parameters=False to hf.context_parallel"
        )


def _own(model: nn.Module, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The parameters that ranks of `mesh` must have equal."""
    ranks, found = set(mesh.mesh.flatten().tolist()), []
    for x in model.parameters():
        shared = isinstance(x, DTensor) and len(ranks.intersection(x.device_mesh.mesh.flatten().tolist())) > 1
        if x.requires_grad and not shared:
            found.append((x.to_local() if isinstance(x, DTensor) else x).detach())
    return found


def _total(sums: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64 without dims: differs, almost surely, where one of `sums`, or their order, does."""
    total = torch.zeros((), dtype=torch.int64)
    for index, x in enumerate(sums):
        total = total.to(x.device) * 1000003 + (index + 1) * x
    return total


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """int64 without dims: differs, almost surely, where contents or shapes do."""
    if x.is_floating_point():  # the bits, summed by row: images are large
        bits = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        x = bits.flatten(1).sum(1, dtype=torch.int64) if x.dim() > 1 else bits
    x = x.flatten().long()
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 2654435761 + 1
    return (x * weights).sum() + x.numel()

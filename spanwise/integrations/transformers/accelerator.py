"""Processes as accelerate counts them: the ranks of a cp group are one, because they train on the same batch."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch.distributed.device_mesh import DeviceMesh


class CpAccelerator(Accelerator):
    """An accelerator for which each cp group is one process: what it loads, gathers and divides by.

    Files, barriers and the process that logs stay those of all ranks; gradients are averaged over all ranks.
    """

    cp_groups: torch.Tensor  # int64 [groups, cp]: the global ranks of each group

    @property
    def num_processes(self) -> int:
        return self.cp_groups.shape[0]

    @property
    def process_index(self) -> int:
        return int((self.cp_groups == self.state.process_index).any(dim=1).nonzero())

    def gather(self, tensor: Any) -> Any:
        """What `Accelerator.gather` returns, from the first rank of each cp group."""
        return self.first_of_groups(super().gather(tensor))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """What `Accelerator.reduce` returns, where each cp group counts once."""
        reduced, size = super().reduce(tensor, reduction, scale), self.cp_groups.shape[1]
        if reduction != "sum":
            return reduced
        return recursively_apply(lambda total: total / size if total.is_floating_point() else total // size, reduced)

    def first_of_groups(self, gathered: Any) -> Any:
        """Rows of the first rank of each cp group, of tensors ``[all ranks * rows, …]``."""
        world, first = self.cp_groups.numel(), self.cp_groups[:, 0]
        if world == 1:
            return gathered
        return recursively_apply(lambda x: x.unflatten(0, (world, -1))[first].flatten(0, 1), gathered)


def group_processes(accelerator: Accelerator, mesh: DeviceMesh) -> None:
    """Make `accelerator` a `CpAccelerator`; raise ValueError for a mesh that is not of "cp" and data-parallel axes."""
    names = mesh.mesh_dim_names or ()
    if "cp" not in names or any(name != "cp" and not name.startswith("dp") for name in names):
        raise ValueError(
            f"hf.trainer takes a mesh of 'cp' and data-parallel axes ('dp', 'dp_shard', 'dp_replicate'), got axes "
            f"{names}; for other axes call hf.context_parallel and write the loop"
        )
    world = accelerator.state.num_processes
    if sorted(mesh.mesh.flatten().tolist()) != list(range(world)):
        raise ValueError(
            f"the mesh has the ranks {mesh.mesh.flatten().tolist()} and accelerate runs {world} processes; give a mesh "
            f"of all processes, started by torchrun or accelerate launch"
        )
    accelerator.__class__ = CpAccelerator
    assert isinstance(accelerator, CpAccelerator)
    accelerator.cp_groups = mesh.mesh.movedim(names.index("cp"), -1).reshape(-1, mesh["cp"].size()).cpu()

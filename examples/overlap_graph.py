"""Hide the communication of a training step: compile it with spanwise's overlap pass and print the report.

    torchrun --nproc-per-node 2 examples/overlap_graph.py

Each weight is sharded over the ranks, gathered before its use and its gradient reduce-scattered, as FSDP does.
"aot_eager" runs the scheduled graphs as they are; "inductor" compiles them.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import spanwise
from spanwise import overlap

LAYERS, DIM, TOKENS = 4, 1024, 256


def step(x: torch.Tensor, weights: list[DTensor]) -> torch.Tensor:
    for weight in weights:
        x = torch.relu(x @ weight.full_tensor(grad_placements=[Partial()]).t())
    return x.square().mean()


def gradients(function, x: torch.Tensor, weights: list[DTensor]) -> list[torch.Tensor]:
    return [grad.to_local() for grad in torch.autograd.grad(function(x, weights), weights)]


def main() -> None:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    weights = [distribute_tensor(torch.randn(DIM, DIM) / DIM**0.5, mesh, [Shard(0)]) for _ in range(LAYERS)]
    for weight in weights:
        weight.requires_grad_()
    torch.manual_seed(mesh.get_rank())
    x = torch.randn(TOKENS, DIM)  # this rank's part of the batch

    results: list[overlap.Result] = []
    backend = overlap.backend("aot_eager", cost=spanwise.CPU_HOST, on_result=results.append)
    scheduled = gradients(torch.compile(step, backend=backend), x, weights)
    for ours, expected in zip(scheduled, gradients(step, x, weights), strict=True):
        torch.testing.assert_close(ours, expected)
    if mesh.get_rank() == 0:
        for name, result in zip(("forward", "backward"), results, strict=True):
            print(f"--- {name} ---\n{result.report()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

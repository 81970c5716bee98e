"""Schedule a whole training step: SimpleFSDP's forward, backward and AdamW as one graph, traced by make_fx.

    torchrun --nproc-per-node 2 examples/overlap_step.py

Parameters are sharded and gathered where they are read, as in torchtitan's simple_fsdp. Nothing is compiled.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, stateless

import spanwise
from spanwise import overlap

LAYERS, DIM, TOKENS = 4, 512, 256


class Gather(nn.Module):
    def forward(self, shard: DTensor) -> torch.Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def main() -> None:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(LAYERS)))
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gather(), unsafe=True)

    def step(shards, moments, x):
        params = {k: DTensor.from_local(s, mesh, [Shard(0)]).requires_grad_() for k, s in shards.items()}
        with stateless._reparametrize_module(model, params):
            loss = model(x).square().mean()
        grads = [grad.to_local() for grad in torch.autograd.grad(loss, list(params.values()))]
        torch._fused_adamw_(list(shards.values()), grads, *moments, lr=1e-3, beta1=0.9, beta2=0.95,
                            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip
        return loss.detach()

    shards = {k: p.to_local().detach() for k, p in model.named_parameters()}
    zeros = [[torch.zeros_like(s) for s in shards.values()] for _ in range(2)]
    inputs = shards, (*zeros, [], [torch.ones(()) for _ in shards]), torch.randn(TOKENS, DIM)
    gm = make_fx(step, tracing_mode="fake")(*inputs)
    results = []
    scheduled = overlap.graph_pass(cost=spanwise.CPU_HOST, on_result=results.append)(gm, inputs)
    losses = [scheduled(*inputs).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    if mesh.get_rank() == 0:
        print(results[0].report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

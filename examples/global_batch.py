"""Train on global batches: one plan over all dp x cp ranks for the documents of each step.

Run: torchrun --nproc-per-node 2 examples/global_batch.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

import spanwise

VOCAB, DIM, HEADS, LONGEST = 64, 32, 4, 2000


class Inner(nn.Module):  # only the attention call: `ContextParallel` replaces its forward
    def forward(self, q, k, v, attn_mask=None):
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM)
        self.qkv, self.inner, self.head = nn.Linear(DIM, 3 * DIM), Inner(), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions, rank_plan):
        x = self.embed(tokens) + self.place(positions)
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + self.inner(q, k, v, attn_mask=rank_plan).transpose(1, 2).flatten(2))


if __name__ == "__main__":  # workers of the loader import this file
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))  # all dp x cp ranks
    torch.manual_seed(0)  # the same weights on every rank
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 100).astype(int).clip(1, LONGEST)
    source = [torch.arange(n) * 3 % VOCAB for n in lengths]  # source[document][start:stop]: a memory-mapped file, say
    model = Model()
    parallelize_module(model, mesh, {"inner": spanwise.ContextParallel(attention_type="sdpa")})
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = spanwise.GlobalBatches(lengths, mesh.size(), tokens_per_rank=4096 // mesh.size(), seed=0)
    dataset = spanwise.GlobalBatchDataset(batches, source, mesh.get_rank())  # reads this rank's tokens only
    for batch in DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"):
        logits = model(batch["input_ids"], batch["position_ids"], batch["plan"].local(mesh))
        loss = spanwise.cross_entropy(logits, batch["labels"], mesh, num_valid=batch["num_valid"])  # of all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"token {batch['state']['position']}: loss {loss:.4f}, imbalance {batch['plan'].imbalance():.2f}")
    dist.destroy_process_group()

"""FSDP2 and context parallelism on packed documents, compared at each step with one device under a dense mask.

Run: torchrun --nproc-per-node 2 examples/train_packed.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import spanwise

VOCAB, DIM, HEADS, LENGTH = 64, 32, 4, 512


class Inner(nn.Module):  # only the attention call: `ContextParallel` replaces its forward
    def forward(self, q, k, v, attn_mask=None):
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.qkv, self.inner, self.head = nn.Linear(DIM, 3 * DIM), Inner(), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions, mask):
        x = self.embed(tokens) + self.place(positions)
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + self.inner(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
torch.manual_seed(0)  # the same weights and documents on every rank
model, single = Model(), Model()  # cut over the ranks; the reference on one device
single.load_state_dict(model.state_dict())
parallelize_module(model, mesh, {"inner": spanwise.ContextParallel(attention_type="sdpa")})
fully_shard(model, mesh=mesh)
runs = [(m, cp, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m, cp in ((model, mesh), (single, None))]
for step in range(10):
    tokens = (torch.arange(LENGTH) * 3 + torch.randint(VOCAB, (1, 1))) % VOCAB
    cu_seqlens = torch.tensor([0, *sorted(torch.randperm(LENGTH - 1)[:6].add(1).tolist()), LENGTH])  # 7 documents
    mask = spanwise.SpanMask.documents(cu_seqlens)
    losses = []
    for module, cp, optimizer in runs:
        plan = spanwise.make_plan(mask, num_ranks=cp.size() if cp else 1)
        batch = spanwise.shard_batch({"input_ids": tokens, "labels": tokens}, plan, cp)
        attn_mask = plan.local(cp) if cp else torch.from_numpy(mask.dense())
        logits = module(batch["input_ids"], batch["position_ids"], attn_mask)
        losses.append(spanwise.cross_entropy(logits, batch["labels"], cp))  # mean over the tokens of all ranks
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(*losses)
    if mesh.get_rank() == 0:
        print(f"step {step}: loss {losses[0]:.4f}, on one device {losses[1]:.4f}")
dist.destroy_process_group()

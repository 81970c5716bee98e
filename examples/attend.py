"""Attention over packed documents, cut over ranks: torchrun --nproc-per-node 2 examples/attend.py"""

import torch
import torch.distributed as dist

import spanwise

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
mask = spanwise.SpanMask.documents([0, 300, 1000, 2048])  # three documents, causal
plan = spanwise.make_plan(mask, num_ranks=mesh.size())
torch.manual_seed(0)  # every rank draws the same whole sequence
q, k, v = (torch.randn(1, heads, 2048, 64) for heads in (8, 2, 2))
shards = spanwise.shard(plan, mesh, (q, k, v), dim=2)  # this rank's tokens
out = spanwise.context_parallel_attention(*shards, plan, mesh)
whole = spanwise.unshard(plan, mesh, out, dim=2)
dense = torch.from_numpy(mask.dense())
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
torch.testing.assert_close(whole, expected)
print(f"rank {mesh.get_rank()}: {shards[0].shape[2]} tokens, reads {plan.recv_tokens()[mesh.get_rank()]} elsewhere")
dist.destroy_process_group()

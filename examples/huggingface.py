"""Train a Hugging Face model, its batches cut over ranks: torchrun --nproc-per-node 2 examples/huggingface.py"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

from spanwise.integrations import transformers as hf

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
torch.manual_seed(0)  # equal weights and batches on every rank
config = Qwen3Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32)
model = AutoModelForCausalLM.from_config(config)  # or from_pretrained(name).train()
hf.context_parallel(model, mesh["cp"])
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lengths = (300, 700, 1024)  # documents of one packed row
for _ in range(5):
    ids = torch.arange(sum(lengths)).remainder(97)[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    loss = model(**batch).loss  # planned, cut, and the mean over all ranks
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
report = hf.verify(model, {name: x[:, :400] for name, x in batch.items()})  # two documents, the second one cut
print(f"rank {mesh.get_rank()}: loss {loss.item():.3f}, {report}")
dist.destroy_process_group()

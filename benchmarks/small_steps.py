"""Small problems on one CPU thread: a step of a Hugging Face model on one rank, and attention with few scores.

    python benchmarks/small_steps.py --out benchmarks/results/small-steps-cpu.json

The model has 8 layers of width 64; its batch packs 237 tokens. Plain and cut steps take turns; the ratio is the median
over the rounds. Attention compares one dense step with the loop over tiles of kernel "sdpa", least of the rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config

import spanwise
from spanwise.attention.kernels import _dense, sdpa
from spanwise.integrations import transformers as hf

SHAPES = ((4, 2, 64, 16), (4, 2, 237, 16), (8, 2, 256, 64), (8, 2, 512, 64))  # heads, key heads, tokens, head dim


def seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def steps(rounds: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    config = Qwen3Config(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config).train()
    cut = hf.context_parallel(copy.deepcopy(plain), mesh)
    ids = torch.randint(0, 160, (1, 237))
    positions = torch.cat([torch.arange(100), torch.arange(137)])[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}

    def step(model: Any) -> Callable[[], None]:
        return lambda: model(**batch).loss.backward()

    pairs = [(seconds(step(plain)), seconds(step(cut))) for _ in range(rounds + 3)][3:]
    ratio = statistics.median(b / a for a, b in pairs)
    return {"plain_s": min(a for a, _ in pairs), "cut_s": min(b for _, b in pairs), "ratio": ratio}


def attention(heads: int, kv_heads: int, tokens: int, dim: int, rounds: int) -> dict[str, Any]:
    mask = spanwise.SpanMask.documents([0, tokens // 3, tokens])
    start, end = torch.from_numpy(mask.start.copy()), torch.from_numpy(mask.end.copy())
    q, k, v = (torch.randn(1, n, tokens, dim) for n in (heads, kv_heads, kv_heads))
    out, lse = _dense.forward(q, k, v, start, end, 1.0)
    gradients = torch.randn_like(out), torch.zeros_like(lse)
    engine = (sdpa.Engine(q, k, v, 1.0, None, base=1.0) for _ in range(10**9))
    results = torch.zeros_like(out), torch.ones_like(lse), torch.full_like(lse, -float("inf"))
    tensors = (*gradients, q, k, v, out, lse)
    ways: dict[str, Callable[[], Any]] = {
        "dense_forward_s": lambda: _dense.forward(q, k, v, start, end, 1.0),
        "dense_backward_s": lambda: _dense.backward(*gradients, (q, k, v, out, lse), start, end, 1.0),
        "tiles_forward_s": lambda: sdpa._fill(next(engine), q, k, v, start, end, results, careful=False),
        "tiles_backward_s": lambda: sdpa._gradients(next(engine), tensors, start, end, careful=False),
    }
    least = {name: min(seconds(act) for _ in range(rounds)) for name, act in ways.items()}
    return {"shape": [heads, kv_heads, tokens, dim], "scores": heads * tokens**2, **least}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    result = {
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, one thread",
        "step": steps(given.rounds),
        "attention": [attention(*shape, given.rounds) for shape in SHAPES],
    }
    dist.destroy_process_group()
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""A small step of a Hugging Face model on one rank and one CPU thread, beside plain transformers.

    python benchmarks/small_steps.py --out benchmarks/results/small-steps-cpu.json

The model has 8 layers of width 64; its batch packs 237 tokens. Plain and cut steps take turns; the ratio is the median
over the rounds.
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

from spanwise.integrations import transformers as hf


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
    }
    dist.destroy_process_group()
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

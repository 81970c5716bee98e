"""A dense transformer's training step as numbers: seconds and bytes, from its sizes and a `Hardware`. Pure.

    step = (matrix products + attention + element-wise operations + exposed tensor parallelism) x micro-batches
         + collectives of sharded parameters that compute does not hide + optimizer

`benchmarks.published` holds the same formulas against published steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spanwise.hardware import Hardware

# Passes over a token's hidden state in forward and backward of a layer. Eager: two norms 70, activation of a width of
# 3.5 42, rotations 25, layouts and residuals 60. Compiled: each of these reads its inputs and writes its results once.
PASSES, PASSES_COMPILED = 200, 70
# Bytes of an optimizer step for a parameter: three float32 states and the gradient, read, and written but for the last.
_OPTIMIZER_BYTES = 28
# Bytes that a parameter keeps: float32 weight and gradient, two states of Adam.
_STATE_BYTES = 16
# Matrix products run 1.3 to 1.4 times as long while NCCL moves data: pytorch/pytorch#179937.
CONTENTION = 0.35
# Forward that runs twice, by kind of checkpointing.
RECOMPUTED = {"full": 1.0, "selective": 0.4, "none": 0.0}


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a dense decoder; `windows` are the keys that each layer reads to the left, None for all."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    windows: tuple[int | None, ...] = ()
    tied: bool = True

    @property
    def layer_parameters(self) -> float:
        return self.dim * self.head_dim * 2.0 * (self.heads + self.kv_heads) + 3.0 * self.dim * self.ffn

    @property
    def parameters(self) -> float:
        """That multiply each token: of all layers and of the output projection."""
        return self.layers * self.layer_parameters + self.vocab * self.dim


def read_model(config: Mapping[str, Any] | str | os.PathLike[str]) -> Model:
    """The sizes in a Hugging Face config, as a dict or the path of its `config.json`.

    Raises:
        ValueError: a size is missing, or layers are not dense attention and feed-forward.
    """
    found = dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    found |= found.get("text_config") or {}
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [name for name in names if not isinstance(found.get(name), int)]
    if missing:
        raise ValueError(f"the model's config lacks {', '.join(missing)}; give a dict with Hugging Face's names")
    kinds = found.get("layer_types") or ["full_attention"] * found["num_hidden_layers"]
    experts = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if found.get(name)]
    if other := experts or sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"advice knows dense models with full or sliding attention, got {other}")
    layers, dim, heads, ffn, vocab = (found[name] for name in names)
    window = found.get("sliding_window")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    kv_heads, head_dim = found.get("num_key_value_heads") or heads, found.get("head_dim") or dim // heads
    tied = bool(found.get("tie_word_embeddings", False))
    return Model(layers, dim, heads, kv_heads, head_dim, ffn, vocab, windows, tied)


@dataclasses.dataclass(frozen=True)
class Step:
    """A model's step on ranks that shard its parameters, each with a part of a tensor-parallel group.

    Attributes:
        ranks: dp x cp, over which parameters are sharded.
        tp, pp: ranks that share each layer, and stages of a pipeline.
        recomputed: fraction of the forward that runs twice.
        product_speed: of matrix products to those in bfloat16, for float8.
        exposed: fraction of tensor parallelism's collectives that compute does not hide.
    """

    model: Model
    hardware: Hardware
    ranks: int
    tp: int = 1
    pp: int = 1
    recomputed: float = 1.0
    compiled: bool = True
    product_speed: float = 1.0
    exposed: float = 1.0

    @property
    def own(self) -> float:
        """Parameters of a rank, before they are sharded."""
        return self.model.parameters / self.tp / self.pp

    def compute(self, tokens: float) -> dict[str, float]:
        """Seconds of a micro-batch of so many tokens, by part; attention comes on top."""
        model, hardware = self.model, self.hardware
        products = 2.0 * self.own * tokens * (3 + self.recomputed) / (hardware.matmul_flops * self.product_speed)
        passes = (PASSES_COMPILED if self.compiled else PASSES) * (1 + self.recomputed / 3)
        layers = model.layers / self.pp
        rest = passes * tokens * model.dim * 2 * layers / hardware.memory_bandwidth / self.tp
        together = 0.0
        if self.tp > 1:  # gathered before and scattered after attention and feed-forward, each way
            shard = tokens / self.tp * model.dim * 2
            once = hardware.all_gather_seconds(shard, self.tp) + hardware.reduce_scatter_seconds(shard, self.tp)
            together = self.exposed * 2 * once * (2 + (self.recomputed == 1)) * layers
        return {"matrix products": products, "element-wise": rest, "tensor parallelism": together}

    def sharding(self, compute: float) -> float:
        """Seconds that collectives of parameters and the optimizer add to so much compute."""
        update = self.own / self.ranks * _OPTIMIZER_BYTES / self.hardware.memory_bandwidth
        if self.ranks == 1:
            return update
        far, part = apart(self.hardware, self.tp), 2 * self.own / self.ranks
        moved = 2 * far.all_gather_seconds(part, self.ranks) + far.reduce_scatter_seconds(2 * part, self.ranks)
        return max(CONTENTION * min(moved, compute), moved - compute) + update

    def memory(self, tokens: float) -> float:
        """Bytes of a rank: states, two gathered layers and the output, activations, logits; without exchanges."""
        model = self.model
        weights = model.parameters + (0 if model.tied else model.vocab * model.dim)
        states = _STATE_BYTES * weights / self.tp / self.pp / self.ranks
        gathered = 2.0 * (4 * model.layer_parameters + 2 * model.vocab * model.dim) / self.tp
        # Inputs of norms and products, q, K, V and the output, three tensors of the feed-forward, in bfloat16.
        layer = 2.0 * (4 * model.dim + 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * model.ffn) / self.tp
        kept = 2 * model.dim / self.tp if self.recomputed == 1 else layer * (1 - self.recomputed)
        logits = 10.0 * model.vocab / self.tp  # bfloat16, and float32 with its gradient
        return states + gathered + tokens * (kept * model.layers / self.pp + layer + logits)


def apart(hardware: Hardware, inner: int) -> Hardware:
    """The hardware as groups see it whose ranks are `inner` places apart."""
    if inner == 1:
        return hardware
    size = (hardware.links[0].ranks or 1) // inner
    links = hardware.links[-1:] if size < 2 else hardware.with_host_size(size).links
    return dataclasses.replace(hardware, links=links)

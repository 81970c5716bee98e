"""Rows of a file of published measurements: settings, documents, and the machines that they name.

Rates of machines and kernels are data sheets or somebody's figure for the kernel alone; nothing comes from the rows to
predict.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

import spanwise
from spanwise.hardware import Hardware, Link, attention_flops

Setting = dict[str, Any]

# Lengths of documents in MagiAttention's packs, (at least, below, weight). The file that its charts name
# (doc_length_distribution.csv) is not public. Its code has two older tables (exps/dist_attn/benchmark/utils.py), for
# packs up to 64k tokens and for longer ones. Assumed: the former, and of the latter one document in 200.
_K = 1024
_SHORT = (
    (1, 256, 766), (256, 512, 1651), (512, 768, 1246), (768, _K, 972), (_K, 1536, 1324), (1536, 2 * _K, 927),
    (2 * _K, 2560, 720), (2560, 3 * _K, 519), (3 * _K, 3584, 379), (3584, 4 * _K, 264), (4 * _K, 5 * _K, 380),
    (5 * _K, 6 * _K, 245), (6 * _K, 7 * _K, 145), (7 * _K, 8 * _K, 97), (8 * _K, 10 * _K, 122),
    (10 * _K, 15 * _K, 128), (15 * _K, 20 * _K, 51), (20 * _K, 64 * _K, 64),
)  # fmt: skip
_LONG = (
    (1, 2 * _K, 16), (2 * _K, 4 * _K, 5), (4 * _K, 8 * _K, 4), (8 * _K, 16 * _K, 6), (16 * _K, 32 * _K, 8),
    (32 * _K, 64 * _K, 21), (64 * _K, 128 * _K, 40), (128 * _K, 256 * _K, 20), (256 * _K, 512 * _K, 5),
    (512 * _K, 1024 * _K, 4), (1024 * _K, 2048 * _K, 1), (2048 * _K, 4096 * _K, 1),
)  # fmt: skip
_LONG_SHARE = 1 / 200
_PACKS, _LONGEST = 20, 4
# Dimensions that rows leave out, from the models' published configurations.
_MODELS = {
    "llama2-7b": dict(layers=32, dim=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000),
    "llama-7b": dict(layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ffn=11008, vocab=32000),
    "llama 3.1 8b": dict(layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
    "llama3-8b": dict(layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
    "70b": dict(layers=80, dim=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256),
    "405b": dict(layers=126, dim=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256),
    "qwen3-8b": dict(layers=36, dim=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936),
    "qwen3-30b-a3b": dict(heads=32, kv_heads=4, head_dim=128),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: a setting, and what was measured in it, by name."""

    id: int
    source: str
    group: str
    setting: Setting
    measured: dict[str, Any]

    @property
    def packed(self) -> bool:
        return "packed" in str(self.setting.get("mask", "")) or "docs" in str(self.setting.get("layout", ""))


def read(path: str | Path) -> list[Row]:
    """The rows of a file; settings of known models are completed."""
    every = json.loads(Path(path).read_text())["rows"]
    return [Row(x["id"], x["source"], x["group"], complete(x["setting"]), x["measured"]) for x in every]


def complete(setting: Setting) -> Setting:
    """The setting with its model's dimensions, and the hardware in words."""
    name, hardware = str(setting.get("model", "")).lower(), setting.get("hardware", "")
    known: Setting = next((shape for key, shape in _MODELS.items() if key in name), {})
    words = " ".join(map(str, hardware.values())) if isinstance(hardware, dict) else str(hardware)
    return {**known, **setting, "hardware": words}


def packs(setting: Setting) -> tuple[tuple[int, ...], ...]:
    """Lengths of the documents of each pack; one whole document where the mask packs none."""
    total = setting.get("seq_len_total") or setting.get("seq_len")
    words = str(setting.get("mask", ""))
    if "layout" in setting:  # prime-rl: documents of 12k to 24k tokens, with a target of 16k
        return ((16384,) * 4,)
    if not isinstance(total, int):
        raise ValueError("the sequence length is not given")
    if "cu_seqlens" in words:
        offsets = [json.loads(text) for text in re.findall(r"\[[\d,]+\]", words)]
        times = total // max(map(max, offsets))
        return tuple(tuple(int(n) * times for n in np.diff(one)) for one in offsets)
    if "packed" in words:
        return _sampled(total)
    return ((total,),)


def _sampled(total: int) -> tuple[tuple[int, ...], ...]:
    """Packs of random documents; longer ones than a quarter of a pack are cut, and what does not fit opens the next."""
    rng = np.random.default_rng(42)
    bins = _SHORT + _LONG
    shares = ((_SHORT, 1 - _LONG_SHARE), (_LONG, _LONG_SHARE))
    chance = np.concatenate([share * np.array(table)[:, 2] / sum(n for *_, n in table) for table, share in shares])
    longest, found, rest = total // _LONGEST, [], 0
    while len(found) < _PACKS:
        pack: list[int] = []
        while (left := total - sum(pack)) > 0:
            if rest == 0:
                low, high, _ = bins[rng.choice(len(bins), p=chance)]
                rest = int(rng.integers(low, high))
            pack.append(min(rest, left, longest))
            rest -= pack[-1]
        found.append(tuple(pack))
    return tuple(found)


# Keys that a tile of queries costs beyond those it reads: fill and drain of the pipeline, a tile each.
TILE, FILL_KEYS = 128, 256
# A causal edge cuts through tiles: half of one is masked.
EDGE_KEYS = TILE // 2
# Of the data sheet's rate, in large collectives: cards of 400 Gb/s move 46 to 49 GB/s (NVIDIA/nccl-tests#267, #290).
_HOST_SHARE, _CARD_SHARE = 0.8, 0.95


@dataclasses.dataclass(frozen=True)
class Kernel:
    """FLOP/s of an attention kernel on long sequences of 128-dim heads in bfloat16, forward and backward."""

    name: str
    forward: float
    backward: float
    fill: int = FILL_KEYS

    def scaled(self, factor: float) -> Kernel:
        return dataclasses.replace(self, forward=self.forward * factor, backward=self.backward * factor)

    def seconds(
        self, machine: Machine, queries: np.ndarray, keys: np.ndarray, area: np.ndarray, heads: float, dim: int, *,
        edge: bool, backward: bool,
    ) -> float:  # fmt: skip
        """Seconds of one call on packed sequences of so many queries, keys and pairs; ``[sequences]`` each.

        A block of threads computes a tile of queries over all keys; in the backward a tile of keys over all queries.
        """
        some = (queries > 0) & (keys > 0)
        outer, inner = (x[some] for x in ((keys, queries) if backward else (queries, keys)))
        outer_tiles, inner_tiles = (np.ceil(x / TILE) * TILE for x in (outer, inner))
        rows = area[some] / outer * inner_tiles / inner + self.fill + EDGE_KEYS * edge
        flops = attention_flops(1.0, 1, dim, dim, backward=backward) * heads * float((outer_tiles * rows).sum())
        return machine.hardware.kernel_seconds + flops / (self.backward if backward else self.forward)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A `Hardware`, the rates of its kernels, and how much faster float8 products are than bfloat16 ones."""

    hardware: Hardware
    kernels: tuple[Kernel, ...]
    float8: float = 1.0

    def kernel(self, name: str) -> Kernel:
        return next(kernel for kernel in self.kernels if kernel.name == name)

    def scaled(self, factor: float) -> Machine:
        """All compute faster by a factor."""
        hardware = dataclasses.replace(self.hardware, matmul_flops=self.hardware.matmul_flops * factor)
        return dataclasses.replace(self, hardware=hardware, kernels=tuple(x.scaled(factor) for x in self.kernels))


def _with(hardware: Hardware, name: str, inside: float, outside: float, ranks: int = 8, **changes: float) -> Hardware:
    """The hardware with other links, bytes/s of a rank in one direction by the data sheet."""
    inner, outer = hardware.links
    links = (Link(_HOST_SHARE * inside, inner.latency, ranks=ranks), Link(_CARD_SHARE * outside, outer.latency))
    return dataclasses.replace(hardware, name=name, links=links, **changes)


# FlashAttention-3 (arXiv:2407.08608, figures 5 and 6), H100 SXM, 16k tokens, heads of 128, no mask; its forwards reach
# 648, 370 and 595 TFLOP/s.
_HOPPER = (
    Kernel("flash 3", 640e12, 590e12), Kernel("flash 2", 370e12, 322e12), Kernel("cudnn", 590e12, 540e12),
    # MagiAttention's kernel follows flash 3, but sums the gradients of queries atomically.
    Kernel("magi", 680e12, 540e12),
)  # fmt: skip
# FlashAttention-2 (arXiv:2307.08691, section 4.1): A100 SXM.
_AMPERE = (Kernel("flash 2", 215e12, 185e12),)
# together.ai/blog/flashattention-4: 1,605 TFLOP/s, cuDNN 9.13 up to 1.3 times slower. Backward: Hopper's ratio.
_BLACKWELL = (Kernel("flash 3", 1605e12, 1470e12), Kernel("cudnn", 1235e12, 1130e12))
H100 = Machine(_with(spanwise.H100, "H100", 450e9, 50e9), _HOPPER, float8=1.5)
# H800: NVLink at 400 GB/s in both directions together. A100 SXM 80 GB: 312 TFLOP/s, 2.04 TB/s, NVLink 600 GB/s.
H800 = Machine(_with(spanwise.H100, "H800", 200e9, 50e9), _HOPPER, float8=1.5)
A100 = Machine(_with(spanwise.H100, "A100", 300e9, 25e9, matmul_flops=0.75 * 312e12, memory_bandwidth=2.04e12), _AMPERE)
B200 = Machine(_with(spanwise.B200, "B200", 900e9, 50e9), _BLACKWELL, float8=1.5)
# TPU v5p: 459 TFLOP/s bfloat16, 2.77 TB/s, 3-D torus of 4,800 Gb/s a chip in both directions together.
TPU = Machine(
    _with(spanwise.H100, "TPU v5p", 300e9, 300e9, ranks=64, matmul_flops=0.75 * 459e12, memory_bandwidth=2.77e12),
    (Kernel("splash", 280e12, 240e12, fill=0),),
)
_NAMES = {"H800": H800, "H100": H100, "A100": A100, "B200": B200, "TPU v5p": TPU, "Hopper": H100}


def machine_of(words: str) -> Machine | None:
    """The machine that a description names, or None; with the memory's rate, where the words give another one."""
    found = next((machine for name, machine in _NAMES.items() if name in words), None)
    rate = re.search(r"([\d.]+) ?TB/s", words)
    if found is None or rate is None:
        return found
    return dataclasses.replace(
        found, hardware=dataclasses.replace(found.hardware, memory_bandwidth=1e12 * float(rate[1]))
    )

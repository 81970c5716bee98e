"""Machines of published measurements as `Hardware`, and the rates of attention kernels on them.

Everything here is a data sheet or somebody's figure for the kernel alone; nothing comes from the rows to predict.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

import spanwise
from spanwise.hardware import Hardware, Link, attention_flops

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

"""Rows of a file of published measurements: settings, documents, and the machines that they name.

``settings.json`` has the machines, models and lengths of documents. Rates are data sheets or somebody's figure for the
kernel alone; nothing comes from the rows to predict.
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
TABLES = json.loads(Path(__file__).with_name("settings.json").read_text())
# Share of documents from the table for long packs; packs of a mask; and no document is longer than a quarter of a pack.
_LONG_SHARE, _PACKS, _LONGEST = 1 / 200, 20, 4


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
    """The setting with its model's published dimensions where it leaves them out, and the hardware in words."""
    name, hardware = str(setting.get("model", "")).lower(), setting.get("hardware", "")
    shape = next((shape for key, shape in TABLES["models"].items() if key in name), ())
    known = {key: size for key, size in zip(TABLES["dimensions"], shape, strict=False) if size}
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
    short, long = TABLES["documents"]["short"], TABLES["documents"]["long"]
    shares = ((short, 1 - _LONG_SHARE), (long, _LONG_SHARE))
    chance = np.concatenate([share * np.array(table)[:, 2] / sum(n for *_, n in table) for table, share in shares])
    longest, found, rest = total // _LONGEST, [], 0
    while len(found) < _PACKS:
        pack: list[int] = []
        while (left := total - sum(pack)) > 0:
            if rest == 0:
                low, high, _ = (short + long)[rng.choice(len(chance), p=chance)]
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

    def scaled(self, factor: float) -> Machine:
        """All compute faster by a factor."""
        hardware = dataclasses.replace(self.hardware, matmul_flops=self.hardware.matmul_flops * factor)
        kernels = tuple(
            dataclasses.replace(x, forward=x.forward * factor, backward=x.backward * factor) for x in self.kernels
        )
        return dataclasses.replace(self, hardware=hardware, kernels=kernels)


def machine_of(words: str, default: str = "H100") -> Machine:
    """The machine that a description names, else the default; with the memory's rate, where the words give one."""
    found = next((name for name in TABLES["machines"] if name in words), None)
    given = TABLES["machines"][found or default]
    preset: Hardware = getattr(spanwise, given["preset"])
    changes = {key: given[key] for key in ("matmul_flops", "memory_bandwidth") if key in given}
    rate = re.search(r"([\d.]+) ?TB/s", words)
    if found is not None and rate is not None:
        changes["memory_bandwidth"] = 1e12 * float(rate[1])
    inner, outer = preset.links
    links = (
        Link(_HOST_SHARE * given["inside"], inner.latency, ranks=given.get("host", 8)),
        Link(_CARD_SHARE * given["outside"], outer.latency),
    )
    kernels = tuple(Kernel(name, *of, given.get("fill", FILL_KEYS)) for name, of in given["kernels"].items())
    hardware = dataclasses.replace(preset, name=found or default, links=links, **changes)
    return Machine(hardware, kernels, given.get("float8", 1.0))

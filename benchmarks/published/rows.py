"""Rows of a file of published measurements: settings as numbers, measurements as seconds."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

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

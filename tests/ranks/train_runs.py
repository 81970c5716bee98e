"""Small training runs for tests: a few documents, a tiny model, float64."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from spanwise.train import launch
from spanwise.train.config import TrainConfig
from spanwise.train.launch import Rank
from spanwise.train.loop import Trainer
from spanwise.train.model import ModelConfig
from tests.scripts import forked

TINY = ModelConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=24)


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """`launch` forks ranks from a server that has imported torch; users' ranks are spawned."""
    with mock.patch.object(launch, "multiprocessing", SimpleNamespace(get_context=lambda _: forked())):
        yield


def write_documents(folder: Path, count: int = 12) -> str:
    """Documents of 1 to 90 bytes."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for index in range(count):
        size = 1 if index == 0 else int(random.integers(1, 90))
        (folder / f"{index:02}").write_bytes(bytes(random.integers(97, 105, size).astype(np.uint8)))
    return str(folder)


def tiny(data: str, **options: Any) -> TrainConfig:
    """A run of sequences whose length no number of ranks divides."""
    return TrainConfig(
        **{"data": (data,), "model": TINY, "seq_len": 101, "dtype": "float64", "held_out": 0.2, "warmup": 2} | options
    )


def metrics(out: str | Path) -> dict[str, Any]:
    return json.loads(Path(out, "metrics.json").read_text())


class NoStop:
    """Nobody asks for a stop; ``after`` sets a step after which somebody does."""

    def __init__(self, after: int | None = None):
        self.after, self.count = after, 0

    def asked(self) -> int:
        self.count += 1
        return 15 if self.after is not None and self.count >= self.after else 0


@contextlib.contextmanager
def one_rank(config: TrainConfig) -> Iterator[Trainer]:
    """A trainer of one rank in this process."""
    threads = torch.get_num_threads()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("spanwise.train.loop.cores", return_value=1),
        mock.patch("spanwise.train.launch.cores", return_value=1),
    ):
        try:
            yield Trainer(config, Rank(0, 1, 0, 1, f"file://{folder}/rendezvous"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_num_threads(threads)


def run_one_rank(config: TrainConfig, stop: NoStop | None = None) -> int:
    with one_rank(config) as trainer:
        return trainer.run(stop or NoStop())  # type: ignore[arg-type]

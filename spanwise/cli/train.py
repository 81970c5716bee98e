"""``spanwise train``."""

from __future__ import annotations

from spanwise.train.config import TrainConfig
from spanwise.train.launch import Rank
from spanwise.train.start import start


def train(config: TrainConfig, rank: Rank | None) -> int:
    """Train a decoder on packed documents over several ranks.

    Starts --ranks local processes, or takes part in those that torchrun started:
    torchrun --nproc-per-node 4 -m spanwise train ...
    """
    return start(config, rank)

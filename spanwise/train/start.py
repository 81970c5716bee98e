"""From options to ranks: everything that can be wrong is found here, before a process starts."""

from __future__ import annotations

from spanwise.train import checkpoint
from spanwise.train.config import TrainConfig
from spanwise.train.data import find_documents
from spanwise.train.launch import Rank, launch


def check(config: TrainConfig) -> None:
    """Read what the run will read.

    Raises:
        ValueError: data or checkpoint do not serve; the text names what is wrong and what would work.
    """
    corpus = find_documents(config.data)
    if config.resume:
        path, state = checkpoint.latest(config.out or "")
        checkpoint.check_same_run(state, config, corpus, path)


def start(config: TrainConfig, mine: Rank | None) -> int:
    """Run ``config`` on local ranks, or as the rank ``mine``. Returns the exit status."""
    check(config)
    if mine is not None:
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(_run_rank)(mine, config) or 0
    return launch(_run_rank, config, ranks=config.ranks)


def _run_rank(rank: Rank, config: TrainConfig) -> int:
    from spanwise.train.loop import run_rank  # torch and the process group: only where a rank runs

    return run_rank(rank, config)

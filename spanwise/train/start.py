"""From options to ranks: what can be wrong is found here, before a process starts."""

from __future__ import annotations

import torch

from spanwise.train import checkpoint
from spanwise.train.config import TrainConfig
from spanwise.train.data import DocumentStream, find_documents
from spanwise.train.launch import Rank, launch
from spanwise.train.loop import plan_sequence, run_rank


def check(config: TrainConfig, num_local: int) -> None:
    """Read what the run will read and plan its first sequence.

    Raises:
        ValueError: devices, data, checkpoint or plan options do not serve; the text says what is wrong and what works.
    """
    if config.device == "cuda" and torch.cuda.device_count() < num_local:
        raise ValueError(
            f"--device cuda needs a GPU for each of {num_local} local ranks, found {torch.cuda.device_count()}; "
            "start fewer ranks, or use --device cpu"
        )
    corpus = find_documents(config.data)
    if config.resume:
        path, state = checkpoint.latest(config.out or "")
        checkpoint.check_same_run(state, config, corpus, path)
        config = config.completed(state.batch_size, state.max_document)
    documents, _ = corpus.split(config.held_out)
    stream = DocumentStream(documents, config.seed, config.max_document or config.seq_len)
    plan_sequence(config, stream.cu_seqlens(0, config.seq_len))


def start(config: TrainConfig, mine: Rank | None) -> int:
    """Run ``config`` on local ranks, or as the rank ``mine``. Returns the exit status."""
    check(config, mine.local_size if mine else config.ranks)
    if mine is not None:
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(run_rank)(mine, config) or 0  # torchrun shows the traceback of the rank that failed first
    return launch(run_rank, config, ranks=config.ranks)

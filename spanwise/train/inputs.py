"""What a run reads before its first step."""

from __future__ import annotations

from typing import NamedTuple

from spanwise.train import checkpoint
from spanwise.train.config import TrainConfig
from spanwise.train.data import Corpus, find_documents


class Inputs(NamedTuple):
    """The documents and, with ``--resume``, the checkpoint."""

    corpus: Corpus
    found: checkpoint.Found | None


def read_inputs(config: TrainConfig) -> Inputs:
    """The data and the checkpoint of a run, read to the end; ``ValueError`` unless both are whole and of one run."""
    corpus = find_documents(config.data, leave_out=config.out)
    found = None
    if config.resume:
        found = checkpoint.latest(config.out or "")
        checkpoint.check_same_run(found.state, config, corpus, found.path)
    return Inputs(corpus, found)

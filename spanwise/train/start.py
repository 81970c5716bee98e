"""Starts a run: checks options, data and checkpoint before a process starts, then launches the ranks."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import torch

from spanwise.train.config import TrainConfig
from spanwise.train.data import DocumentStream
from spanwise.train.inputs import Inputs, read_inputs
from spanwise.train.launch import Rank, launch
from spanwise.train.lock import lock
from spanwise.train.loop import run_rank
from spanwise.train.metrics import read_metrics
from spanwise.train.plans import plan_sequence

#: Most repetitions of the training documents in a sequence, and most documents.
EPOCHS_LIMIT = 1000
DOCUMENTS_LIMIT = 2**20


def check(config: TrainConfig, num_local: int) -> Inputs:
    """Read data and checkpoint, plan the first sequence, and return what was read; ``ValueError`` if that fails."""
    if config.device == "cuda" and torch.cuda.device_count() < num_local:
        raise ValueError(
            f"--device cuda needs a GPU for each of {num_local} local ranks, found {torch.cuda.device_count()}; "
            "start fewer ranks, or use --device cpu"
        )
    inputs = read_inputs(config)
    if inputs.found is not None:
        read_metrics(Path(config.out or "", "metrics.json"))
        config = config.completed(inputs.found.state.batch_size, inputs.found.state.max_document)
    config = config.completed()
    assert config.max_document is not None
    documents, held_out = inputs.corpus.split(config.held_out)
    stream = DocumentStream(documents, config.seed, config.max_document)
    if held_out:
        DocumentStream(held_out, 0, config.max_document)
    _bound(config, stream)
    plan_sequence(config, stream.cu_seqlens(0, config.plan_tokens))
    return inputs


def _bound(config: TrainConfig, stream: DocumentStream) -> None:
    """Refuse sequences that take minutes to pack: a mistyped length, or a great number of short documents."""
    length, epochs, tokens = config.plan_tokens, config.plan_tokens / stream.epoch_tokens, stream.epoch_tokens
    name, sequences = ("seq_len × batch_size", length // config.seq_len) if config.global_batch else ("seq_len", 1)
    if epochs > EPOCHS_LIMIT:
        raise ValueError(
            f"{name} {length:,} repeats the {tokens:,} training tokens {epochs:,.0f} times in one plan, at most "
            f"{EPOCHS_LIMIT:,} are possible; give a --seq-len up to {EPOCHS_LIMIT * tokens // sequences:,}, or more "
            "--data"
        )
    documents = epochs * stream.num_parts
    if documents > DOCUMENTS_LIMIT:
        raise ValueError(
            f"{name} {length:,} packs about {documents:,.0f} documents into one plan, at most {DOCUMENTS_LIMIT:,} are "
            f"possible; give a --seq-len up to {int(config.seq_len * DOCUMENTS_LIMIT / documents):,}, or raise "
            "--max-document"
        )


def _make_writable(out: Path) -> bool:
    """Make the folder and try to write there; returns whether it was there before."""
    try:
        existed = out.exists()
        file = next((path for path in (out, *out.parents) if path.is_file()), None)
        if file is not None:
            raise ValueError(f"--out must be a folder, and {file} is a file")
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return existed
    except OSError as error:
        raise ValueError(f"cannot write into --out {str(out)[:80]}: {error.strerror or error}; name another") from error


def _remove_empty(out: Path) -> None:
    """Remove a folder that was made for a run that wrote nothing."""
    with contextlib.suppress(OSError):
        out.rmdir()


def start(config: TrainConfig, mine: Rank | None) -> int:
    """Run `config` on local ranks, or as the rank `mine` of torchrun. Returns the exit status.

    ``ValueError`` for wrong options, data or checkpoint, or another run in ``--out``; ``RankFailure`` if a rank failed.
    """
    with contextlib.ExitStack() as stack:
        if config.out is not None:
            out = Path(config.out)
            if not _make_writable(out):
                stack.callback(_remove_empty, out)
            if mine is None or mine.rank == 0:
                stack.enter_context(lock(out))
        inputs = check(config, mine.local_size if mine else config.ranks)
        if mine is not None:
            from torch.distributed.elastic.multiprocessing.errors import record

            return record(run_rank)(mine, config, inputs) or 0  # torchrun shows the traceback of the first failure
        _ = inputs.corpus.digest  # read the files once, not on every rank
        return launch(run_rank, config, inputs, ranks=config.ranks, timeout=config.timeout)

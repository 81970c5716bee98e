"""Checkpoints of a run: ``torch.distributed.checkpoint`` folders, written whole or not at all.

    OUT/checkpoints/step-00000030/…     model and optimizer, sharded; any number of ranks reads them
    OUT/checkpoints/step-00000030/run.json   state of the run, read before any process starts
    OUT/checkpoints/step-00000030/manifest.json   size and digest of every file, see `manifest`
    OUT/checkpoints/latest              name of the newest complete checkpoint

A save writes into a temporary folder, the manifest last, renames it, then replaces ``latest``; older checkpoints go
last. At every moment ``latest`` names a complete checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from spanwise.train import manifest
from spanwise.train.config import TrainConfig
from spanwise.train.data import Corpus
from spanwise.train.launch import RunError
from spanwise.train.metrics import write_json
from spanwise.train.model import ModelConfig

_FORMAT = 2


@dataclass(frozen=True)
class RunState:
    """State of a run. A run that resumes it must share the model, the data and the stream.

    Attributes:
        position: tokens of the training stream so far.
    """

    step: int
    position: int
    model: dict[str, Any]
    dtype: str
    seed: int
    held_out: float
    batch_size: int
    max_document: int
    data_digest: str
    data_text: str
    global_batch: bool = False
    format: int = _FORMAT


def checkpoints(out: str | Path) -> Path:
    """Folder of the checkpoints of a run."""
    return Path(out, "checkpoints")


class Found(NamedTuple):
    """A checkpoint whose files are as they were written.

    Attributes:
        skipped: damaged ones that were passed over, in words; empty if it is the newest.
    """

    path: Path
    state: RunState
    skipped: str = ""


def latest(out: str | Path) -> Found:
    """The checkpoint that ``latest`` names or, if that one is damaged, the newest good one before it.

    Compares the digests of all its files; ``ValueError`` if none is good.
    """
    folder = checkpoints(out)
    bad: list[str] = []
    before = None
    try:
        before = (folder / "latest").read_text().strip()
        if (folder / before).parent != folder:
            raise ValueError("it names no checkpoint")
    except (OSError, ValueError) as error:
        bad.append(f"{folder / 'latest'} cannot be read ({error})")
        before = None
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("step-*"), reverse=True):
            if before is None or path.name <= before:
                try:
                    return Found(path, _read(path), "; ".join(bad))
                except (OSError, ValueError) as error:
                    bad.append(f"{path.name}: {error}")
    if not any(folder.glob("step-*")):
        raise ValueError(f"no checkpoint in {folder}; start the run without --resume, or name its folder with --out")
    raise ValueError(f"no checkpoint in {folder} can be read: {'; '.join(bad)}. Start without --resume")


def _read(path: Path) -> RunState:
    """The state in a checkpoint whose files are as written; ``OSError`` or ``ValueError`` if one is not."""
    manifest.check(path)
    facts = json.loads((path / "run.json").read_text())
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else type(facts).__name__
        raise ValueError(f"format {found}, this version reads {_FORMAT}")
    try:
        state = RunState(**facts)
    except TypeError as error:
        raise ValueError(f"run.json: {error}") from error
    if not isinstance(state.model, dict) or not all(isinstance(n, int) for n in (state.step, state.position)):
        raise ValueError("run.json holds no step, position and model")
    return state


def check_same_run(state: RunState, config: TrainConfig, corpus: Corpus, path: Path) -> None:
    """Raise ``ValueError`` for a checkpoint of another model, data set or stream, with each field that differs."""
    wanted = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(ModelConfig)}
    different = [
        f"{name} is {state.model.get(name)!r} in the checkpoint and {wanted.get(name)!r} here"
        for name in sorted(wanted.keys() | state.model.keys())
        if state.model.get(name) != wanted.get(name)
    ]
    if different:
        raise ValueError(
            f"{path} is a checkpoint of another model: {'; '.join(different)}. Give the same sizes, or another --out"
        )
    for name in ("dtype", "seed", "held_out", "max_document", "global_batch"):
        if getattr(config, name) not in (None, getattr(state, name)):
            different.append(f"{name} is {getattr(state, name)!r} in the checkpoint and {getattr(config, name)!r} here")
    if state.data_digest != corpus.digest:
        here = corpus.describe() if corpus.describe() != state.data_text else "other contents"
        different.append(f"the data are {state.data_text} in the checkpoint and {here} here")
    if different:
        raise ValueError(
            f"{path} cannot be continued, the stream of documents would not go on where it stopped: "
            f"{'; '.join(different)}. Give what the run was started with, or another --out"
        )


def set_aside(out: str | Path) -> Path | None:
    """Move the files of an earlier run to a new folder ``out/previous/N``, and return that; None without files."""
    found = [path for path in (checkpoints(out), Path(out, "metrics.json")) if path.exists()]
    if not found:
        return None
    number = 1
    while (target := Path(out, "previous", str(number))).exists():
        number += 1
    target.mkdir(parents=True)
    for path in found:
        path.rename(target / path.name)
    return target


def save(out: str | Path, state: RunState, model: Any, optimizer: Any, *, keep: int) -> Path:
    """Write a checkpoint and return its folder. A collective call; all ranks need the same file system.

    ``RunError`` if a file cannot be written; earlier checkpoints are as they were.
    """
    import torch.distributed.checkpoint as dcp

    from spanwise.train.writing import os_error

    folder = checkpoints(out)
    path = folder / f"step-{state.step:08d}"
    temporary = folder / f".{path.name}.partial"
    try:
        _write(temporary, state, model, optimizer)
        if dist.get_rank() == 0:
            _publish(temporary, path, keep)
        dist.barrier()
    except (OSError, RuntimeError, dcp.CheckpointException) as error:  # the latter is no Exception
        if (cause := os_error(error)) is None:
            raise
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        rest = "There is no earlier one: make room and start the run again"
        if any(folder.glob("step-*")):
            rest = "Earlier checkpoints are as they were: make room and go on with --resume"
        raise RunError(f"step {state.step} cannot be saved in {folder}: {cause.strerror or cause}. {rest}") from error
    return path


def _write(temporary: Path, state: RunState, model: Any, optimizer: Any) -> None:
    """Write all files of a checkpoint into a folder; the manifest comes last."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from spanwise.train.writing import Writer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=Writer(temporary))
    if rank == 0:
        write_json(temporary / "run.json", dataclasses.asdict(state))
    dist.barrier()
    described: list[dict[str, Any]] = [{} for _ in range(ranks)]
    mine = {name: manifest.describe(temporary / name) for name in manifest.names(temporary)[rank::ranks]}
    dist.all_gather_object(described, mine)
    if rank == 0:
        manifest.write(temporary, {name: entry for files in described for name, entry in files.items()})


def _publish(temporary: Path, path: Path, keep: int) -> None:
    """Give a complete checkpoint its name, point ``latest`` to it, then remove old ones."""
    folder = path.parent
    if path.exists():  # damaged, or of a run that was set back to an earlier step; `latest` names another
        shutil.rmtree(path)
    temporary.rename(path)
    pointer = folder / ".latest.partial"
    pointer.write_text(path.name + "\n")
    os.replace(pointer, folder / "latest")
    for old in [found for found in sorted(folder.glob("step-*")) if found.name <= path.name][:-keep]:
        shutil.rmtree(old)


def load(path: Path, model: Any, optimizer: Any) -> None:
    """Read a checkpoint of any number of ranks into a sharded model and its optimizer. A collective call.

    ``ValueError`` if its tensors are not those of the model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from spanwise.train.safe_read import Planner, Reader

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    try:
        dcp.load(state, storage_reader=Reader(path), planner=Planner())  # fills the sharded tensors
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        raise ValueError(f"the checkpoint {path} cannot be loaded: {str(error).strip().splitlines()[-1]}") from error
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

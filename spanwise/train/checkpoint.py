"""Checkpoints of a run: ``torch.distributed.checkpoint`` folders, written whole or not at all.

    OUT/checkpoints/step-00000030/…     model and optimizer, sharded; any number of ranks reads them
    OUT/checkpoints/step-00000030/run.json   state of the run, read before any process starts
    OUT/checkpoints/latest              name of the newest complete checkpoint

A save writes into a temporary folder, renames it, then replaces ``latest``; older checkpoints go last. At every moment
``latest`` names a complete checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanwise.train.config import TrainConfig
from spanwise.train.data import Corpus
from spanwise.train.metrics import write_json
from spanwise.train.model import ModelConfig

_FORMAT = 1


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
    format: int = _FORMAT


def checkpoints(out: str | Path) -> Path:
    """Folder of the checkpoints of a run."""
    return Path(out, "checkpoints")


def latest(out: str | Path) -> tuple[Path, RunState]:
    """The newest complete checkpoint of a run.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder = checkpoints(out)
    pointer = folder / "latest"
    path = None
    try:
        path = folder / pointer.read_text().strip()
        if path.parent != folder:
            raise ValueError(f"{pointer} names no checkpoint")
        return path, _read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if path is None:
            raise ValueError(
                f"no checkpoint in {folder}; start the run without --resume, or name its folder with --out"
            ) from error
        reason: Exception = error
    except (OSError, ValueError) as error:
        reason = error
    raise ValueError(
        f"the checkpoint {path or pointer} cannot be read ({reason}); complete ones there: "
        f"{', '.join(_complete(folder)) or 'none'}. To go on from one of them write its name into {pointer}"
    ) from reason


def _complete(folder: Path) -> list[str]:
    names = []
    with contextlib.suppress(OSError):  # the folder itself may be unreadable
        for path in sorted(folder.glob("step-*")):
            with contextlib.suppress(OSError, ValueError):
                _read(path)
                names.append(path.name)
    return names


def _read(path: Path) -> RunState:
    """The state in a checkpoint, whose files must have the sizes in its index.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged, or `save` did not write it.
    """
    from torch.distributed.checkpoint import FileSystemReader

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
    (path / ".metadata").stat()
    try:
        index = FileSystemReader(path).read_metadata().storage_data
        sizes: dict[str, int] = {}
        for entry in index.values():
            sizes[entry.relative_path] = max(sizes.get(entry.relative_path, 0), entry.offset + entry.length)
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f".metadata is damaged: {type(error).__name__}: {error}") from error
    for name, size in sizes.items():
        if (found := (path / name).stat().st_size) < size:
            raise ValueError(f"{name} is damaged: {found:,} bytes of {size:,}")
    return state


def check_same_run(state: RunState, config: TrainConfig, corpus: Corpus, path: Path) -> None:
    """Refuse a checkpoint of another model, data set or stream.

    Raises:
        ValueError: fields differ; the text names each with both values.
    """
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
    for name in ("dtype", "seed", "held_out", "max_document"):
        if getattr(config, name) not in (None, getattr(state, name)):
            different.append(f"{name} is {getattr(state, name)!r} in the checkpoint and {getattr(config, name)!r} here")
    if state.data_digest != corpus.digest:
        different.append(f"the data are {state.data_text} in the checkpoint and {corpus.describe()} here")
    if different:
        raise ValueError(
            f"{path} cannot be continued, the stream of documents would not go on where it stopped: "
            f"{'; '.join(different)}. Give what the run was started with, or another --out"
        )


def set_aside(out: str | Path) -> Path | None:
    """Move the files of an earlier run from `out` to ``out/previous/N``.

    Returns:
        The new folder, or None if there was nothing to move.
    """
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
    """Write a checkpoint and return its folder. A collective call; all ranks need the same file system."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    folder = checkpoints(out)
    path = folder / f"step-{state.step:08d}"
    temporary = folder / f".{path.name}.partial"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        write_json(temporary / "run.json", dataclasses.asdict(state))
        if path.exists():  # of a run that was set back to an earlier step; `latest` names another
            shutil.rmtree(path)
        temporary.rename(path)
        pointer = folder / ".latest.partial"
        pointer.write_text(path.name + "\n")
        os.replace(pointer, folder / "latest")
        for old in sorted(folder.glob("step-*"))[:-keep]:
            if old != path:
                shutil.rmtree(old)
    dist.barrier()
    return path


def load(path: Path, model: Any, optimizer: Any) -> None:
    """Read a checkpoint of any number of ranks into a sharded model and its optimizer. A collective call.

    Raises:
        ValueError: its files are damaged.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    try:
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)  # fills the sharded tensors
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        raise ValueError(
            f"the checkpoint {path} is damaged, its tensors cannot be read; others there: "
            f"{', '.join(n for n in _complete(path.parent) if n != path.name) or 'none'}. "
            f"To go on from one of them write its name into {path.parent / 'latest'}"
        ) from error
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

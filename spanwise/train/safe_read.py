"""Reading of ``torch.distributed.checkpoint`` folders without running what is in them.

The index of a checkpoint, ``.metadata``, is a pickle, and so are values that are no tensors. Unpickled as they come,
they could run any code. Here the index may name only the classes that an index consists of, and values only what
``torch.load(weights_only=True)`` accepts.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, metadata, planner

#: What an index may name, and the one function that it calls for a layout.
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip


class DamagedIndexError(BaseException):
    """Why an index cannot be read. torch 2.11 drops an ``Exception`` there, and says only that there is no index."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")


class Reader(FileSystemReader):
    """Reads an index that names only the classes that an index consists of."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        try:
            with open(Path(self.path) / ".metadata", "rb") as file:
                found = _Unpickler(file).load()
        except Exception as error:
            raise DamagedIndexError(str(error)) from error
        if not isinstance(found, metadata.Metadata):
            raise DamagedIndexError(f".metadata holds a {type(found).__name__}")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Planner(DefaultLoadPlanner):
    """Fills tensors; other values may be numbers, texts and containers."""

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)

"""Documents from files, and their packing into sequences.

Every file is one document: BOS, its bytes, EOS. A stream lays the documents end to end, in a new order each epoch. A
sequence is any interval of that stream: documents that the interval cuts become shorter documents, as do documents
above a length limit; no token is dropped or repeated. The only state of a stream is a position (tokens since the start
of training). Resuming is arithmetic, and the order does not depend on the number of ranks or of sequences a step.

The tail of an epoch continues into the next one, so that training sequences always have their full length. The last
sequence of held-out documents may be shorter.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import spanwise
from spanwise.train.manifest import add_content

BOS, EOS = 256, 257
VOCAB_SIZE = 258

#: Folders of the standard library that hold installed packages, tests, or generated tables (code pages, help texts).
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True, slots=True)
class Document:
    """One regular, non-empty file; `name` is its path below the given folder."""

    path: Path
    name: str
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Its bytes, BOS and EOS."""
        return self.num_bytes + 2

    def __getitem__(self, places: slice) -> np.ndarray:
        """Tokens ``[start:stop]``, as `spanwise.GlobalBatchDataset` asks for them."""
        return self.tokens(places.start, places.stop)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``[start, stop)``, int64; reads only these bytes; ``ValueError`` if the file is gone or shorter."""
        first, last = max(start - 1, 0), min(stop - 1, self.num_bytes)
        out = np.empty(stop - start, dtype=np.int64)
        try:
            data = np.fromfile(self.path, dtype=np.uint8, count=last - first, offset=first) if last > first else ()
        except OSError as error:
            raise ValueError(f"cannot read {self.path}: {error.strerror or error}; restore it and resume") from error
        if len(data) != max(last - first, 0):
            raise ValueError(
                f"{self.path} had {self.num_bytes} bytes when training started and ends earlier now; "
                "leave data files alone while they are trained on"
            )
        at = 0
        if start == 0:
            out[0], at = BOS, 1
        out[at : at + len(data)] = data
        if stop == self.num_tokens:
            out[-1] = EOS
        return out


@dataclass(frozen=True)
class Corpus:
    """All documents, in an order that depends only on the given paths and the names below them."""

    documents: tuple[Document, ...]
    skipped: int = 0

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(document.num_tokens for document in self.documents)

    @cached_property
    def digest(self) -> str:
        """Hex digest of names, sizes and contents, equal on every host; reads all files, or raises ``ValueError``."""
        found = hashlib.blake2b(digest_size=16)
        for document in self.documents:
            found.update(f"{document.num_bytes} {document.name}\n".encode("utf-8", "surrogateescape"))
            try:
                with open(document.path, "rb") as file:
                    add_content(found, file)
            except OSError as error:
                raise ValueError(
                    f"cannot read {document.path}: {error.strerror or error}; fix it or leave it out of --data"
                ) from error
        return found.hexdigest()

    def describe(self) -> str:
        """Documents and tokens, in words."""
        return f"{len(self.documents)} documents, {self.num_tokens:,} tokens"

    def split(self, held_out: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
        """Training and held-out documents.

        Held out is the share `held_out` of documents whose index hashes lowest: at least one if the share is not 0 and
        there are two documents, never all. Runs that differ by seed are evaluated on the same documents.
        """
        count = len(self.documents)
        wanted = min(max(round(held_out * count), 1), count - 1) if held_out > 0 else 0

        def key(index: int) -> bytes:
            return hashlib.blake2b(str(index).encode(), digest_size=8).digest()

        chosen = set(sorted(range(count), key=key)[:wanted])
        train = tuple(d for i, d in enumerate(self.documents) if i not in chosen)
        return train, tuple(d for i, d in enumerate(self.documents) if i in chosen)


def find_documents(paths: Sequence[str | Path] = (), *, leave_out: str | Path | None = None) -> Corpus:
    """Make each regular file below `paths` a document; without paths, the Python standard library's sources.

    Folders are walked in sorted order, links to folders too. Hidden files, ``__pycache__`` and the folder `leave_out`
    (the output of the run) are left out; a file or folder reached twice counts once. Empty files inside a folder are
    skipped and counted in `skipped`; an empty file in `paths` is an error.

    Raises:
        ValueError: a path does not exist, cannot be read, is empty, is neither file nor folder, or is `leave_out`.
    """
    skipped = 0
    documents: dict[tuple[int, int], Document] = {}
    for path, name, named in _files(paths, leave_out):
        try:
            info = path.stat()
        except OSError as error:
            raise ValueError(
                f"cannot read {path}: {error.strerror or error}; fix it or leave it out of --data"
            ) from error
        if not stat.S_ISREG(info.st_mode):
            if named:
                raise ValueError(f"{path} is neither a file nor a folder; --data takes regular files and folders")
            continue
        if not os.access(path, os.R_OK):
            raise ValueError(f"cannot read {path}: permission denied; make it readable or leave it out of --data")
        if info.st_size == 0:
            if named:
                raise ValueError(f"{path} is empty; a document needs at least one byte: leave it out of --data")
            skipped += 1
            continue
        documents.setdefault((info.st_dev, info.st_ino), Document(path, name, info.st_size))
    if not documents:
        where = ", ".join(str(path) for path in paths)
        raise ValueError(f"no document found in {where}: every file there is empty or hidden; name others with --data")
    return Corpus(tuple(documents.values()), skipped)


def _files(paths: Sequence[str | Path], leave_out: str | Path | None) -> Iterable[tuple[Path, str, bool]]:
    """(path, name, named by the user) of every candidate, in order."""
    if not paths:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [
            f for f in _walk(root, leave_out) if f.suffix == ".py" and not _NOT_SOURCES & set(f.relative_to(root).parts)
        ]
        if not found:
            raise ValueError(f"this Python has no library sources in {root}; name files or folders with --data")
        yield from ((f, f.relative_to(root).as_posix(), False) for f in found)
        return
    for text in paths:
        given = Path(text)
        try:
            info = given.stat() if text else None  # Path("") is the current folder
        except (FileNotFoundError, NotADirectoryError):
            info = None
        except OSError as error:
            raise ValueError(f"cannot read --data {_short(text)}: {error.strerror or error}; name another") from error
        if info is None:
            raise ValueError(
                f"{str(text) or repr(text)} does not exist; --data takes files and folders (seen from {Path.cwd()})"
            )
        if not stat.S_ISDIR(info.st_mode):
            yield given, given.name, True
            continue
        if leave_out and _identity(leave_out) == _identity(given):
            raise ValueError(
                f"--out {leave_out} is a folder of --data: what the run writes would be data; name another --out"
            )
        files = list(_walk(given, leave_out))
        if not files:
            raise ValueError(f"no file found in the folder {given}; name a folder that holds documents with --data")
        yield from ((f, f.relative_to(given).as_posix(), False) for f in files)


def _short(text: str | Path) -> str:
    return str(text) if len(str(text)) <= 80 else f"{str(text)[:77]}…"


def _identity(path: str | Path) -> tuple[int, int] | None:
    """Device and inode, equal for two names of one file or folder; None if there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _walk(root: Path, leave_out: str | Path | None) -> Iterable[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(
            f"cannot list {error.filename}: {error.strerror}; make it readable or leave it out of --data"
        ) from error

    seen = {_identity(root)}  # a link may lead back up
    if leave_out:
        seen.add(_identity(leave_out))

    def new(folder: str, name: str) -> bool:
        identity = _identity(Path(folder, name))
        known = identity is not None and identity in seen
        seen.add(identity)
        return not known

    for folder, names, files in os.walk(root, onerror=refuse, followlinks=True):
        names[:] = sorted(n for n in names if not n.startswith(".") and n != "__pycache__")
        names[:] = [name for name in names if new(folder, name)]
        for file in sorted(f for f in files if not f.startswith(".")):
            path = Path(folder, file)
            if path.exists() or not path.is_symlink():  # a dangling link is not a file
                yield path


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """``tokens`` int64 ``[length]`` and the documents in it, ``cu_seqlens`` int32 ``[num_docs + 1]``."""

    tokens: np.ndarray
    cu_seqlens: np.ndarray

    @property
    def num_targets(self) -> int:
        return num_targets(self.cu_seqlens)


def num_targets(cu_seqlens: np.ndarray) -> int:
    """Tokens with a next token in the same document; a loss over the sequence is their mean.

    >>> num_targets(np.array([0, 3, 4]))
    2
    """
    lengths = np.diff(cu_seqlens)
    return int((lengths - 1).clip(min=0).sum())


#: Most documents of an epoch, counted after `max_document` cuts long ones: their offsets are kept in memory.
PARTS_LIMIT = 2**25


class DocumentStream:
    """Documents end to end, epoch after epoch, every epoch in another order.

    A document of more than `max_document` tokens becomes several of nearly equal lengths, shuffled separately.
    Otherwise one huge file would fill many consecutive steps.

    Args:
        documents: at least one.
        seed: of the order of each epoch.
        max_document: tokens.

    Raises:
        ValueError: no document, a limit below 1, or an epoch of more than `PARTS_LIMIT` documents.
    """

    def __init__(self, documents: Sequence[Document], seed: int, max_document: int):
        if not documents:
            raise ValueError("a stream needs at least one document; got none")
        if max_document < 1:
            raise ValueError(f"max_document must be at least 1, got {max_document}")
        self.documents = tuple(documents)
        self.seed = seed
        tokens = np.array([document.num_tokens for document in documents], dtype=np.int64)
        self.epoch_tokens = int(tokens.sum())
        parts = -(-tokens // min(max_document, 2**62))
        self.num_parts = sum(parts.tolist())
        if self.num_parts > PARTS_LIMIT:
            raise ValueError(
                f"{len(tokens):,} documents, {self.epoch_tokens:,} tokens, are {self.num_parts:,} of at most "
                f"{max_document:,} tokens; at most {PARTS_LIMIT:,} can be shuffled: raise --max-document (or "
                "--seq-len, its default), or leave the largest files out of --data"
            )
        self.order = spanwise.DocumentOrder(tokens, seed, max_document)

    def pieces(self, position: int, length: int) -> list[tuple[int, int, int]]:
        """(document, start, stop) of each document in ``[position, position + length)`` of the stream."""
        return [(document, start, stop) for document, start, stop in self.order.pieces(position, length).tolist()]

    def cu_seqlens(self, position: int, length: int) -> np.ndarray:
        """int32 ``[num_docs + 1]`` of a sequence, without reading any file."""
        lengths = [stop - start for _, start, stop in self.pieces(position, length)]
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)

    def sequence(self, position: int, length: int) -> PackedSequence:
        """The `length` tokens from `position` on."""
        tokens = [self.documents[index].tokens(start, stop) for index, start, stop in self.pieces(position, length)]
        return PackedSequence(np.concatenate(tokens), self.cu_seqlens(position, length))

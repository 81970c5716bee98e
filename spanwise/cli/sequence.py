"""The sequence that ``spanwise plan`` plans: document lengths of a file, of data files, or one length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import spanwise
from spanwise.cli.lengths import read_lengths
from spanwise.cli.report.plan_figures import Source

#: Most tokens of a sequence: a plan keeps a few arrays of one entry a token.
SEQ_LIMIT = 2**26


def choose_sequence(
    documents: str | None = None,
    column: str | None = None,
    data: Sequence[str] = (),
    seq_len: int | None = None,
    sequence: int = 0,
) -> tuple[np.ndarray, Source]:
    """Document offsets int64 ``[num_docs + 1]`` of one sequence, and its source.

    Args:
        documents: file of document lengths; see `spanwise.cli.lengths.read_lengths`.
        column: its key or column.
        data: files and folders, every file one document of its bytes and two marks.
        seq_len: tokens of a sequence. Documents are laid end to end and cut there; without documents, one document of
            that length.
        sequence: which of the sequences, from 0.

    Raises:
        ValueError: the arguments contradict one another, name no sequence, or a file is wrong.
    """
    if seq_len is not None and not 1 <= seq_len <= SEQ_LIMIT:
        raise ValueError(f"--seq-len must be between 1 and {SEQ_LIMIT:,} tokens, got {seq_len:,}")
    if documents is not None and data:
        raise ValueError("--documents and --data both say which documents there are; give one of them")
    if column is not None and documents is None:
        raise ValueError(f"--column {column} names a part of a --documents file; there is none")
    if documents is not None:
        cu_seqlens, source = _of_lengths(documents, column, seq_len, sequence)
    elif data:
        cu_seqlens, source = _of_data(data, seq_len, sequence)
    elif seq_len is not None:
        _check_index(sequence, 1, "--seq-len without documents")
        cu_seqlens = np.array([0, seq_len])
        source = Source("--seq-len", "one document that fills the sequence", sequence, 1)
    else:
        raise ValueError(
            "nothing to plan: name document lengths with --documents, files with --data, or give --seq-len"
        )
    tokens = int(cu_seqlens[-1])
    if tokens > SEQ_LIMIT:
        raise ValueError(
            f"a sequence of {tokens:,} tokens is more than one plan takes ({SEQ_LIMIT:,}); cut it with --seq-len"
        )
    return cu_seqlens.astype(np.int64), source


def _of_lengths(path: str, column: str | None, seq_len: int | None, index: int) -> tuple[np.ndarray, Source]:
    rows = read_lengths(path, column)
    if seq_len is None:
        _check_index(index, len(rows), path)
        return _offsets(rows[index]), Source(path, "the documents in the order of the file", index, len(rows))
    if len(rows) > 1:
        raise ValueError(
            f"{path} holds {len(rows)} sequences that are packed already, and --seq-len would pack them again; "
            f"leave --seq-len out and choose one with --sequence, or write one list of lengths"
        )
    offsets = _offsets(rows[0])
    count = -(-int(offsets[-1]) // seq_len)
    _check_index(index, count, f"{path} with --seq-len {seq_len}")
    begin = index * seq_len
    end = min(begin + seq_len, int(offsets[-1]))
    inside = offsets[(offsets > begin) & (offsets < end)]
    how = f"documents in the order of the file, laid end to end and cut every {seq_len:,} tokens"
    return np.unique(np.concatenate(([begin, end], inside))) - begin, Source(path, how, index, count)


def _of_data(paths: Sequence[str], seq_len: int | None, index: int) -> tuple[np.ndarray, Source]:
    lengths = document_lengths(paths)
    origin = f"{', '.join(paths)}: {len(lengths)} documents, {sum(lengths):,} tokens"
    if seq_len is None:
        _check_index(index, 1, "--data without --seq-len")
        how = "every file one document, in the order of their names"
        return _offsets(np.array(lengths)), Source(origin, how, index, 1)
    count = -(-sum(lengths) // seq_len)
    _check_index(index, count, f"an epoch of --seq-len {seq_len}")
    pieces = spanwise.DocumentOrder(lengths, seed=0, max_document=seq_len).pieces(index * seq_len, seq_len)
    how = f"every file one document, shuffled (seed 0), laid end to end and cut every {seq_len:,} tokens"
    return _offsets(pieces[:, 2] - pieces[:, 1]), Source(origin, how, index, count)


def document_lengths(paths: Sequence[str]) -> list[int]:
    """Tokens of each file that is not empty: its bytes, and a mark at each end. Hidden files of folders are left out.

    Raises:
        ValueError: a path is no file or folder, cannot be read, or holds no document.
    """
    lengths = []
    for text in paths:
        path = Path(text)
        if not text or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{text!r} is no file or folder; --data takes files and folders (seen from {Path.cwd()})")
        inside = [path] if path.is_file() else sorted(path.rglob("*"))
        files = [f for f in inside if f.is_file() and (f == path or not _hidden(f.relative_to(path)))]
        found = [size + 2 for file in files if (size := file.stat().st_size)]
        if not found:
            raise ValueError(f"no document in {path}: no file there holds a byte; name others with --data")
        lengths += found
    return lengths


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def _check_index(index: int, count: int, where: str) -> None:
    if not 0 <= index < count:
        raise ValueError(f"--sequence {index} does not exist: {where} gives {count:,}, counted from 0")

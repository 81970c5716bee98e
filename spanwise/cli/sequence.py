"""The sequence that ``spanwise plan`` plans: document lengths of a file, of data files, or one length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import spanwise
from spanwise.cli.lengths import read_lengths
from spanwise.cli.options import PlanOptions

#: Most tokens of a sequence: a plan keeps a few arrays of one entry a token.
SEQ_LIMIT = 2**26


def choose_sequence(options: PlanOptions) -> tuple[np.ndarray, str]:
    """Document offsets int64 ``[num_docs + 1]`` of one sequence, and its source in words.

    Raises:
        ValueError: the options contradict one another, name no sequence, or a file is wrong.
    """
    documents, data, seq_len = options.documents, options.data, options.seq_len
    take: Callable[[int], np.ndarray]
    if seq_len is not None and not 1 <= seq_len <= SEQ_LIMIT:
        raise ValueError(f"--seq-len must be between 1 and {SEQ_LIMIT:,} tokens, got {seq_len:,}")
    if documents is not None and data:
        raise ValueError("--documents and --data both say which documents there are; give one of them")
    if options.column is not None and documents is None:
        raise ValueError(f"--column {options.column} names a part of a --documents file; there is none")
    if documents is not None:
        rows, packing = _of_lengths(read_lengths(documents, options.column), seq_len, documents)
        count, take, where = len(rows), rows.__getitem__, documents
    elif data:
        lengths = document_lengths(data)
        count, take, packing = _of_data(lengths, seq_len)
        where = f"{', '.join(data)}: {len(lengths)} documents, {sum(lengths):,} tokens"
    elif seq_len is not None:
        count, take, where = 1, [np.array([seq_len])].__getitem__, "--seq-len"
        packing = "one document that fills the sequence"
    else:
        raise ValueError(
            "nothing to plan: name document lengths with --documents, files with --data, or give --seq-len"
        )
    if not 0 <= options.sequence < count:
        raise ValueError(f"--sequence {options.sequence} does not exist: {where} gives {count:,}, counted from 0")
    cu_seqlens = np.append(0, np.cumsum(take(options.sequence))).astype(np.int64)
    if cu_seqlens[-1] > SEQ_LIMIT:
        raise ValueError(
            f"a sequence of {cu_seqlens[-1]:,} tokens is more than one plan takes ({SEQ_LIMIT:,}); cut it with "
            f"--seq-len"
        )
    which = f"sequence {options.sequence} of {count:,}, counted from 0; " if count > 1 else ""
    return cu_seqlens, f"{where}: {which}{packing}"


def _of_lengths(rows: list[np.ndarray], seq_len: int | None, path: str) -> tuple[Sequence[np.ndarray], str]:
    if seq_len is None:
        return rows, "the documents in the order of the file"
    if len(rows) > 1:
        raise ValueError(
            f"{path} holds {len(rows)} sequences that are packed already, and --seq-len would pack them again; "
            f"leave --seq-len out and choose one with --sequence, or write one list of lengths"
        )
    ends = np.cumsum(rows[0])
    cuts = np.arange(seq_len, ends[-1], seq_len)
    edges = np.unique(np.concatenate(([0], ends, cuts)))
    packed = np.split(np.diff(edges), np.searchsorted(edges, cuts))
    return packed, f"documents in the order of the file, laid end to end and cut every {seq_len:,} tokens"


def _of_data(lengths: list[int], seq_len: int | None) -> tuple[int, Callable[[int], np.ndarray], str]:
    if seq_len is None:
        return 1, [np.array(lengths)].__getitem__, "every file one document, in the order of their names"
    order = spanwise.DocumentOrder(lengths, seed=0, max_document=seq_len)

    def take(index: int) -> np.ndarray:
        pieces = order.pieces(index * seq_len, seq_len)
        return pieces[:, 2] - pieces[:, 1]

    how = f"every file one document, shuffled (seed 0), laid end to end and cut every {seq_len:,} tokens"
    return -(-sum(lengths) // seq_len), take, how


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

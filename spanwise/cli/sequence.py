"""The sequence that ``spanwise plan`` plans: document lengths of a file, of data files, or one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanwise.cli.lengths import read_lengths
from spanwise.cli.report.plan_figures import Source
from spanwise.train.config import SEQ_LIMIT
from spanwise.train.data import DocumentStream, find_documents


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
        data: files and folders, every file one document, packed as in ``spanwise train``.
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
    corpus = find_documents(paths)
    origin = f"{', '.join(paths)}: {corpus.describe()}"
    if seq_len is None:
        _check_index(index, 1, "--data without --seq-len")
        lengths = np.array([document.num_tokens for document in corpus.documents], dtype=np.int64)
        return _offsets(lengths), Source(origin, "every file one document, in the order of their names", index, 1)
    stream = DocumentStream(corpus.documents, 0, seq_len)
    count = -(-stream.epoch_tokens // seq_len)
    _check_index(index, count, f"an epoch of --seq-len {seq_len}")
    how = f"every file one document, shuffled (seed 0), cut every {seq_len:,} tokens: train --held-out 0"
    return stream.cu_seqlens(index * seq_len, seq_len), Source(origin, how, index, count)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def _check_index(index: int, count: int, where: str) -> None:
    if not 0 <= index < count:
        raise ValueError(f"--sequence {index} does not exist: {where} gives {count:,}, counted from 0")

"""Documents and their packing: nothing lost, nothing repeated, boundaries exact, order a function of the seed alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.train.data import BOS, EOS, Corpus, Document, DocumentStream, find_documents, num_targets


class MemoryDocument(Document):
    """A document without a file: its bytes are its index."""

    def tokens(self, start: int, stop: int) -> np.ndarray:
        return np.array([BOS, *[int(self.name)] * self.num_bytes, EOS])[start:stop]


def memory_documents(sizes: list[int]) -> list[Document]:
    return [MemoryDocument(Path(str(i)), str(i), size) for i, size in enumerate(sizes)]


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(sizes, st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(0, 3), st.integers(1, 50))
def test_sequences_of_any_lengths_tile_the_stream(
    sizes: list[int], lengths: list[int], seed: int, max_document: int
) -> None:
    stream = DocumentStream(memory_documents(sizes), seed, max_document)
    epochs = sum(lengths) // stream.epoch_tokens + 1
    whole = stream.sequence(0, epochs * stream.epoch_tokens)

    at = 0
    for length in lengths:
        sequence = stream.sequence(at, length)
        np.testing.assert_array_equal(sequence.tokens, whole.tokens[at : at + length])
        # Its documents are those of the stream, cut where the sequence begins and ends.
        bounds = whole.cu_seqlens
        expected = sorted({at, at + length} | {int(b) for b in bounds if at < b < at + length})
        np.testing.assert_array_equal(sequence.cu_seqlens, np.array(expected) - at)
        assert sequence.cu_seqlens.dtype == np.int32
        at += length


@given(sizes, st.integers(0, 5), st.integers(1, 50))
def test_every_epoch_holds_every_token_of_every_document_once(sizes: list[int], seed: int, max_document: int) -> None:
    stream = DocumentStream(memory_documents(sizes), seed, max_document)
    for epoch in range(3):
        pieces = sorted(stream.pieces(epoch * stream.epoch_tokens, stream.epoch_tokens))
        for document, size in enumerate(sizes):
            bounds = [(start, stop) for index, start, stop in pieces if index == document]
            assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
            assert bounds[-1][1] == size + 2
            lengths = [stop - start for start, stop in bounds]
            assert max(lengths) <= max_document and max(lengths) - min(lengths) <= 1
            assert len(lengths) == -(-(size + 2) // max_document)


def test_whole_documents_keep_their_marks() -> None:
    sizes = [3, 1, 9]
    tokens = DocumentStream(memory_documents(sizes), 0, 11).sequence(0, 19)
    parts = np.split(tokens.tokens, tokens.cu_seqlens[1:-1])
    assert sorted(part.tolist() for part in parts) == [[BOS, *[i] * n, EOS] for i, n in enumerate(sizes)]


def test_seed_and_epoch_change_the_order() -> None:
    documents = memory_documents([1] * 50)

    def order(seed: int, epoch: int) -> list[int]:
        return [p[0] for p in DocumentStream(documents, seed, 9).pieces(epoch * 150, 150)]

    assert len({tuple(o) for o in (order(0, 0), order(0, 1), order(1, 0))}) == 3
    # Written down: a resumed run finds its place with any release of numpy.
    assert order(0, 0)[:6] == [18, 4, 31, 39, 42, 8]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_targets_are_tokens_with_a_successor_in_their_document(lengths: list[int]) -> None:
    assert num_targets(np.cumsum([0, *lengths])) == sum(n - 1 for n in lengths)


@given(sizes, st.floats(0, 0.99))
def test_held_out_documents_are_a_share_and_never_all(sizes: list[int], share: float) -> None:
    corpus = Corpus(tuple(memory_documents(sizes)))
    train, held_out = corpus.split(share)
    assert sorted((*train, *held_out), key=lambda d: int(d.name)) == list(corpus.documents)
    assert len(train) >= 1
    assert len(held_out) == (0 if share == 0 else min(max(round(share * len(sizes)), 1), len(sizes) - 1))


@settings(max_examples=30)
@given(content=st.binary(min_size=1, max_size=30), data=st.data())
def test_any_part_of_a_file_is_read_exactly(tmp_path_factory: pytest.TempPathFactory, content: bytes, data) -> None:
    path = tmp_path_factory.mktemp("part") / "file"
    path.write_bytes(content)
    (document,) = find_documents([path]).documents
    expected = [BOS, *content, EOS]
    start = data.draw(st.integers(0, len(expected) - 1))
    stop = data.draw(st.integers(start + 1, len(expected)))
    assert document.tokens(start, stop).tolist() == expected[start:stop]


def test_folders_are_walked_in_order_without_hidden_and_cached_files(tmp_path: Path) -> None:
    for name in ("b/z", "b/a", "a", ".git/x", "b/.hidden", "b/__pycache__/y", "c", "empty"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if name == "empty" else name)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    corpus = find_documents([tmp_path, tmp_path / "a"])  # `a` twice, one document
    assert [d.name for d in corpus.documents] == ["a", "c", "b/a", "b/z"]
    assert corpus.skipped == 1
    digest = corpus.digest
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert find_documents([moved]).digest == digest
    (moved / "c").write_text("d")  # as long as before
    assert find_documents([moved]).digest != digest


def test_what_a_run_writes_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    out = tmp_path / "runs" / "one"
    before = find_documents([tmp_path], leave_out=out).digest
    out.mkdir(parents=True)
    (out / "metrics.json").write_text("{}")
    after = find_documents([tmp_path], leave_out=f"{out}/../one")
    assert [d.name for d in after.documents] == ["text"]
    assert after.digest == before
    with pytest.raises(ValueError, match="is a folder of --data"):
        find_documents([tmp_path / "runs"], leave_out=tmp_path / "runs")


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    for name in ("data/a", "elsewhere/b", "elsewhere/deep/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "twice").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "deep" / "up").symlink_to(tmp_path / "data")
    (tmp_path / "elsewhere" / "itself").symlink_to(tmp_path / "elsewhere" / "itself")
    assert [d.name for d in find_documents([tmp_path / "data"]).documents] == ["a", "link/b", "link/deep/c"]


def test_default_is_the_standard_library() -> None:
    corpus = find_documents()
    names = {d.name for d in corpus.documents}
    assert {"os.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or "/test/" in name for name in names)


def test_bad_paths_are_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist; --data takes"):
        find_documents([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"no file found in the folder .*; name a folder"):
        find_documents([tmp_path])
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty is empty; .* leave it out of --data"):
        find_documents([tmp_path / "empty"])
    with pytest.raises(ValueError, match=r"no document found in .* every file there is empty"):
        find_documents([tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe is neither a file nor a folder"):
        find_documents([tmp_path / "pipe"])
    with pytest.raises(ValueError, match="at least one document"):
        DocumentStream([], 0, 1)
    with pytest.raises(ValueError, match="max_document must be at least 1, got 0"):
        DocumentStream(memory_documents([1]), 0, 0)


def test_parts_of_a_huge_document_are_exact() -> None:
    size = 2**50  # times the number of parts it would pass 64 bits
    stream = DocumentStream([Document(Path("huge"), "huge", size - 2)], 0, 2**36)
    parts = sorted((start, stop) for _, start, stop in stream.pieces(0, size))
    assert len(parts) == 2**14
    assert all(stop - start == 2**36 for start, stop in parts)
    assert parts[-1][1] == size


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("x")
    monkeypatch.setattr(os, "access", lambda *_: False)  # permission bits do not stop root
    with pytest.raises(ValueError, match=r"cannot read .*secret: permission denied; make it readable"):
        find_documents([tmp_path])


def test_file_that_shrank_or_vanished_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("0123456789")
    (document,) = find_documents([file]).documents
    file.write_text("012")
    with pytest.raises(ValueError, match=r"file had 10 bytes when training started"):
        document.tokens(0, 12)
    file.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*file: No such file.* restore it and resume"):
        document.tokens(0, 12)

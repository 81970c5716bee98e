"""Global batches: every token once, labels at every end, nothing read that a rank does not hold, resumed anywhere."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, IterableDataset

import spanwise
from spanwise import DocumentOrder, GlobalBatch, GlobalBatchDataset, GlobalBatches, GlobalBatchStream
from tests.scripts import forked

PLAN: dict[str, Any] = {"block_size": 4, "exchange": "needed", "stages": 1}


class Source:
    """Documents whose tokens tell where they are: ``1000 * document + place``. Notes what is read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.reads = lengths, []

    def __getitem__(self, document: int) -> Any:
        def read(places: slice) -> np.ndarray:
            self.reads.append((document, places.start, places.stop))
            return 1000 * document + np.arange(self.lengths[document])[places]

        return type("Lazy", (), {"__getitem__": lambda _, places: read(places)})()


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)
options = st.fixed_dictionaries(
    {
        "seed": st.sampled_from([None, 0, 7]),
        "max_document": st.sampled_from([None, 5, 30]),
        "cut": st.booleans(),
        "pad": st.booleans(),
        "epochs": st.integers(1, 2),
        "balancer": st.sampled_from(["head_tail", "lpt", "local", "per_document_head_tail"]),
    }
)


def made(lengths: list[int], ranks: int, tokens: int, **options: Any) -> GlobalBatches | None:
    try:
        return GlobalBatches(lengths, ranks, tokens, **PLAN | options)
    except ValueError as error:
        assert "pad=True fills" in str(error) or "a batch at most" in str(error)
        return None


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(1, 4), st.integers(1, 12), options)
def test_ranks_together_read_and_hold_every_token_once(
    lengths: list[int], ranks: int, blocks: int, options: dict[str, Any]
) -> None:
    batches = made(lengths, ranks, 4 * blocks, **options)
    if batches is None:
        return
    held: list[int] = []
    for batch in batches:
        _check_batch(batch, lengths, ranks, held)
        tokens = batch.plan.layout.tokens_per_rank
        assert batch.num_tokens <= batches.batch_tokens and tokens.min() > 0
        if batches.pad:
            assert tokens.tolist() == [4 * blocks] * ranks
        if batches.cut and batch.next_position != batches.end:
            assert batch.num_tokens == batches.batch_tokens
    every = [1000 * d + i for d, n in enumerate(lengths) for i in range(n)] * options["epochs"]
    assert sorted(held) == sorted(every)


def _check_batch(batch: GlobalBatch, lengths: list[int], ranks: int, held: list[int]) -> None:
    """Every rank's tensors, worked out token by token from the pieces; adds the tokens of all ranks to `held`."""
    table = [
        (1000 * d + i, 1000 * d + i + 1 if i + 1 < stop else -100, i - start)
        for d, start, stop in batch.pieces.tolist()
        for i in range(start, stop)
    ]
    table += [(0, -100, 0)] * (batch.plan.seq_len - len(table))
    labels = 0
    for rank in range(ranks):
        source = Source(lengths)
        mine = batch.load(source, rank)
        expected = np.array([table[t] for t in batch.plan.layout.indices(rank)]).reshape(-1, 3).T
        for name, want in zip(("input_ids", "labels", "position_ids"), expected, strict=True):
            assert mine[name].dtype == torch.int64
            np.testing.assert_array_equal(mine[name][0], want)
        assert source.reads == [tuple(row) for row in batch.reads(rank).tolist()]
        read = [1000 * d + i for d, start, stop in source.reads for i in range(start, stop)]
        own = [
            int(t)
            for t, place in zip(expected[0], batch.plan.layout.indices(rank), strict=True)
            if place < batch.num_tokens
        ]
        assert set(own) <= set(read) <= set(own) | set(expected[1].tolist())  # and the labels, no more
        held += own
        labels += int((mine["labels"] != -100).sum())
    assert labels == batch.num_valid


def test_a_batch_is_what_shard_batch_makes_of_whole_tensors() -> None:
    lengths = [70, 3, 200, 1, 90]
    (batch,) = GlobalBatches(lengths, 3, 128, seed=1, balancer="local", **PLAN)
    whole = torch.tensor([1000 * d + i for d, start, stop in batch.pieces.tolist() for i in range(start, stop)])[None]
    for rank in range(3):
        mesh = mock.Mock(ndim=1, shape=(3,), size=lambda: 3, get_local_rank=lambda _, rank=rank: rank)
        expected = spanwise.shard_batch({"input_ids": whole, "labels": whole}, batch.plan, mesh)
        found = batch.load(Source(lengths), rank)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def as_values(batch: dict[str, Any]) -> tuple[Any, ...]:
    tensors = (batch[name].tolist() for name in ("input_ids", "labels", "position_ids"))
    return (*tensors, batch["plan"].fingerprint, batch["num_valid"], tuple(batch["state"].items()))


def dataset(rank: int = 1, **options: Any) -> GlobalBatchDataset:
    lengths = np.random.default_rng(0).integers(0, 60, 40).tolist()
    batches = GlobalBatches(lengths, 2, 64, **PLAN | {"seed": 3, "balancer": "lpt"} | options)
    return GlobalBatchDataset(batches, [1000 * d + np.arange(n) for d, n in enumerate(lengths)], rank)


@pytest.mark.parametrize("cut", [False, True])
def test_resumed_behind_any_batch_it_goes_on_there(cut: bool) -> None:
    whole = [as_values(batch) for batch in dataset(cut=cut)]
    assert len(whole) == len(dataset(cut=cut).batches) > 5
    first = dataset(cut=cut)
    for count, batch in enumerate(first, 1):
        assert first.state_dict() == batch["state"]  # without workers
        resumed = dataset(cut=cut)
        resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        assert [as_values(later) for later in resumed] == whole[count:]
    assert [as_values(batch) for batch in first] == whole  # an iteration begins where the last loaded state says


def worker_batches(data: GlobalBatchDataset | GlobalBatchStream, worker: int, workers: int) -> Any:
    """The iteration of a worker of a loader."""
    info = SimpleNamespace(id=worker, num_workers=workers)
    each = iter(data)
    while True:
        with mock.patch(f"{type(data).__module__}.get_worker_info", return_value=info):
            batch = next(each, None)
        if batch is None:
            return
        yield batch


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_take_turns_and_each_resumes_by_its_own_state(workers: int) -> None:
    whole = [as_values(batch) for batch in dataset()]

    def loader(states: list[dict[str, Any] | None]) -> Any:
        """Batches in the order of a `DataLoader`, and the state of each worker, as torchdata's loader keeps them."""
        copies = [pickle.loads(pickle.dumps(dataset())) for _ in range(workers)]
        for copy, state in zip(copies, states, strict=True):
            if state is not None:
                copy.load_state_dict(state)
        return copies, [worker_batches(copy, index, workers) for index, copy in enumerate(copies)]

    copies, iterators = loader([None] * workers)
    found, states = [], [copy.state_dict() for copy in copies]
    snapshots = []
    for turn in itertools.cycle(range(workers)):
        batch = next(iterators[turn], None)
        if batch is None:
            break
        found.append(as_values(batch))
        states[turn] = copies[turn].state_dict()
        snapshots.append((turn, list(states)))
    assert found == whole
    for count, (turn, states) in enumerate(snapshots, 1):
        iterators, rest = loader(states)[1], []
        for other in itertools.islice(itertools.cycle(range(workers)), turn + 1, None):
            batch = next(iterators[other], None)
            if batch is None:
                break
            rest.append(as_values(batch))
        assert rest == whole[count:]


def test_a_stream_gives_the_batches_of_its_lengths() -> None:
    """In order and whole; resumed behind any batch, by skipping documents or by the stream's own method."""
    lengths = [5, 0, 30, 9, 64, 2, 17, 40, 3]
    documents = [1000 * d + np.arange(n) for d, n in enumerate(lengths)]
    options = {"balancer": "lpt", **PLAN}

    class Skips(list[np.ndarray]):
        def skip(self, n: int) -> list[np.ndarray]:
            return self[n:]

    expected = list(GlobalBatchDataset(GlobalBatches(lengths, 2, 32, **options), documents, 1))
    for stored in (documents, Skips(documents)):
        stream = GlobalBatchStream(stored, 2, 32, 1, **options)
        found = list(stream)
        assert [as_values(batch)[:-1] for batch in found] == [as_values(batch)[:-1] for batch in expected]
        assert [batch["state"]["position"] for batch in found] == [4, 5, 9]
        for count, batch in enumerate(found, 1):
            stream.load_state_dict(batch["state"])
            assert [as_values(later) for later in stream] == [as_values(later) for later in found[count:]]
    turns = [list(worker_batches(GlobalBatchStream(documents, 2, 32, 1, **options), w, 2)) for w in range(2)]
    assert [as_values(batch) for batch in (turns[0][0], turns[1][0], turns[0][1])] == [as_values(x) for x in found]
    assert len(list(GlobalBatchStream(documents, 2, 32, 1, drop_last=True, **options))) == 2
    with pytest.raises(ValueError, match=r"document 4 has 64 tokens, .* at most 60"):
        list(GlobalBatchStream(documents, 2, 30, 1, **options))
    as_rows = GlobalBatchStream([{"input_ids": tokens} for tokens in documents], 2, 32, 1, **options)
    assert [as_values(batch) for batch in as_rows] == [as_values(batch) for batch in found]
    with pytest.raises(ValueError, match="leave cut, seed out"):
        GlobalBatchStream(documents, 2, 32, 1, cut=True, seed=1)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\)"):
        GlobalBatchStream(documents, 2, 32, 2)
    with pytest.raises(ValueError, match="the state is of other batches"):
        GlobalBatchStream(documents, 2, 30, 1).load_state_dict(found[0]["state"])


def test_a_stream_that_workers_would_share_is_refused() -> None:
    """Streams of Hugging Face's datasets give each worker some of the documents: batches would lack the others."""

    class Shares(IterableDataset[list[int]]):
        def __iter__(self) -> Any:
            return iter([[1, 2, 3], [4, 5, 6]])

    stream = GlobalBatchStream(Shares(), 1, 3, 0, **PLAN)
    assert [batch["input_ids"].tolist() for batch in stream] == [[[1, 2, 3]], [[4, 5, 6]]]
    assert len(list(worker_batches(stream, 0, 1))) == 2
    with pytest.raises(ValueError, match="Shares is a torch IterableDataset, .* 2 workers .* use num_workers=1"):
        list(worker_batches(stream, 0, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_a_loader_of_workers_brings_the_same_batches(context: Any, workers: int) -> None:
    context = forked() if context == "fork" else context
    whole = [as_values(batch) for batch in dataset()]
    loader = DataLoader(dataset(), batch_size=None, num_workers=workers, multiprocessing_context=context)
    batches = list(loader)
    assert [as_values(batch) for batch in batches] == whole
    resumed = dataset()
    resumed.load_state_dict(batches[2]["state"])
    loader = DataLoader(resumed, batch_size=None, num_workers=workers, multiprocessing_context=context)
    assert [as_values(batch) for batch in loader] == whole[3:]


def test_only_plans_depend_on_the_number_of_ranks() -> None:
    one, other = (GlobalBatches([50, 20, 90, 40], n, 120 // n, seed=0, **PLAN) for n in (1, 4))
    assert one.config == other.config
    assert [batch.pieces.tolist() for batch in one] == [batch.pieces.tolist() for batch in other]
    for changed in ({"seed": 1}, {"cut": True}, {"max_document": 60}):
        assert GlobalBatches([50, 20, 90, 40], 4, 30, **{"seed": 0} | changed, **PLAN).config != one.config
    data = GlobalBatchDataset(one, [], 0)
    with pytest.raises(ValueError, match="the state is of other batches"):
        data.load_state_dict({"position": 0, "config": "of another run"})


def test_masks_of_the_caller() -> None:
    batches = GlobalBatches([30, 25], 2, 32, mask=windows, weights={"near": 3, "whole": 1}, pad=True, **PLAN)
    (batch,) = batches
    assert batch.plan.weights == {"near": 3, "whole": 1}
    area = batch.plan.mask("near").area()[0]
    assert area[:55].max() == 5 and not area[55:].any() and batch.plan.seq_len == 64
    pickle.loads(pickle.dumps(batches))


def windows(cu_seqlens: np.ndarray) -> dict[str, spanwise.SpanMask]:
    whole = spanwise.SpanMask.documents(cu_seqlens)
    return {"near": spanwise.SpanMask.documents(cu_seqlens, window=(4, 0)), "whole": whole}


def test_the_end_of_the_documents() -> None:
    def sizes(**options: Any) -> list[int]:
        return [batch.num_tokens for batch in GlobalBatches([30, 30, 30, 10], 2, 32, **PLAN | options)]

    assert sizes() == [60, 40]
    assert [batch.num_tokens for batch in GlobalBatches([32, 33], 2, 32, **PLAN)] == [32, 33]
    assert sizes(drop_last=True) == [60]
    assert sizes(cut=True) == [64, 36] and sizes(cut=True, drop_last=True) == [64]
    assert sizes(epochs=2) == [60, 40, 60, 40] and sizes(epochs=2, drop_last=True) == [60, 40, 60]
    endless = iter(GlobalBatches([30, 30, 30, 10], 2, 32, epochs=None, cut=True, **PLAN))
    assert [next(endless).num_tokens for _ in range(7)] == [64] * 7
    with pytest.raises(TypeError, match="no length"):
        len(GlobalBatches([3], 1, 4, epochs=None))
    assert list(loaded(state(19))) == []
    assert GlobalBatches([16, 3], 1, 32, cut=True).at(4).pieces.tolist() == [[0, 4, 16], [1, 0, 3]]
    assert len(GlobalBatches([16, 3], 4, 4, drop_last=True)) == 1


BATCHES = GlobalBatches([16, 3], 1, 32)


def state(position: Any) -> dict[str, Any]:
    return {"position": position, "config": BATCHES.config}


def loaded(state: dict[str, Any]) -> GlobalBatchDataset:
    data = GlobalBatchDataset(BATCHES, [], 0)
    data.load_state_dict(state)
    return data


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: GlobalBatches([3, 65], 2, 32), "a document has 65 tokens, .* at most 64: raise .*max_document=64"),
    (lambda: GlobalBatches([0, 0], 2, 32), "needs a document with a token, got 2 documents, all empty"),
    (lambda: GlobalBatches([16, 3], 4, 4), "has 3 tokens for 4 ranks: pad=True"),
    (lambda: GlobalBatches([16, 3], 4, 32, pad=True), "in blocks of 128, got 32"),
    (lambda: GlobalBatches([2**62] * 5, 1, 32, cut=True), r"lengths must sum to less than 2\*\*63 tokens"),
    (lambda: GlobalBatches([5, 6], 2, 8, hardware="h100"), "hardware must be a spanwise.Hardware, .* got 'h100'"),
    (lambda: GlobalBatches([16, 3], 1, 32, seed=-1), r"seed must be between 0 and 2\*\*64 - 1, or None .* got -1"),
    (lambda: GlobalBatches([16, 3], 1, 32, pad=True, mask=repr, block_size=4).at(), "mask returned"),
    (lambda: BATCHES.at(4), "no batch begins at token 4, inside a document that begins at 0"),
    (lambda: BATCHES.at(19), "no batch begins at token 19; the documents end at 19"),
    (lambda: BATCHES.at().load([np.arange(16), np.arange(2)], 0), r"source\[1\]\[0:3\] has shape \(2,\)"),
    (lambda: BATCHES.at().load([np.zeros(16), np.zeros(3)], 0), r"integers, got float64 from source\[0\]"),
    (lambda: GlobalBatchDataset(BATCHES, [], 1), r"rank must be in \[0, 1\), .*got 1"),
    (lambda: loaded({}), 'a state has "position" and "config", .* got {}'),
    *((lambda n=n: loaded(state(n)), f"an integer, at least 0, got {n!r}") for n in ("4", 4.0, -1)),
    (lambda: loaded(state(20)), "at token 20, and the documents end at 19: raise epochs"),
]
for make in (GlobalBatches, functools.partial(GlobalBatchStream, rank=0)):
    REFUSED += [
        (lambda make=make: make([3], 1.5, 32), r"num_ranks must be a positive integer, got 1\.5"),
        (lambda make=make: make([3], (-2, -2), 32), "each of num_ranks must be a positive integer, got -2"),
        (lambda make=make: make([3], 1, 4.5), r"tokens_per_rank must be an integer, got 4\.5"),
        (lambda make=make: make([3], 1, 32, pad=True, block_size=0), "block_size must be a positive integer, got 0"),
        (lambda make=make: make([3], 1, 32, blocksize=1, cu_seqlens=[0, 3]), "take no blocksize, cu_seqlens; options"),
    ]


@pytest.mark.parametrize(("call", "match"), REFUSED)
def test_refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_an_order_is_written_down() -> None:
    """A resumed run finds its place with any release of numpy."""
    assert DocumentOrder([3] * 50, seed=0).pieces(0, 18)[:, 0].tolist() == [11, 3, 20, 13, 2, 48]
    assert DocumentOrder([3] * 50, seed=0).pieces(150, 18)[:, 0].tolist() == [7, 10, 35, 41, 18, 4]  # another epoch
    assert DocumentOrder([3] * 50).pieces(0, 9)[:, 0].tolist() == [0, 1, 2]

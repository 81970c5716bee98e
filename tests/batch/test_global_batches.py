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
from spanwise import GlobalBatchDataset, GlobalBatches, GlobalBatchStream
from spanwise.batch.global_batches import DocumentOrder
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
        assert "give pad=True" in str(error) or "a batch at most" in str(error)
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
        layout = batch.plan.layout
        assert batch.num_tokens <= batches.batch_tokens and layout.tokens_per_rank.min() > 0
        if batches.pad:
            assert layout.tokens_per_rank.tolist() == [4 * blocks] * ranks
        if batches.cut and batch.next_position != batches.end:
            assert batch.num_tokens == batches.batch_tokens
        table = [  # of each token, worked out from the pieces
            (1000 * d + i, 1000 * d + i + 1 if i + 1 < stop else -100, i - start)
            for d, start, stop in batch.pieces.tolist()
            for i in range(start, stop)
        ]
        table += [(0, -100, 0)] * (batch.plan.seq_len - len(table))
        labels = 0
        for rank in range(ranks):
            source, places = Source(lengths), layout.indices(rank)
            mine = batch.load(source, rank)
            expected = np.array([table[t] for t in places]).reshape(-1, 3).T
            for name, want in zip(("input_ids", "labels", "position_ids"), expected, strict=True):
                assert mine[name].dtype == torch.int64
                np.testing.assert_array_equal(mine[name][0], want)
            assert source.reads == [tuple(row) for row in batch.reads(rank).tolist()]
            read = [1000 * d + i for d, start, stop in source.reads for i in range(start, stop)]
            own = expected[0][places < batch.num_tokens].tolist()
            assert set(own) <= set(read) <= set(own) | set(expected[1].tolist())  # and the labels, no more
            held += own
            labels += int((mine["labels"] != -100).sum())
        assert labels == batch.num_valid
    every = [1000 * d + i for d, n in enumerate(lengths) for i in range(n)] * options["epochs"]
    assert sorted(held) == sorted(every)


def as_values(batch: dict[str, Any]) -> tuple[Any, ...]:
    tensors = (batch[name].tolist() for name in ("input_ids", "labels", "position_ids"))
    return (*tensors, batch["plan"].fingerprint, batch["num_valid"], tuple(batch["state"].items()))


def dataset(rank: int = 1, **options: Any) -> GlobalBatchDataset:
    lengths = np.random.default_rng(0).integers(0, 60, 40).tolist()
    batches = GlobalBatches(lengths, 2, 64, **PLAN | {"seed": 3, "balancer": "lpt"} | options)
    return GlobalBatchDataset(batches, [1000 * d + np.arange(n) for d, n in enumerate(lengths)], rank)


def worker_batches(data: GlobalBatchDataset | GlobalBatchStream, worker: int, workers: int) -> Any:
    """The iteration of a worker of a loader; of no loader if there are none."""
    info = SimpleNamespace(id=worker, num_workers=workers) if workers else None
    each = iter(data)
    while True:
        with mock.patch(f"{type(data).__module__}.get_worker_info", return_value=info):
            batch = next(each, None)
        if batch is None:
            return
        yield batch


@pytest.mark.parametrize(("workers", "cut"), [(0, False), (0, True), (1, False), (3, True)])
def test_resumed_behind_any_batch_it_goes_on_there(workers: int, cut: bool) -> None:
    """Workers take turns, as in a `DataLoader`; each resumes by its own state, which torchdata's loader keeps."""
    data = dataset(cut=cut)
    whole = [as_values(batch) for batch in data]
    assert len(whole) == len(data.batches) > 5
    assert [as_values(batch) for batch in data] == whole  # an iteration begins where the last loaded state says

    def batches(states: list[Any], first: int = 0) -> Any:
        """Each batch, beginning with that of worker `first`, and the states of the workers after it."""
        copies = [pickle.loads(pickle.dumps(dataset(cut=cut))) for _ in states]
        for copy, state in zip(copies, states, strict=True):
            copy.load_state_dict(pickle.loads(pickle.dumps(state)))
        each = [worker_batches(copy, index, workers) for index, copy in enumerate(copies)]
        for turn in itertools.islice(itertools.cycle(range(len(states))), first, None):
            if (batch := next(each[turn], None)) is None:
                return
            states = [*states[:turn], copies[turn].state_dict(), *states[turn + 1 :]]
            assert workers or states == [batch["state"]]
            yield as_values(batch), turn, states

    found = list(batches([dataset(cut=cut).state_dict()] * max(workers, 1)))
    assert [batch for batch, *_ in found] == whole
    for count, (_, turn, states) in enumerate(found, 1):
        assert [batch for batch, *_ in batches(states, turn + 1)] == whole[count:]


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
    as_rows = GlobalBatchStream([{"input_ids": tokens} for tokens in documents], 2, 32, 1, **options)
    assert [as_values(batch) for batch in as_rows] == [as_values(batch) for batch in found]
    for names, call in (
        ("document 4 has 64 tokens, .* 60", lambda: list(GlobalBatchStream(documents, 2, 30, 1, **options))),
        ("cut, seed", lambda: GlobalBatchStream(documents, 2, 32, 1, cut=True, seed=1)),
        (r"rank .*\[0, 2\)", lambda: GlobalBatchStream(documents, 2, 32, 2)),
        ("other batches", lambda: GlobalBatchStream(documents, 2, 30, 1).load_state_dict(found[0]["state"])),
    ):
        with pytest.raises(ValueError, match=names):
            call()


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
def test_a_loader_of_workers_brings_the_same_batches() -> None:
    whole, resumed = [as_values(batch) for batch in dataset()], dataset()
    resumed.load_state_dict(list(dataset())[2]["state"])
    for data, expected in ((dataset(), whole), (resumed, whole[3:])):
        loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=forked())
        assert [as_values(batch) for batch in loader] == expected


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
    def windows(cu_seqlens: np.ndarray) -> dict[str, spanwise.SpanMask]:
        return {"near": spanwise.SpanMask.documents(cu_seqlens, window=(4, 0))}

    (batch,) = GlobalBatches([30, 25], 2, 32, mask=windows, weights={"near": 3}, pad=True, **PLAN)
    area = batch.plan.mask("near").area()[0]
    assert area[:55].max() == 5 and not area[55:].any() and batch.plan.seq_len == 64


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
    (lambda: GlobalBatches([3, 65], 2, 32), "65 tokens, .*64"),
    (lambda: GlobalBatches([16, 3], 4, 4), "3 tokens for 4 ranks"),
    (lambda: GlobalBatches([16, 3], 4, 32, pad=True), "128, got 32"),
    (lambda: BATCHES.at(4), "token 4, .* 0"),
    (lambda: BATCHES.at().load([np.arange(16), np.arange(2)], 0), r"source\[1\]\[0:3\] .*\(2,\)"),
    (lambda: GlobalBatchDataset(BATCHES, [], 1), r"rank .*\[0, 1\), .*got 1"),
    *((lambda n=n: loaded(state(n)), f"position .*{n!r}") for n in ("4", 4.0, -1)),
    (lambda: loaded(state(20)), "token 20; .* 19"),
]
for make in (GlobalBatches, functools.partial(GlobalBatchStream, rank=0)):
    REFUSED += [
        (lambda make=make: make([3], 1.5, 32), r"num_ranks .*1\.5"),
        (lambda make=make: make([3], 1, 32, blocksize=1, cu_seqlens=[0, 3]), "blocksize, cu_seqlens"),
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

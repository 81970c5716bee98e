"""Plans: pure, exact, fingerprinted, saved, explained; needs of every rank against the dense mask."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import spanwise
from spanwise import Hardware, Plan, SpanMask, make_plan
from spanwise.attention.rank_plan import build
from spanwise.hardware import Link
from tests.masks.test_properties import masks

CU = [0, 1, 20, 20, 61, 100]
DOCUMENTS = SpanMask.documents(CU)
SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 24}


@given(
    st.integers(1, 40).flatmap(lambda n: masks((n, n), 2)), st.integers(1, 5), st.sampled_from(["contiguous", "ptrr"])
)
def test_rank_plans_hold_the_local_problems(mask: SpanMask, num_ranks: int, balancer: str) -> None:
    """Local and remote spans, mapped back to global keys, are the rank's rows of the mask."""
    plan = make_plan(mask, num_ranks, balancer=balancer, exchange="all_gather", block_size=4)
    dense = mask.dense()
    for rank in range(num_ranks):
        local = build(plan, rank)
        tokens = [local.tokens[row if local.batched else 0].numpy() for row in range(mask.batch_size)]
        seen = np.zeros((mask.batch_size * len(tokens[0]), mask.kv_len), dtype=int)  # batch row after batch row
        for chunk in local.chunks["default"]:
            for at in range(chunk.start.shape[0]):  # one row, or with a single chunk each batch row
                start, end, keys = (x[at].numpy() for x in (chunk.start, chunk.end, chunk.kv_pos))
                for span in range(start.shape[0]):
                    for query in range(start.shape[1]):
                        row = at * start.shape[1] + query
                        seen[row, keys[start[span, query] : end[span, query]]] += 1
        assert np.array_equal(seen, np.concatenate([dense[b][each] for b, each in enumerate(tokens)]).astype(int))


def test_same_inputs_same_fingerprint_and_everything_that_must_agree_changes_it() -> None:
    base = dict(num_ranks=4, block_size=8, balancer="ptrr", exchange="needed", stages=1, **SHAPE)
    plan = make_plan(DOCUMENTS, **base)
    assert plan.fingerprint == make_plan(SpanMask.documents(CU), **base).fingerprint
    assert plan == make_plan(SpanMask.documents(CU), **base) and len({plan, make_plan(DOCUMENTS, **base)}) == 1
    others = [
        make_plan(SpanMask.documents(CU, causal=False), **base),
        make_plan({"window": DOCUMENTS}, **base),
        make_plan(DOCUMENTS, **base | {"num_ranks": 3}),
        make_plan(DOCUMENTS, **base | {"block_size": 4}),
        make_plan(DOCUMENTS, **base | {"balancer": "lpt"}),
        make_plan(DOCUMENTS, **base | {"num_kv_heads": 4}),
        make_plan(DOCUMENTS, **base, dtype="float32"),
        make_plan(DOCUMENTS, **base | {"exchange": "all_gather"}),
        make_plan(DOCUMENTS, **base | {"stages": 2}),
        make_plan(DOCUMENTS, **base, keep_kv=False),
        make_plan(DOCUMENTS, **base, cu_seqlens=[0, 100]),
        make_plan(DOCUMENTS, **base, hardware=Hardware("slow", 1e12, 1e12, 1e12, 1e12, 1e9, (Link(1e9, 1e-3),))),
    ]
    other = make_plan(DOCUMENTS, **base | {"balancer": "head_tail"})
    plan.compute()
    others += [plan.replace(kv_layout=other.layout), plan.replace(layout=other.layout)]
    assert others[-1].work().tolist() == other.work().tolist() != plan.work().tolist()
    assert plan.replace(reason="told in other words") == plan
    prints = {p.fingerprint for p in others} | {plan.fingerprint}
    assert len(prints) == len(others) + 1


@pytest.mark.parametrize("balancer", ["ptrr", "head_tail"])
def test_save_and_load(tmp_path, balancer: str) -> None:
    mask = SpanMask.stack([DOCUMENTS, SpanMask.causal(100)])
    plan = make_plan(
        {"a": mask, "b": SpanMask.causal(100)}, 3, balancer=balancer, block_size=8, weights={"a": 2}, **SHAPE,
        cu_seqlens=[CU, [0, 100]], dtype=torch.float32,
    )  # fmt: skip
    plan.save(tmp_path / "plan.npz")
    loaded = Plan.load(tmp_path / "plan.npz")
    assert loaded == plan and loaded.explain() == plan.explain()
    assert torch.equal(loaded.layout.rearrange_indices(), plan.layout.rearrange_indices())
    assert [x.tolist() for x in loaded.cu_seqlens] == [CU, [0, 100]]
    again = pickle.loads(pickle.dumps(plan))
    assert again.__dict__.pop("fingerprint") == plan.fingerprint and again == plan  # computed anew


def test_an_altered_file_is_refused(tmp_path) -> None:
    path = tmp_path / "plan.npz"
    plan = make_plan(DOCUMENTS, 3, **SHAPE)
    plan.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            assert Plan.load(path) == plan  # a byte that does not matter
        except ValueError as error:
            assert str(path) in str(error)
    path.write_bytes(whole)
    with np.load(path) as data:
        arrays = dict(data)
    headers = [json.loads(str(arrays["header"])) | each for each in ({"dtype": "x"}, {"num_ranks": 2}, {"format": 5})]
    altered = np.maximum(arrays["mask0_end"] - 1, arrays["mask0_start"])
    for changed in ({"mask0_end": altered}, *({"header": np.array(json.dumps(each))} for each in headers)):
        np.savez(path, **arrays | changed)
        with pytest.raises(ValueError, match=r"plan\.npz .*(was altered or damaged|is not a plan)"):
            Plan.load(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"plan\.npz"):
        Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "missing.npz")


def test_a_plan_that_was_used_pickles_what_it_has_computed_but_no_rank_plans() -> None:
    plan = make_plan(DOCUMENTS, 1)
    plan.local(None)
    plan.compute()
    again = pickle.loads(pickle.dumps(plan))
    assert plan.built and not again.built
    assert {"fingerprint", "_readings"} <= again.__dict__.keys() and "pairs" in again.readings().__dict__
    changed = again.replace(stages=2)
    assert "area" in changed.readings().__dict__ and changed.fingerprint != plan.fingerprint


def test_bytes_and_seconds() -> None:
    plan = make_plan(DOCUMENTS, 3, balancer="contiguous", exchange="all_gather", **SHAPE)
    tokens = plan.layout.tokens_per_rank
    assert plan.recv_tokens().tolist() == (100 - tokens).tolist()
    # Shards are padded to the longest: two ranks send 34 tokens of 2 heads with 16 + 24 bf16 numbers.
    assert plan.recv_bytes().tolist() == [2 * 34 * 2 * 40 * 2] * 3
    hardware = Hardware("toy", 1e6, 1e6, 1e6, 1e30, 1e6, (Link(1e5, 0.5),))
    options = dict(balancer="contiguous", exchange="all_gather", hardware=hardware, weights={"default": 3}, **SHAPE)
    plan = make_plan(DOCUMENTS, 3, **options)
    parts = plan.predict()
    work, local = plan.work(), plan.local_work()
    forward, backward = (2 * 8 * (16 + 24) / 1e6, 2 * 8 * (3 * 16 + 2 * 24) / 1e6)
    gather, scatter = 0.5 + plan.recv_bytes().max() / 1e5, 0.5 + 2 * plan.recv_bytes().max() / 1e5
    assert parts["compute_forward"] == pytest.approx(3 * work.max() * forward)
    assert parts["compute_backward"] == pytest.approx(3 * work.max() * backward)
    assert parts["exchange_forward"] == pytest.approx(3 * gather)
    assert parts["exchange_backward"] == pytest.approx(3 * scatter)
    # The gather runs beside local attention; the gradients depart when every rank has done its remote part.
    ends = np.maximum(local * forward, gather) + (work - local) * forward
    departed = ((work - local) * backward).max() + scatter
    total = 3 * (ends.max() + max(departed, (work * backward).max()))
    assert parts["total"] == pytest.approx(total)
    assert parts["exposed_forward"] == pytest.approx(3 * (ends.max() - (work * forward).max()))
    # Four ranks that share a K/V head hold it beside its packed form: own q and K/V, K/V for each rank, what they get.
    shape = dict(num_q_heads=8, num_kv_heads=1, head_dim=64, v_head_dim=1)
    plan = make_plan(SpanMask.causal(64), 4, exchange="ulysses", **shape)
    q, kv = 16 * 8 * 64 * 2, 16 * (64 + 1) * 2
    assert plan.resident_bytes().tolist() == [(q + kv + 4 * kv) + (q + 4 * kv)] * 4
    # Six query heads a rank read three K/V heads unevenly: each is repeated until as many read each of them.
    plan = make_plan(SpanMask.causal(64), 2, exchange="ulysses", **shape | {"num_q_heads": 12, "num_kv_heads": 3})
    assert plan.recv_bytes().tolist() == [32 * 2 * (6 * 64 + 3 * (64 + 1) + 6 * 1)] * 2
    for name in ("recv_bytes", "predict", "timeline"):
        with pytest.raises(ValueError, match="needs num_q_heads, num_kv_heads, head_dim"):
            getattr(make_plan(DOCUMENTS, 3), name)()


class OddAndEven:
    """A user's balancer: blocks in turn."""

    def assign(self, problem, num_ranks):
        return np.arange(problem.num_blocks) % num_ranks


def test_a_users_balancer() -> None:
    plan = make_plan(DOCUMENTS, 2, balancer=OddAndEven(), block_size=np.int64(10))
    assert plan.balancer == "OddAndEven" and plan.layout.runs(1)[:2].tolist() == [[10, 20], [30, 40]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"num_ranks": (2, 2), "exchange": "ulysses"}, "Ulysses on the inner axis already"),
        ({"num_ranks": 3, "exchange": "ulysses", "num_q_heads": 4}, "4 query heads .* 3 ranks"),
        ({"exchange": "ulysses", "keep_kv": False}, "Ulysses alone brings none"),
        ({"exchange": "ring", "stages": 2}, "chooses its chunks itself, got stages=2"),
        ({"memory_budget": 1}, "needs num_q_heads and head_dim"),
        ({"num_q_heads": 6, "num_kv_heads": 4}, "6 query heads are not a multiple of 4"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, "is a Tensor; make_plan takes a SpanMask"),
        ({"mask": SpanMask.full(4, 8), "balancer": "lpt"}, "4 and 8 tokens.*'lpt'"),
        ({"mask": SpanMask.causal(9), "balancer": "per_document_head_tail"}, "needs cu_seqlens"),
    ],
)
def test_bad_input(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(**{"mask": DOCUMENTS, "num_ranks": 2} | given)


def test_host_traffic_needs_hosts() -> None:
    one_link = dataclasses.replace(spanwise.H100, links=spanwise.H100.links[1:])
    options = dict(balancer="lpt", block_size=3, exchange="needed", hardware=one_link)
    plan = make_plan(DOCUMENTS, 6, **options)
    host = np.arange(6) // 2
    between = plan.traffic()[host[:, None] != host].sum()
    assert plan.host_traffic(host_size=2).between == between > 0
    with pytest.raises(ValueError, match="has no hosts below 6 ranks: give host_size"):
        plan.host_traffic()
    with pytest.raises(ValueError, match="'hierarchical' needs hardware that has hosts"):
        make_plan(DOCUMENTS, 4, **options | {"exchange": "hierarchical"})


def test_needs_are_of_a_rank_and_a_row() -> None:
    for rank, row in ((-1, 0), (4, 0), (0, -1)):
        with pytest.raises(ValueError, match=r"must be in \[0, "):
            make_plan(DOCUMENTS, 4).needs(rank, row=row)


def test_planning_reads_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("planning touched torch.distributed")

    for name in ("get_rank", "get_world_size", "is_initialized", "init_process_group"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    spanwise.make_plan(DOCUMENTS, 4, **SHAPE).explain()

"""Plans of inputs that nobody would choose: tokens lie on one rank each, needs are exact, figures are finite."""

from __future__ import annotations

import numpy as np
import pytest

import spanwise
from spanwise import SpanMask, make_plan

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def offsets(lengths):
    return np.cumsum([0, *lengths])


def without_keys(length):
    return SpanMask(np.zeros((1, length), int), np.zeros((1, length), int), length)


def every_other_row(length):
    start, row = np.zeros(length, int), np.arange(length)
    return SpanMask(start[None], np.where(row % 2, row + 1, 0)[None], length)


def last_rows_read_all(length, rows):
    row = np.arange(length)
    return SpanMask(np.zeros((1, length), int), np.where(row < length - rows, 0, length)[None], length)


# Mask, ranks, ranks of a host, and the imbalance that is to be reached.
CASES = {
    "documents of one token": (SpanMask.documents(np.arange(4001)), 96, 8, 1.05),
    "a giant among 10,000": (SpanMask.documents(offsets([*[3] * 5_000, 30_000, *[3] * 5_000])), 96, 8, 1.05),
    "more ranks than tokens": (SpanMask.documents([0, 3, 5]), 16, 8, None),
    "no keys at all": (without_keys(3000), 70, 8, 1.0),
    "every other row empty": (every_other_row(4001), 66, 8, 1.06),
    "a few rows have all the work": (last_rows_read_all(6000, 70), 70, 8, None),
}


def check(plan):
    runs = np.concatenate([plan.runs(rank) for rank in range(plan.num_ranks)])
    runs = runs[np.argsort(runs[:, 0])]
    assert runs[0, 0] == 0 and runs[-1, 1] == plan.seq_len and (runs[1:, 0] == runs[:-1, 1]).all()
    for name, mask in plan.masks.items():
        work = plan.work(name)
        assert work.sum() == mask.area().sum() and (plan.local_work(name) >= 0).all()
        assert (plan.local_work(name) <= work).all() and (plan.needed_tokens(name) >= 0).all()
    assert all(np.isfinite(value) and value >= 0 for value in plan.predict().values())
    assert all(np.isfinite(candidate.seconds["total"]) for candidate in plan.candidates)
    assert plan.explain() and plan.fingerprint


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("hosts", [False, True])
def test_any_mask_on_any_ranks(name, hosts):
    mask, ranks, host_size, most = CASES[name]
    hardware = spanwise.H100.with_host_size(host_size) if hosts else None
    local = make_plan(mask, ranks, balancer="local", exchange="needed", hardware=hardware, **SHAPE)
    check(local)
    assert np.ptp(local.layout.tokens_per_rank) <= local.block_size
    assert most is None or local.imbalance() <= most
    plan = make_plan(mask, ranks, hardware=hardware, **SHAPE)
    check(plan)
    assert plan.predict()["total"] <= 1.05 * min(c.seconds["total"] for c in plan.candidates) + 1e-12

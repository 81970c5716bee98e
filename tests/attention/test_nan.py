"""NaN in q, k, v or grad_out of a kernel: rows that do not read it, and keys that these read alone, are exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spanwise import SpanMask
from tests.kernel_calls import reference, sdpa
from tests.oracle import make_problem, reached_by

KERNELS = [pytest.param(reference, id="reference"), pytest.param(sdpa, id="sdpa")]


def _masks() -> dict[str, SpanMask]:
    rng = np.random.default_rng(1)
    start = rng.integers(0, 50, (1, 1, 50))
    end = np.where(rng.random(start.shape) < 0.3, start, rng.integers(start, 51))  # some rows are empty
    return {
        "causal documents": SpanMask.documents([0, 7, 31, 50]),
        "shared prefix": SpanMask.shared_prefix(11, [9, 21, 9]),
        "random, empty rows": SpanMask(start, end, 50),
    }


MASKS = _masks()
# A mixture of tokens that a causal row reads, tokens that it does not, and (in the random mask) rows without keys.
POISONED = slice(22, 26)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("tensor", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_equals_the_run_without_it(kernel, softcap, tensor, name, value) -> None:  # type: ignore[no-untyped-def]
    mask = MASKS[name]
    start, end = (torch.tensor(x) for x in (mask.start, mask.end))
    clean = make_problem(mask.dense(), batch=2, dtype=torch.float64)
    found = []
    for poison in (False, True):
        inputs = [x.clone() for x in clean[:4]]
        if poison:  # one head of one batch row
            inputs[["q", "k", "v", "grad_out"].index(tensor)][1, -1, POISONED] = value
        leaves = [x.requires_grad_() for x in inputs[:3]]
        out, lse = kernel(*leaves, start, end, scale=0.4, softcap=softcap)
        torch.autograd.backward((out, lse), (inputs[3], torch.ones_like(lse)))
        found.append([out.detach(), *(x.grad for x in leaves)])
        lses = lse.detach().isnan() if poison else None
    rows, *_ = reached = reached_by(mask.dense()[0], tensor, POISONED)
    for good, poisoned, may_differ in zip(*found, reached, strict=True):
        differs = ~torch.isclose(poisoned, good, atol=1e-9, rtol=1e-9)
        assert poisoned.isfinite()[..., ~may_differ, :].all()
        assert not differs[..., ~may_differ, :].any()
        assert not differs[0].any(), "another batch row"
        # Head 1 of k and v serves query heads 2 and 3.
        assert not differs[1, 0].any(), "another head"
    assert lses is not None
    assert not lses[..., ~rows].any()
    outputs, dq = found[1][0], found[1][1]
    heads = [3] if tensor in ("q", "grad_out") else [2, 3]
    if value != value:  # inf may give a weight of 0
        poisoned_rows = [x[1, heads][:, rows] for x in (outputs, dq)][tensor == "grad_out" :]
        assert all(x.isnan().any(-1).all() for x in poisoned_rows)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_that_overflow_stay_in_their_document(kernel) -> None:  # type: ignore[no-untyped-def]
    mask = SpanMask.documents([0, 9, 20, 31])
    start, end = (torch.tensor(x) for x in (mask.start, mask.end))
    problem = make_problem(mask.dense(), dtype=torch.float32)
    for x in (problem.q, problem.k):
        x[:, :, 9:20] *= 1e25
    leaves = [x.requires_grad_() for x in problem[:3]]
    out, _ = kernel(*leaves, start, end, scale=8**-0.5)
    out.backward(problem.grad_out)
    exact = problem.out, problem.dq, problem.dk, problem.dv
    for x, whole in zip([out.detach(), *(leaf.grad for leaf in leaves)], exact, strict=True):
        for document in (slice(0, 9), slice(20, 31)):
            torch.testing.assert_close(x[:, :, document].double(), whole[:, :, document], atol=2e-5, rtol=1e-4)
    assert not out[:, :, 9:20].isfinite().all()

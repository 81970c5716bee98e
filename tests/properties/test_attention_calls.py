"""Any attention call equals dense float64 attention on every rank.

Masks, exchanges, kernels, rank shapes, dtypes and options are drawn by Hypothesis. A failure is shrunk,
printed with the line that repeats it, kept in the example database and run first the next time. For another search:

    python -m pytest tests/properties -k eight --hypothesis-seed=$RANDOM
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings, strategies as st
from hypothesis.database import InMemoryExampleDatabase

from tests.oracle import Inputs, expected
from tests.properties.cases import BALANCERS, EXCHANGES, Case, attention_calls
from tests.properties.check import check
from tests.properties.masks import SQUARE
from tests.ranks.gloo import GlooPool

QUIET = settings(max_examples=3000, database=InMemoryExampleDatabase(), deadline=None, phases=[Phase.generate])


@pytest.mark.parametrize("exchange", EXCHANGES)
@given(data=st.data())
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_a_call_is_right(gloo_pool: GlooPool, exchange: str, data: st.DataObject) -> None:
    case = data.draw(attention_calls(4, exchange))
    for kind in case.kinds():
        event(kind)
    check(case, gloo_pool.run)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[GlooPool]:
    with GlooPool(num_ranks=8) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@given(data=st.data())
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_a_call_on_up_to_eight_ranks_is_right(eight_ranks: GlooPool, exchange: str, data: st.DataObject) -> None:
    check(data.draw(attention_calls(8, exchange)), eight_ranks.run)


def test_the_draws_cover_what_there_is() -> None:
    counts: Counter[str] = Counter()

    @given(attention_calls(4, "needed"))
    @settings(QUIET, max_examples=500, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    def draw(case: Case) -> None:
        counts.update(" ".join(case.kinds()).split())

    draw()
    assert {"packing", "stack", "and", "or", *SQUARE, *BALANCERS} <= counts.keys()
    assert {"reference", "sdpa", "auto", "float64", "float32", "bfloat16", "float16"} <= counts.keys()
    assert {"sinks", "lse", "softcap", "bias", "dual_chunk"} <= counts.keys()


def by_hand(inputs: Inputs, visible: np.ndarray, scale: float, softcap: float) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of one head, number by number."""
    q, k, v = (x[0, 0].numpy() for x in inputs[:3])
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), float(inputs.sinks[0]))
    for i in range(len(q)):
        terms = {}
        for j in range(len(k)):
            if visible[i, j]:
                score = softcap * math.tanh(scale * sum(a * b for a, b in zip(q[i], k[j], strict=True)) / softcap)
                terms[j] = math.exp(score + 0.3 * (j - i) / 8 + 0.01 * i)
        total = sum(terms.values()) + math.exp(float(inputs.sinks[0]))
        lse[i] = math.log(total)
        for j, term in terms.items():
            out[i] += term / total * v[j]
    return out, lse


def test_the_oracle_agrees_with_sums_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = Inputs(draw(1, 1, 4, 3), draw(1, 1, 5, 3), draw(1, 1, 5, 2), draw(1, 1, 4, 2), draw(1, 1, 4), draw(1))
    visible = torch.tensor([[1, 0, 1, 1, 0], [0] * 5, [1] * 5, [0, 0, 0, 0, 1]], dtype=torch.bool)
    found = expected(inputs, visible[None], {"scale": 0.7, "softcap": 1.1, "bias": "alibi"}).values
    out, lse = by_hand(inputs, visible.numpy(), 0.7, 1.1)
    np.testing.assert_allclose(found["out"][0, 0], out, atol=1e-14)
    np.testing.assert_allclose(found["lse"][0, 0], lse, atol=1e-14)

    def loss(changed: Inputs) -> float:
        out, lse = by_hand(changed, visible.numpy(), 0.7, 1.1)
        return float((out * inputs.grad_out[0, 0].numpy()).sum() + (lse * inputs.grad_lse[0, 0].numpy()).sum())

    for name, gradient in (("q", "dq"), ("k", "dk"), ("v", "dv"), ("sinks", "dsinks")):
        given = getattr(inputs, name)
        step = torch.zeros_like(given)
        at = (0,) * given.dim()
        step[at] = 1e-5
        slope = (loss(inputs._replace(**{name: given + step})) - loss(inputs._replace(**{name: given - step}))) / 2e-5
        assert slope == pytest.approx(float(found[gradient][at]), abs=1e-8) and slope != 0

"""Any attention call equals dense float64 attention on every rank.

Masks, exchanges, kernels, rank shapes, dtypes and options are drawn by Hypothesis. A failure is shrunk,
printed with the line that repeats it, kept in the example database and run first the next time. For another search:

    python -m pytest tests/properties -k eight --hypothesis-seed=$RANDOM
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, find, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

import tests.oracle
from tests.oracle import Inputs, expected
from tests.properties.build import on_rank
from tests.properties.cases import BALANCERS, EXCHANGES, Case, attention_calls
from tests.properties.cells import MaskCase
from tests.properties.check import Failed, check
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


@pytest.mark.parametrize("module", ["cells", "masks", "cases", "oracle"])
def test_what_is_expected_shares_no_code_with_the_package(module: str) -> None:
    path = Path(tests.oracle.__file__) if module == "oracle" else Path(__file__).with_name(f"{module}.py")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert imported and not any(name.startswith("spanwise") for name in imported)


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


def in_this_process(spoil: Any = lambda result: result) -> Any:
    """In place of `GlooPool.run`: one rank, whose results `spoil` changes."""

    def run(num_ranks: int, fn: Any, *given: Any, **mesh: Any) -> list[Any]:
        assert num_ranks == 1 and fn is on_rank
        return [spoil(fn(0, None, *given))]

    return run


def one_rank_case(**wanted: Any) -> Case:
    def fits(case: Case) -> bool:
        return case.num_ranks == 1 and all(getattr(case, name) == value for name, value in wanted.items())

    case: Case = find(attention_calls(1, "needed"), fits, settings=QUIET)
    return case


@pytest.fixture(scope="module")
def full() -> Case:
    """A case with all results, and a mask under which no row is empty."""
    case = one_rank_case(batch=1)
    full = MaskCase("full", {"q_len": 20, "kv_len": 20})
    options = {"sinks": 1, "lse": True, "max_logit": True, "gradients": True, "bias": None, "scale": None}
    options |= {"dtype": "float64", "rank_plan": False, "cu_seqlens": None}
    return dataclasses.replace(case, masks={"default": full}, mask="default", balancer="contiguous", **options)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dsinks", "max_logit"])
@pytest.mark.parametrize("change", ["a little", "nan", "shape"])
def test_a_wrong_result_is_found(name: str, change: str, full: Case) -> None:
    def spoil(result: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = result[name].double().clone()
        if change == "shape":
            x = x[..., :-1]
        elif change == "nan":
            x.view(-1)[-1] = torch.nan
        else:
            x = x + 1e-8 * x.abs().max()
        return {**result, name: x}

    check(full, in_this_process())
    with pytest.raises(Failed, match=name):
        check(full, in_this_process(spoil))


def test_any_number_where_the_mask_has_no_pair_is_found(full: Case) -> None:
    """Below all tolerances: rows without a key and keys that no row reads have results of exactly 0."""
    empty = MaskCase("spans", {"start": [[0] * full.q_len], "end": [[0] * full.q_len], "kv_len": full.kv_len})
    case = dataclasses.replace(full, masks={"default": empty}, dtype="bfloat16", max_logit=False)
    check(case, in_this_process())
    for name in ("out", "dq", "dk", "dv"):
        with pytest.raises(Failed, match=f"{name} is not 0 where the mask has no pair"):
            check(case, in_this_process(lambda result, name=name: {**result, name: result[name] + 1e-36}))

"""Any attention call equals dense float64 attention on every rank.

Masks, exchanges, kernels, rank shapes, dtypes and options are drawn by Hypothesis. A failure is shrunk,
printed with the line that repeats it, kept in the example database and run first the next time. For another search:

    python -m pytest tests/properties -k eight --hypothesis-seed=$RANDOM
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from spanwise import Packing, SpanMask
from tests.oracle import Inputs, expected
from tests.properties.cases import BALANCERS, STYLES, Case, check
from tests.ranks.gloo import GlooPool

EXCHANGES = ("needed", "all_gather", "hierarchical", "ring", "ulysses", "auto")
LEVELS = [(2, 2), (1, 2), (1, 3), (2, 3), (3, 2), (2, 4), (4, 2)]


def cuts(draw: st.DrawFn, length: int, most: int) -> list[int]:
    """Offsets of documents that fill `length`, some of them empty."""
    return [0, *sorted(draw(st.lists(st.integers(0, length), max_size=most))), length]


def reach(draw: st.DrawFn, length: int) -> dict[str, Any]:
    """How far a row reads inside its document."""
    side = st.sampled_from([0, 1]) | st.integers(0, length)
    window = draw(st.none() | st.tuples(st.just(-1) | side, side))
    # Libraries read (-1, 0) of rows that are not causal in two ways, so it is refused.
    return {"causal": draw(st.booleans()) or window == (-1, 0), "window": window}


def mask_of(draw: st.DrawFn, q_len: int, kv_len: int) -> SpanMask:
    """Documents; or any spans, rough ones (no two rows alike) or smooth ones, with rows that read nothing."""
    if q_len == kv_len and draw(st.booleans()):
        return SpanMask.documents(cuts(draw, q_len, 6), **reach(draw, q_len))
    shape, rng = (2 * draw(st.integers(1, 4)), q_len), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    edges = rng.integers(0, kv_len + 1, shape)
    if draw(st.booleans()):
        edges = np.clip(edges[:, :1] + np.cumsum(rng.integers(0, 3, shape), axis=1), 0, kv_len)
    start, end = np.sort(edges, axis=0).reshape(-1, 2, q_len).transpose(1, 0, 2)
    return SpanMask(start, np.where(rng.random(q_len) < draw(st.sampled_from([0, 0.3, 1.0])), start, end), kv_len)


def packing_of(draw: st.DrawFn, length: int, multiple: int) -> Packing:
    """Sequences in storage with padding, sometimes with keys of their own; slots are multiples of a number."""
    sides, count = {}, draw(st.integers(1, 4))
    for side in ("q", "kv") if draw(st.booleans()) else ("q",):
        lens = draw(st.lists(st.integers(0, length), min_size=count, max_size=count))
        slots = [-(-(n + draw(st.integers(0, 3))) // multiple) * multiple for n in lens]
        sides[f"cu_seqlens_{side}"] = np.cumsum([0, *lens])
        sides[f"cu_seqlens_{side}_padded"] = np.cumsum([0, *slots])
        sides[f"{side}_len"] = max(sum(slots), multiple)
    return Packing(**sides)


@st.composite
def attention_calls(draw: st.DrawFn, most_ranks: int, exchange: str) -> Case:
    """A call on at most `most_ranks` ranks."""
    choose = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    levels = draw(st.integers(1, most_ranks)), 1
    if most_ranks > 1 and exchange not in ("ulysses", "hierarchical") and draw(st.integers(0, 3)) == 3:
        levels = choose(*[pair for pair in LEVELS if math.prod(pair) <= most_ranks])
    outer, inner = levels
    q_len, batch, packing = draw(st.integers(1, 80)), 1, None
    balancer, kind = choose(*BALANCERS), choose("one", "one", "batch", "rows", "two", "cross", "packing")
    if kind == "packing":
        packing = packing_of(draw, draw(st.integers(1, 20)), choose(1, 2 * outer * inner))
        masks = {"default": packing.mask(align=choose("top_left", "bottom_right"), **reach(draw, 20))}
        square = packing.kv_len == packing.q_len and np.array_equal(packing.q_offsets, packing.kv_offsets)
        square = square and np.array_equal(packing.q_lens, packing.kv_lens)
        slots = np.concatenate([packing.q_offsets, packing.kv_offsets, [packing.q_len, packing.kv_len]])
        if not (slots % (2 * outer * inner)).any():
            balancer = choose("dual_chunk", balancer)
    else:
        kv_len = draw(st.integers(1, 2 * q_len)) if kind == "cross" else q_len
        rows = choose(2, 3) if kind == "rows" else 1
        batch, square = choose(2, 3) if kind == "batch" else rows, kv_len == q_len
        masks = {"default": SpanMask.stack([mask_of(draw, q_len, kv_len) for _ in range(rows)])}
        masks |= {"other": mask_of(draw, q_len, kv_len)} if kind == "two" else {}
    if not square and balancer != "dual_chunk":
        balancer = choose("contiguous", "auto")
    shares = outer if exchange == "ulysses" else inner
    kv_heads, group = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)).filter(lambda x: x[0] * x[1] % shares == 0))
    change = choose("none", "none", "softcap", "alibi", "batch")
    bias, keep_kv = change if change in ("alibi", "batch") else None, choose(None, True, False)
    dims = draw(st.tuples(st.integers(1, 16), st.integers(1, 16)))
    return Case(
        masks=masks, mask=choose(*masks), packing=packing, seed=draw(st.integers(0, 2**32 - 1)), batch=batch,
        levels=levels, host_size=choose(2, 3, 4), exchange=exchange,
        stages=choose(None, 1, 2, 4) if exchange in ("needed", "auto") else None,
        keep_kv=None if keep_kv is False and (outer == 1 or exchange == "ulysses") else keep_kv, balancer=balancer,
        block_size=choose(1, 2, 3, 4, 8, 16, 128), weighted=len(masks) > 1 and draw(st.booleans()),
        cu_seqlens=cuts(draw, q_len, 3) if balancer == "per_document_head_tail" and packing is None else None,
        give_shape=draw(st.booleans()), heads=(kv_heads * group, kv_heads), dims=dims, bias=bias,
        dtype=choose("float64", "float32", "bfloat16", "float16"),
        kernel=choose("reference", "auto", *(["sdpa"] if bias is None else [])),
        scale=choose(None, None, 0.0, 0.4, -0.7, 1.5), softcap=choose(0.5, 3.0) if change == "softcap" else None,
        sinks=choose(0, 0, 1, 2), lse=draw(st.booleans()), max_logit=bias is None and draw(st.booleans()),
        rank_plan=draw(st.booleans()), style=choose(*STYLES), gradients=draw(st.integers(0, 19)) < 19,
    )  # fmt: skip


@pytest.mark.parametrize("exchange", EXCHANGES)
@given(data=st.data())
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_a_call_is_right(gloo_pool: GlooPool, exchange: str, data: st.DataObject) -> None:
    check(data.draw(attention_calls(4, exchange)), gloo_pool.run)


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
    seen: Counter[Any] = Counter()

    @given(attention_calls(4, "needed"))
    @settings(
        max_examples=500, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def draw(case: Case) -> None:
        options = (case.sinks, case.softcap, case.bias, case.lse, case.packing)
        seen.update([case.balancer, case.kernel, case.dtype, case.style, case.levels, len(case.masks), case.batch])
        seen.update(name for name, x in zip(["sinks", "softcap", "bias", "lse", "packing"], options, strict=True) if x)

    draw()
    names = {*BALANCERS, "dual_chunk", *STYLES, "reference", "sdpa", "auto", "sinks", "softcap", "bias", "lse"}
    assert names | {"packing", "float64", "float32", "bfloat16", "float16", (3, 1), (2, 2), 1, 2, 3} <= seen.keys()


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

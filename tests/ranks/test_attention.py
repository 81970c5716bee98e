"""Attention on threaded ranks: results and gradients of every rank against float64 on one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import spanwise
from spanwise import Packing, SpanMask
from spanwise.attention.kernels.table import KERNELS
from tests.attention import stand_ins  # noqa: F401  # registers a flash on the CPU
from tests.oracle import dense_attention, make_problem, relative_error
from tests.pairs import covering, named
from tests.properties.cases import BALANCERS, STYLES, Case, check, inputs_of, on_rank, plan_of
from tests.ranks.calls import CU_SEQLENS, EXCHANGES, LENGTH, heads_for, restored, step
from tests.ranks.harness import run_ranks

# ---------------------------------------------------------------- any two settings together


def spans(seed: int, empty: float) -> SpanMask:
    """Any spans; so many rows are empty."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, LENGTH, LENGTH)
    end = np.where(rng.random(LENGTH) < empty, start, rng.integers(start, LENGTH + 1))
    return SpanMask(start[None], end[None], LENGTH)


def packing(
    lens: list[int], starts: list[int], length: int, *, kv: tuple[list[int], list[int], int] | None = None, **reads: Any
) -> tuple[SpanMask, Packing]:
    """Sequences in storage with padding; `kv` are other lengths and places of keys."""
    sides: dict[str, Any] = {}
    for side, (side_lens, side_starts, rows) in {
        "q": (lens, starts, length),
        "kv": kv or (lens, starts, length),
    }.items():
        sides[f"cu_seqlens_{side}"] = np.cumsum([0, *side_lens])
        sides[f"cu_seqlens_{side}_padded"], sides[f"{side}_len"] = [*side_starts, rows], rows
    found = Packing(**sides)
    return found.mask(**reads), found


LENS = [0, 1, 13, 2, 0, 30, 21]
# Slots of 48 rows, which every number of ranks here cuts in chunks; one holds padding alone.
SLOTS = [5, 0, 40, 48], [48, 96, 144, 192], 288
DOCUMENTS = SpanMask.documents(CU_SEQLENS)
MASKS: dict[str, SpanMask | tuple[SpanMask, Packing]] = {
    "causal": SpanMask.causal(LENGTH),
    "full": SpanMask.full(LENGTH),
    "documents": DOCUMENTS,
    "windows": SpanMask.documents(CU_SEQLENS, window=(3, 4), causal=False),
    "two spans": SpanMask.block_causal(LENGTH, 8, num_previous=1, global_tokens=3),
    "random, empty rows": spans(0, 0.3),
    "nothing": spans(0, 1.0),
    "three tokens": SpanMask.causal(3),
    "block diffusion": SpanMask.block_diffusion([0, 13, 40], 4),
    "rows": SpanMask.stack([DOCUMENTS, SpanMask.documents([0, 40, LENGTH]), spans(1, 0.1)]),
    "cross": SpanMask.full(LENGTH, 41),
    "packed": packing(LENS, [0, *itertools.accumulate(LENS[:-1])], LENGTH),
    "padded": packing(LENS, [5, 5, 8, 25, 27, 31, 62], 90, window=(5, 0)),
    "padded cross": packing(LENS, [5, 5, 8, 25, 27, 31, 62], 90, causal=False, align="bottom_right", window=(9, 3),
                            kv=([9, 4, 0, 1, 6, 3, 40], [0, 9, 15, 15, 16, 23, 30], 72)),
    "chunks": packing(*SLOTS),
    "chunks cross": packing(*SLOTS, kv=([9, 4, 0, 20], [0, 48, 96, 96], 144), causal=False),
    "chunks of padding": packing([0, 0], [48, 96], 144),
}  # fmt: skip
PRECISIONS = [("reference", "float64"), ("sdpa", "float64"), ("sdpa", "float32"), ("sdpa", "bfloat16")]
PRECISIONS += [("reference", "bfloat16"), ("reference", "float16"), ("varlen", "float16"), ("varlen", "bfloat16")]
OPTIONS: list[dict[str, Any]] = [
    {}, {"softcap": 0.7, "scale": 0.5}, {"bias": "alibi"}, {"bias": "batch"}, {"sinks": 1}, {"max_logit": True},
    {"sinks": 3, "softcap": 3.0, "max_logit": True}, {"rank_plan": False}, {"gradients": False, "lse": False},
    {"latents": 3}, {"latents": 2, "softcap": 3.0, "sinks": 1, "rank_plan": False},
]  # fmt: skip
# Outer and inner ranks, and ranks that share the heads.
LEVELS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (2, 2, 1), (3, 2, 1), (2, 4, 1)]
LEVELS += [(1, 1, 2), (2, 1, 2), (2, 2, 2)]
# Heads of queries and of keys, head dims of keys and values: also as DeepSeek trains latent attention.
SHAPES = [((4, 2), (8, 6)), ((4, 4), (8, 12)), ((4, 1), (192, 128)), ((12, 2), (8, 8)), ((24, 6), (8, 8))]
CROSS = ("dual_chunk", "contiguous", "auto")


class Setting(NamedTuple):
    """A value of each axis of the design."""

    way: dict[str, Any]
    levels: tuple[int, int, int]
    mask: str
    balancer: str
    precision: tuple[Any, str]
    options: dict[str, Any]
    shape: tuple[tuple[int, int], tuple[int, int]]
    style: str = "eager"

    def possible(self) -> bool:
        (outer, inner, tp), (kernel, dtype), ulysses = self.levels, self.precision, self.way["exchange"] == "ulysses"
        (heads, kv_heads), (dim, v_dim) = self.shape
        options = self.options.keys()
        return not (
            # Ulysses has one level; and a single group receives no K/V.
            (inner > 1 if ulysses else outer == 1 and self.way.get("keep_kv") is False)
            or (self.balancer == "dual_chunk") != self.mask.startswith("chunks")
            or ("cross" in self.mask and self.balancer not in CROSS)
            or ("bias" in options and kernel in ("sdpa", "varlen"))
            or ("latents" in options and self.style not in ("eager", "checkpoint", "twice", "some"))
            # The rest of the dim of K is a rotary part; half precision rounds what is expanded.
            or ("latents" in options and (inner * tp > 1 or dim <= v_dim or "16" in dtype))
            or (kernel == "varlen" and options & {"softcap", "max_logit"})
            or (kernel == "varlen" and self.style == "autocast")  # the stand-in's products would be rounded
            # packed_attention takes no DTensors, and torch copies none in inference mode.
            or (tp > 1 and (isinstance(MASKS[self.mask], tuple) or self.style == "inference first"))
            or kv_heads % tp
            or heads // tp % (outer if ulysses else inner)
        )

    def case(self) -> Case:
        found, (kernel, dtype), (heads, dims) = MASKS[self.mask], self.precision, self.shape
        mask, packed = found if isinstance(found, tuple) else (found, None)
        way = {name: value for name, value in self.way.items() if name != "hardware"}
        if self.balancer == "per_document_head_tail" and packed is None:
            way["cu_seqlens"] = CU_SEQLENS if mask.q_len == LENGTH else [0, mask.q_len]
        return Case(
            {"default": mask}, packing=packed, batch={"rows": 3, "causal": 2}.get(self.mask, 1),
            levels=self.levels[:2], tp=self.levels[2], balancer=self.balancer, kernel=kernel, dtype=dtype, heads=heads,
            dims=dims, block_size=1 if mask.q_len < 8 else 8, style=self.style, seed=len(self.mask), **way,
            **self.options,
        )  # fmt: skip

    def __str__(self) -> str:
        parts = [named(x) if isinstance(x, dict) else x for x in self if x is not self.shape]
        return "-".join(map(str, parts)).replace("'", "").replace(" ", "")


SETTINGS = covering(
    EXCHANGES, LEVELS, list(MASKS), [*BALANCERS, "dual_chunk"], PRECISIONS, OPTIONS, SHAPES, STYLES,
    possible=lambda *values: Setting(*values).possible(),
)  # fmt: skip


@pytest.fixture(autouse=True)
def varlen_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the flash of `stand_ins`."""
    monkeypatch.setattr(KERNELS["varlen"], "check_device", lambda *_: None, raising=False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch's deterministic mode; with it, memory that nothing has written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("setting", [Setting(*values) for values in SETTINGS], ids=str)
def test_matches_one_device(setting: Setting, request: pytest.FixtureRequest) -> None:
    """Each setting of one axis with each of another; padding holds NaN. Half of them in deterministic mode.

    Under tensor parallelism a score_mod sees global heads, and sinks are replicated.
    """
    if SETTINGS.index(tuple(setting)) % 2:
        request.getfixturevalue("deterministic")
    check(setting.case(), run_ranks)


@pytest.mark.parametrize("way", EXCHANGES, ids=named)
def test_two_runs_give_the_same_bits(deterministic: None, way: dict[str, Any]) -> None:
    setting = Setting(way, (4, 1, 1), "padded", "lpt", ("sdpa", "float32"), {"sinks": 1, "max_logit": True}, SHAPES[3])
    case = setting.case()
    given = case, plan_of(case), inputs_of(case)
    for one, other in zip(*(run_ranks(4, on_rank, *given) for _ in range(2)), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- settings that no pair has

WINDOWS = packing([8, 32], [0, 8], 40, causal=False, window=(4, 4))  # rank 1's position 4 of the short one reads 0 … 7
IDLE = np.arange(LENGTH)
IDLE[:50], IDLE[50:53] = 0, 47
TWO = {"near": SpanMask.documents(CU_SEQLENS, window=(4, 0)), "far": SpanMask.causal(LENGTH)}
EXAMPLES = {
    **{f"windows in chunks, {x}": Case({"default": WINDOWS[0]}, packing=WINDOWS[1], levels=(2, 1), balancer=x,
                                       exchange=way, block_size=4)
       for x, way in (("dual_chunk", "all_gather"), ("local", "ring"), ("contiguous", "ulysses"))},
    # A rank reads few keys elsewhere: they fit in one of three chunks, in which others receive too.
    **{f"idle in a chunk, keep_kv {keep}": Case(
        {"default": SpanMask(IDLE[None], np.arange(1, LENGTH + 1)[None], LENGTH)}, levels=(3, 1), stages=3,
        keep_kv=keep, block_size=4) for keep in (True, False)},
    **{f"mask {name} of two": Case(TWO, name, levels=(4, 1), balancer="lpt", block_size=4, weighted=True)
       for name in TWO},
    "absorbed latents": Case({"default": DOCUMENTS}, levels=(4, 1), heads=(4, 1), dims=(576, 512)),
    "auto": Case({"default": DOCUMENTS}, levels=(4, 1), exchange="auto", balancer="auto"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    check(EXAMPLES[name], run_ranks)


# TransformerEngine's matrix: dtype, padding, heads, head dims, what is read, ranks, exchange.
TE_READS = [(True, None), (False, None), (True, (512, 0)), (False, (512, 512)), (True, (128, 0))]
TE_CELLS = covering(
    ["float32", "bfloat16"], [False, True], [(12, 12), (32, 4), (12, 2)], [(64, 64), (128, 128), (192, 128)], TE_READS,
    [(2, 1), (4, 1), (2, 2)], ["all_gather", "needed", "ring", "ulysses"],
    possible=lambda dtype, padded, heads, dims, reads, levels, exchange: levels[1] == 1 or exchange != "ulysses",
)  # fmt: skip


# Many heads, or the larger head dims, over the longer sequences.
TE_SLOW = [heads == (32, 4) or dims != (64, 64) or 512 in (reads[1] or ()) for _, _, heads, dims, reads, *_ in TE_CELLS]


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=pytest.mark.slow if slow else []) for i, slow in enumerate(TE_SLOW)]
)
def test_transformer_engines_matrix(number: int) -> None:
    """Two sequences, sometimes one of length 0; a window of 512 gets one that is longer."""
    dtype, padded, heads, dims, (causal, window), levels, exchange = TE_CELLS[number]
    rng = np.random.default_rng(number)
    long = int(rng.integers(520, 601) if window and window[0] == 512 else rng.integers(64, 257))
    lens = [long, 0 if number % 8 in (0, 3) else int(rng.integers(0, 257))][:: 1 if number % 2 else -1]
    slots = [-(-n // 8) * 8 for n in lens] if padded else lens
    mask, packed = packing(lens, [0, slots[0]], sum(slots), causal=causal, window=window)
    balancer = "dual_chunk" if padded else ["head_tail", "lpt", "local", "contiguous"][number % 4]
    options: Any = {"exchange": exchange, "balancer": balancer, "dtype": dtype, "heads": heads, "dims": dims}
    check(Case({"default": mask}, packing=packed, levels=levels, block_size=32, **options), run_ranks)


# ---------------------------------------------------------------- rounding

ROUNDED = {
    "causal": SpanMask.causal(150),
    "documents": SpanMask.documents([0, 30, 31, 80, 120, 150]),
    "window": SpanMask.sliding_window(150, 40, 3),
    "two spans": SpanMask.block_causal(150, 16, num_previous=2, global_tokens=5),
    "long": SpanMask.documents([0, 700, 1200]),
}


@pytest.mark.parametrize(
    ("way", "ranks", "name", "heads", "dtype", "kernel"),
    [
        *covering(EXCHANGES, [2, 3, 4], [*ROUNDED][:-1], [(4, 4), (4, 2), (4, 1)], [torch.bfloat16, torch.float16],
                  ["sdpa", "reference"]),
        (EXCHANGES[2], 4, "long", (2, 1), torch.float32, "sdpa"),
    ],
    ids=named,
)  # fmt: skip
def test_error_is_that_of_one_device(way: Any, ranks: int, name: str, heads: Any, dtype: Any, kernel: str) -> None:
    """In half precision at most 1.1 times the root mean square error of torch's attention, which rounds more often.

    The largest error of a tensor is that of one unlucky element, so its ratio says little: it gets 2.
    """
    mask = ROUNDED[name]
    heads = heads_for(way) if way["exchange"] == "ulysses" else heads
    problem = make_problem(mask.dense(), heads=heads, dims=(32, 32), dtype=dtype, seed=ranks)
    plan = spanwise.make_plan(mask, ranks, balancer="head_tail", block_size=8, **way)
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    visible = torch.from_numpy(mask.dense()).unsqueeze(1)
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=visible, enable_gqa=True)
    out.backward(problem.grad_out)
    torchs = [out.detach(), *(x.grad for x in leaves)]
    ours = restored(plan, run_ranks(ranks, lambda rank, mesh: step(plan, mesh, problem, kernel=kernel)))
    exact = problem.out, problem.dq, problem.dk, problem.dv
    for label, x, y, whole in zip(("out", "dq", "dk", "dv"), ours, torchs, exact, strict=True):
        assert x.dtype == dtype
        error, allowed = x.double() - whole, y.double() - whole
        assert dtype == torch.float32 or error.norm() <= 1.1 * allowed.norm(), label
        assert error.abs().max() <= 2 * allowed.abs().max(), label


HOSTS_OF_4 = spanwise.H100.with_host_size(4)


def one_key(ranks: int, **way: Any) -> spanwise.Plan:
    """Every row reads key 0 alone."""
    mask = SpanMask(np.zeros((1, ranks), int), np.ones((1, ranks), int), ranks)
    return spanwise.make_plan(mask, ranks, balancer="contiguous", **way, block_size=1)


# The plan, K/V heads, and the gradient of each row's output by head, which rank 0 gets with dv: in bfloat16 256 + 1 is
# 256 again, and a running sum would lose every 1. What rank 0 adds itself does not travel.
ONES, RELAYS = [[0.0], [256.0], *[[1.0]] * 6], one_key(12, exchange="hierarchical", hardware=HOSTS_OF_4)
ALONE = [[0.0], [1.0], [0.0], [0.0], [256.0], [1.0], [0.0], [0.0], [256.0], [1.0], [0.0], [0.0]]
SUMS = {f"{named(way)}": (one_key(8, **way), 1, ONES, 262.0) for way in EXCHANGES[:-1]} | {
    # Ulysses adds tokens where they are computed, and what travels is a sum over heads, also of a K/V head of several.
    "ulysses": (one_key(4, exchange="ulysses"), 3, [3 * [256.0, 1.0, 1.0, 1.0], *[[0.0] * 12] * 3], 260.0),
    "relays": (RELAYS, 1, ALONE, 516.0),  # two hosts send one row home each; 515 in bfloat16
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_summed_in_float32(name: str) -> None:
    plan, kv_heads, grads, total = SUMS[name]
    heads = len(grads[0]), kv_heads, kv_heads

    def on_rank(rank: int, mesh: Any) -> torch.Tensor:
        q, k, v = (torch.ones(1, n, 1, 8, dtype=torch.bfloat16).requires_grad_() for n in heads)
        out = spanwise.context_parallel_attention(q, k, v, plan, mesh)
        out.backward(torch.tensor(grads[rank]).view(1, -1, 1, 1).expand(out.shape).to(out.dtype))
        return v.grad

    dv = run_ranks(plan.num_ranks, on_rank)
    assert dv[0].unique().tolist() == [total] and all(not x.any() for x in dv[1:])
    assert name != "relays" or RELAYS.route().wire_tokens[0][4:].sum() == 2


# ---------------------------------------------------------------- gradients of other parameters


@pytest.mark.parametrize(("way", "ranks", "several"), covering(EXCHANGES, [1, 2, 3, 4], [False, True]), ids=named)
def test_gradients_of_what_a_score_mod_reads(way: dict[str, Any], ranks: int, several: bool) -> None:
    """Summed over the ranks, those of slopes, a table and sinks are those of one device."""
    mask = SpanMask.documents(CU_SEQLENS) & SpanMask.sliding_window(LENGTH, 12)
    heads = heads_for(way)
    problem = make_problem(mask.dense(), heads=heads)
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads[0],), (5,), (heads[0], 3) if several else (heads[0],)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def attend(plan: spanwise.Plan, mesh: Any) -> list[torch.Tensor]:
        slopes, table, sinks = own = [x.clone().requires_grad_() for x in given]

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * table[q_idx % 5] - slopes[h] * (q_idx - kv_idx)

        return [*step(plan, mesh, problem, score_mod=score_mod, sinks=sinks), *(x.grad for x in own)]

    whole = attend(spanwise.make_plan(mask, 1), None)
    plan = spanwise.make_plan(mask, ranks, balancer="head_tail", block_size=8, **way)
    results = run_ranks(ranks, lambda rank, mesh: attend(plan, mesh))
    for x, want in zip(restored(plan, [result[:4] for result in results]), whole[:4], strict=True):
        assert relative_error(x, want) <= 1e-10
    for parts, want in zip(zip(*(result[4:] for result in results), strict=True), whole[4:], strict=True):
        assert relative_error(sum(parts), want) <= 1e-10


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_sinks_of_one_device(kernel: str) -> None:
    """Those of minus infinity add nothing; the gradient of one that weighs little has all digits of float32."""
    plan = spanwise.make_plan(DOCUMENTS, 1)

    def results(sinks: torch.Tensor) -> list[torch.Tensor]:
        leaf, problem = sinks.clone().requires_grad_(), make_problem(DOCUMENTS.dense(), dtype=torch.float32)
        wide = {name: getattr(problem, name).to(sinks.dtype) for name in ("q", "k", "v", "grad_out")}
        found = step(plan, None, problem._replace(**wide), kernel=kernel, sinks=leaf)
        return [*found, leaf.grad.view(4, -1).sum(-1)]

    several = torch.full((4, 3), -math.inf, dtype=torch.float64)
    several[1, 2] = 0.5
    for x, y in zip(results(several), results(several.amax(1)), strict=True):
        assert x.isfinite().all() and torch.allclose(x, y, rtol=1e-12, atol=1e-14)
    little = torch.full((4,), -10.0)
    assert relative_error(results(little)[-1], results(little.double())[-1]) <= 1e-5


def test_latents_that_all_heads_read() -> None:
    """Queries in the space of latents: V is K's first part. Half precision is cast also where rows expand again."""
    problem = make_problem(DOCUMENTS.dense(), heads=(12, 1), dims=(5, 3), dtype=torch.bfloat16)
    plan = spanwise.make_plan(DOCUMENTS, 3, exchange="needed", block_size=8)

    def expand(latents: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.nn.functional.linear(latents, torch.eye(3))
        return torch.cat([latents, rope], -1), latents

    def results(attend: Any, place: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        own = [place(x).to(dtype).requires_grad_() for x in (problem.q, *problem.k.split([3, 2], -1))]
        out = attend(*own)
        return [out, *torch.autograd.grad(out, own, place(problem.grad_out).to(dtype))]

    def dense(q: torch.Tensor, latents: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return dense_attention(q, torch.cat([latents, rope], -1), latents, torch.from_numpy(DOCUMENTS.dense()))[0]

    def on_rank(rank: int, mesh: Any) -> list[torch.Tensor]:
        def attend(*rows: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return spanwise.context_parallel_attention(*rows, plan, mesh, kernel="sdpa", expand=expand)

        return results(attend, lambda x: spanwise.shard(plan, mesh, x.detach(), dim=2), torch.bfloat16)

    wanted = results(dense, lambda x: x.detach().clone(), torch.float64)
    for rank, found in enumerate(run_ranks(3, on_rank)):
        for got, want in zip(found, wanted, strict=True):
            assert relative_error(got.detach(), plan.shard(want.detach(), rank, dim=2)) <= 5e-2

"""packed_attention on threaded ranks: outputs, options, head counts, deterministic mode and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import spanwise
from spanwise import AuxRequest, SpanMask, _torch
from spanwise.layouts.packing import Packing
from tests.pairs import named
from tests.ranks.harness import run_ranks
from tests.ranks.packed_problem import check, covering_ways, cumulative, make_packed, run, ways

# Offsets that begin after 0, slots that are full, empty and nothing but padding, and rows after the last slot.
PADDED = Packing(
    cumulative([9, 0, 16, 1, 0, 11]), cu_seqlens_q_padded=cumulative([16, 8, 16, 8, 0, 16], first=8), q_len=80
)
UNPADDED = Packing(cumulative([9, 0, 1, 21, 0, 12]))
# A sequence with queries and no keys, one with keys and no queries.
CROSS = Packing(
    cumulative([9, 0, 16, 1]),
    cu_seqlens_q_padded=cumulative([16, 8, 16, 8], first=8),
    cu_seqlens_kv=cumulative([0, 7, 8, 1]),
    cu_seqlens_kv_padded=cumulative([8, 8, 16, 8]),
)


KERNELS = ["reference", "sdpa"]
PACKINGS = {"padded": PADDED, "unpadded": UNPADDED, "cross": CROSS}


def plan_of(packing: Packing, num_ranks: Any, exchange: dict[str, Any], causal: bool = True) -> spanwise.Plan:
    dealt = "dual_chunk" if packing.padded and num_ranks != 3 else "lpt"  # slots are multiples of 8
    mask = packing.mask(causal=causal)
    return spanwise.make_plan(mask, num_ranks, packing=packing, balancer=dealt, **exchange, block_size=8)


# ---------------------------------------------------------------- max_logit, softcap, sinks, score_mod


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "softcap", "kernel"), covering_ways((2, 4), [None, 0.7], KERNELS), ids=named
)
def test_max_logit_is_that_of_valid_tokens_on_all_ranks(
    num_ranks: Any, exchange: dict[str, Any], softcap: float | None, kernel: str
) -> None:
    """Every rank has all heads; huge finite values in padding count for nothing."""
    change = None if softcap is None else lambda s, i, j: softcap * torch.tanh(s / softcap)
    problem = make_packed(PADDED, poison=1e30, change=change)
    plan = plan_of(PADDED, num_ranks, exchange)
    results = run(problem, plan, kernel=kernel, softcap=softcap, max_logit=True)
    assert all(result.max_logit.shape == (12,) for result in results)
    check(problem, plan, results, 1e-10)


@pytest.mark.parametrize(("num_ranks", "exchange"), ways(2))
def test_max_logit_without_a_visible_key(num_ranks: Any, exchange: dict[str, Any]) -> None:
    packing = Packing([0, 8], cu_seqlens_kv=[0, 0], cu_seqlens_kv_padded=[0, 8])
    plan = plan_of(packing, num_ranks, exchange, causal=False)
    problem = make_packed(packing, causal=False)
    for result in run(problem, plan, kernel="sdpa", max_logit=True):
        assert result.max_logit.eq(-math.inf).all() and result.lse.eq(-math.inf).all() and result.out.eq(0).all()


@pytest.mark.parametrize(("num_ranks", "exchange", "kernel"), covering_ways((2, 4), KERNELS), ids=named)
def test_softcap(num_ranks: Any, exchange: dict[str, Any], kernel: str) -> None:
    problem = make_packed(PADDED, change=lambda s, i, j: 0.7 * torch.tanh(s / 0.7), scale=0.5, with_grad_lse=True)
    plan = plan_of(PADDED, num_ranks, exchange)
    check(problem, plan, run(problem, plan, kernel=kernel, softcap=0.7, scale=0.5), 1e-10)


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "kind", "kernel"), covering_ways((2, 4), list(PACKINGS), KERNELS), ids=named
)
def test_sinks_and_their_gradient(num_ranks: Any, exchange: dict[str, Any], kind: str, kernel: str) -> None:
    """Summed over the ranks, the gradients of the sinks are those of one device; no cotangent of padding enters."""
    packing = PACKINGS[kind]
    causal = packing.square
    problem = make_packed(packing, causal=causal, with_sinks=True, with_grad_lse=True)
    plan = plan_of(packing, num_ranks, exchange, causal=causal)
    check(problem, plan, run(problem, plan, kernel=kernel), 1e-10)


@pytest.mark.parametrize(("num_ranks", "exchange", "kind"), covering_ways((2, 3, 4), ["padded", "unpadded"]), ids=named)
def test_score_mod_sees_global_heads_and_positions(num_ranks: Any, exchange: dict[str, Any], kind: str) -> None:
    packing = PACKINGS[kind]
    slopes = torch.linspace(-1, 1, 12, dtype=torch.float64)

    def change(scores: torch.Tensor, q_rows: torch.Tensor, kv_rows: torch.Tensor) -> torch.Tensor:
        return scores + slopes[:, None, None] * 0.1 * (kv_rows[None] - q_rows[:, None]) * torch.cos(q_rows[:, None])

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * 0.1 * (kv_idx - q_idx) * torch.cos(q_idx)

    problem = make_packed(packing, change=change)
    plan = plan_of(packing, num_ranks, exchange)
    check(problem, plan, run(problem, plan, kernel="reference", score_mod=score_mod), 1e-10)


# ---------------------------------------------------------------- heads and head dims


SHAPES = [
    ((4, 4), (192, 128)),  # multi-head latent attention, as DeepSeek trains it
    ((4, 1), (192, 128)),
    ((4, 1), (576, 512)),  # and with its projections absorbed: one latent K/V head
    ((12, 12), (8, 8)),
    ((12, 6), (8, 8)),
    ((12, 3), (8, 8)),
    ((12, 1), (8, 8)),
    ((32, 4), (8, 12)),  # values wider than keys
]


@pytest.mark.parametrize(("num_ranks", "exchange", "shape", "kernel"), covering_ways((4,), SHAPES, KERNELS), ids=named)
def test_heads_and_head_dims(
    num_ranks: Any, exchange: dict[str, Any], shape: tuple[tuple[int, int], tuple[int, int]], kernel: str
) -> None:
    heads, dims = shape
    problem = make_packed(PADDED, heads=heads, dims=dims)
    plan = plan_of(PADDED, num_ranks, exchange)
    check(problem, plan, run(problem, plan, kernel=kernel), 1e-10)


# ---------------------------------------------------------------- deterministic mode


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch's deterministic mode; with it, memory that nothing has written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "dtype", "kind"),
    covering_ways((2, 4), [torch.float32, torch.bfloat16], list(PACKINGS)),
    ids=named,
)
def test_deterministic_mode(
    deterministic: None,
    num_ranks: Any,
    exchange: dict[str, Any],
    dtype: torch.dtype,
    kind: str,
) -> None:
    """Nothing raises, two runs agree bit by bit, and no value that nothing has written gets into a result."""
    packing, tolerance = PACKINGS[kind], 2e-6 if dtype == torch.float32 else 3.5e-2
    causal = packing.square
    problem = make_packed(packing, causal=causal, dtype=dtype, with_sinks=True, with_grad_lse=True)
    plan = plan_of(packing, num_ranks, exchange, causal=causal)
    first, second = (run(problem, plan, kernel="sdpa", max_logit=True) for _ in range(2))
    check(problem, plan, first, tolerance)
    for rank, (one, other) in enumerate(zip(first, second, strict=True)):
        for name, x, y in zip(one._fields, one, other, strict=True):
            assert torch.equal(x, y), f"rank {rank} {name}"


# ---------------------------------------------------------------- errors


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collectives that any rank starts, other than the comparison of plans (of bytes)."""
    names: list[str] = []

    def recorded(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, *args: Any) -> Any:
            if x.dtype != torch.uint8:
                names.append(name)
            return start(x, *args)

        return call

    for name in ("start_all_gather", "start_reduce_scatter", "start_all_to_all", "start_all_reduce"):
        monkeypatch.setattr(_torch, name, recorded(name, getattr(_torch, name)))
    return names


def on_every_rank(
    plan: spanwise.Plan | Callable[[int], spanwise.Plan],
    match: str,
    *,
    num_ranks: int = 2,
    mesh_shape: tuple[int, int] | None = None,
    edit: Callable[..., Any] = lambda q, k, v: (q, k, v),
    heads: tuple[int, int] = (4, 2),
    **options: Any,
) -> None:
    """Every rank's call raises ValueError with `match` in its text; no rank waits for another."""

    def on_rank(rank: int, mesh: object) -> None:
        own = plan if isinstance(plan, spanwise.Plan) else plan(rank)
        q = torch.randn(own.layout.num_tokens(rank), heads[0], 8)
        k, v = (torch.randn(own.kv_layout.num_tokens(rank), heads[1], 8) for _ in range(2))
        with pytest.raises(ValueError, match=match):
            spanwise.packed_attention(*edit(q, k, v), own, mesh, **options)

    axes = {} if mesh_shape is None else {"mesh_shape": mesh_shape, "mesh_dim_names": ("outer", "inner")}
    run_ranks(num_ranks, on_rank, **axes)


def replicated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: Any) -> Any:
    return DTensor.from_local(q, mesh, [Replicate()], run_check=False), k, v


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda q, k, v: (q[None], k[None], v[None]), r"must be \[tokens, heads, head_dim\], got q \(1, 26, 4, 8\)"),
        (lambda q, k, v: (q, k[:, 0], v), r"\[tokens, heads, head_dim\].* k \(26, 8\).*context_parallel_attention"),
        (lambda q, k, v: (q[:-1], k, v), r"holds 26 tokens and 26 keys.*shard\(plan, mesh, x, dim=0\)"),
        (lambda q, k, v: (q, k[:-1], v), r"holds 26 tokens and 26 keys.*shard\(plan, mesh, x, dim=0\)"),
        (
            lambda q, k, v: (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)),
            r"holds 26 tokens and 26 keys.*shard\(plan, mesh, x, dim=0\)",
        ),
        (lambda q, k, v: (q[:, :3], k, v), "3 query heads are not a multiple of 2"),
        (lambda q, k, v: (q, k, v[:, :1]), "must agree"),
        (lambda q, k, v: (q[..., :4], k, v), "must agree"),
        (lambda q, k, v: (q, k.bfloat16(), v), "share dtype"),
    ],
)
@pytest.mark.parametrize("exchange", ["all_gather", "needed", "ring", "ulysses"])
def test_tensors_that_are_no_shards(edit: Any, match: str, exchange: str, started: list[str]) -> None:
    packing = Packing([0, 9, 9, 52])
    plan = spanwise.make_plan(
        packing.mask(), 2, packing=packing, balancer="head_tail", exchange=exchange, block_size=13
    )
    assert plan.layout.tokens_per_rank.tolist() == [26, 26]
    on_every_rank(plan, match, edit=edit)
    assert not started


@pytest.mark.parametrize("given", [None, UNPADDED.mask()], ids=["None", "a mask"])
def test_something_else_in_place_of_a_plan(given: Any) -> None:
    q = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="packed_attention needs a Plan or RankPlan, got"):
        spanwise.packed_attention(q, q, q, given, None)


@pytest.mark.parametrize("exchange", ["needed", "ulysses"])
def test_heads_that_the_plan_was_not_made_for(exchange: str, started: list[str]) -> None:
    """Ranks whose heads differ would exchange messages of different sizes: each of them sees it for itself."""
    packing = Packing([0, 9, 9, 52])
    told = dict(num_q_heads=4, num_kv_heads=2, head_dim=8)
    plan = spanwise.make_plan(packing.mask(), 2, packing=packing, exchange=exchange, block_size=13, **told)
    on_every_rank(plan, r"made for .* = \(4, 2, 8, 8\), got \(4, 4, 8, 8\)", heads=(4, 4))
    on_every_rank(plan, r"made for .*got \(4, 2, 8, 6\)", edit=lambda q, k, v: (q, k, v[..., :6]))
    on_every_rank(plan, "return_aux must be spanwise.AuxRequest.*got True", return_aux=True)
    on_every_rank(plan, "return_aux must be spanwise.AuxRequest.*got False", return_aux=False)
    assert not started


def test_dtensors_are_refused(started: list[str]) -> None:
    plan = plan_of(UNPADDED, 2, {"exchange": "all_gather"})

    def on_rank(rank: int, mesh: Any) -> None:
        q = torch.randn(plan.layout.num_tokens(rank), 2, 8)
        with pytest.raises(ValueError, match=r"q is a DTensor; call q\.to_local"):
            spanwise.packed_attention(*replicated(q, q, q, mesh), plan, mesh)

    run_ranks(2, on_rank)
    assert not started


def test_masks_for_batch_rows_are_refused(started: list[str]) -> None:
    plan = spanwise.make_plan(SpanMask.stack([SpanMask.causal(16), SpanMask.full(16)]), 2, balancer="contiguous")
    on_every_rank(plan, "packed tensors are one batch row")
    on_every_rank(lambda rank: plan, "packed tensors are one batch row")
    assert not started


def test_keys_of_another_length(started: list[str]) -> None:
    plan = plan_of(CROSS, 2, {"exchange": "needed"}, causal=False)
    on_every_rank(plan, "holds 28 tokens and 20 keys", edit=lambda q, k, v: (q, q[:, :2], q[:, :2]))
    assert not started


def test_lengths_that_exceed_storage() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens in cu_seqlens_q, but .* storage for 8 only"):
        Packing([0, 5, 14], cu_seqlens_q_padded=[0, 8, 16])
    with pytest.raises(ValueError, match="sequence 0 has 9 tokens in cu_seqlens_kv, but .* storage for 8 only"):
        Packing([0, 5], cu_seqlens_q_padded=[0, 8], cu_seqlens_kv=[0, 9], cu_seqlens_kv_padded=[0, 8])
    with pytest.raises(ValueError, match="q_len = 15 rows of storage are too few: the last sequence ends at 16"):
        Packing([0, 5, 13], cu_seqlens_q_padded=[0, 8, 16], q_len=15)


@pytest.mark.parametrize("exchange", ["all_gather", "needed", "ring", "ulysses"])
@pytest.mark.parametrize(
    ("packing", "match"),
    [
        (Packing([0, 5, 13], cu_seqlens_q_padded=[0, 8, 18]), "sequence 1 has a padded length of 10 query tokens"),
        (Packing([0, 5, 13], cu_seqlens_q_padded=[2, 10, 18]), "storage before sequence 0 has a padded length of 2"),
        (Packing([0, 8, 16], q_len=17), "storage after the last sequence has a padded length of 1"),
        (Packing([0, 8], cu_seqlens_kv=[0, 5]), "sequence 0 has a padded length of 5 key tokens"),
    ],
)
def test_slots_that_dual_chunks_cannot_cut(packing: Packing, match: str, exchange: str) -> None:
    with pytest.raises(ValueError, match=f"{match}.* multiple of 2 \\* num_ranks = 4; any other balancer"):
        spanwise.make_plan(packing.mask(causal=False), 2, packing=packing, balancer="dual_chunk", exchange=exchange)


@pytest.mark.parametrize(
    "others",
    [
        Packing([0, 5, 11], cu_seqlens_q_padded=[0, 8, 16]),  # one valid token less
        Packing([0, 4, 12], cu_seqlens_q_padded=[0, 8, 16]),
        Packing([0, 5, 5, 12], cu_seqlens_q_padded=[0, 8, 8, 16]),  # one empty sequence more: the same mask
    ],
)
@pytest.mark.parametrize(("num_ranks", "exchange"), ways(2))
def test_ranks_whose_cu_seqlens_differ(
    num_ranks: Any, exchange: dict[str, Any], others: Packing, started: list[str]
) -> None:
    mine = Packing([0, 5, 12], cu_seqlens_q_padded=[0, 8, 16])
    plans = [plan_of(packing, num_ranks, exchange) for packing in (mine, others)]
    assert plans[0].fingerprint != plans[1].fingerprint
    ranks, last = plans[0].num_ranks, plans[0].num_ranks - 1
    on_every_rank(
        lambda rank: plans[rank == last],
        f"(?s)different plans.*{plans[1].fingerprint}" if ranks == 2 else "different plans",
        num_ranks=ranks,
        mesh_shape=(2, 2) if ranks == 4 else None,
    )
    assert not started


@pytest.mark.parametrize("exchange", ["all_gather", "needed", "ring"])
def test_heads_that_do_not_divide(exchange: str, started: list[str]) -> None:
    match = "'ulysses' cannot divide 5 query heads .* 5 heads go with 1, 5 ranks"
    pure = plan_of(UNPADDED, 2, {"exchange": "ulysses"})
    on_every_rank(pure, match, heads=(5, 1))
    two_level = plan_of(UNPADDED, (2, 2), {"exchange": exchange})
    on_every_rank(two_level, match, num_ranks=4, mesh_shape=(2, 2), heads=(5, 1))
    with pytest.raises(ValueError, match=match):
        spanwise.make_plan(UNPADDED.mask(), (2, 2), packing=UNPADDED, exchange=exchange, num_q_heads=5, num_kv_heads=1)
    assert not started


def test_options_that_a_kernel_refuses(started: list[str]) -> None:
    plan = plan_of(PADDED, 2, {"exchange": "ulysses"})
    on_every_rank(plan, "cannot apply a score_mod", kernel="sdpa", score_mod=lambda s, b, h, i, j: s)
    on_every_rank(plan, "one logit a query head", sinks=torch.zeros(2))
    on_every_rank(plan, "no mask named 'window'", mask_name="window")
    request = AuxRequest(max_logit=True)
    change = {"kernel": "reference", "score_mod": lambda s, b, h, i, j: s}
    on_every_rank(plan, "without a score_mod", **change, return_aux=request)
    assert not started

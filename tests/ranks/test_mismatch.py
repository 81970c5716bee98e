"""Ranks whose calls of attention differ: an error on every rank that says what each has; no number, and no abort."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import spanwise
from spanwise import SpanMask, _torch
from spanwise.attention import call_log
from spanwise.attention.call_log import Call
from spanwise.attention.compare import mesh_ranks
from tests.limits import HANG
from tests.oracle import make_problem, relative_error
from tests.ranks.calls import HOSTS, mismatch
from tests.ranks.gloo import GlooPool, hear, tell

LENGTH = 48
EXCHANGES = ("needed", "all_gather", "ring", "ulysses")
LEVELS: dict[str, Any] = {"mesh_shape": (2, 2), "mesh_dim_names": ("outer", "inner")}
Options = dict[str, Any]


def local_plan(mesh: DeviceMesh, which: str = "a", exchange: str = "needed") -> spanwise.RankPlan:
    """Plans a and b give the ranks equally many tokens, so that every tensor of one fits the other."""
    causal, window = SpanMask.causal(LENGTH), SpanMask.sliding_window(LENGTH, 20)
    apart = SpanMask.documents(range(0, LENGTH + 1, LENGTH // mesh.size()))
    masks = {
        "a": {"full": causal, "near": window}, "b": {"full": window, "near": causal},
        "apart": {"full": apart, "near": apart},  # nothing travels
    }[which]  # fmt: skip
    plan = spanwise.make_plan(
        masks, mesh.size() if mesh.ndim == 1 else tuple(mesh.mesh.shape), balancer="contiguous", block_size=4,
        exchange=exchange, hardware=HOSTS if exchange == "hierarchical" else None,
    )  # fmt: skip
    return plan.local(mesh, kernel="sdpa")


def attend(mesh: DeviceMesh, plan: spanwise.RankPlan, compiled: bool = False, **options: Any) -> Any:
    """A call with tensors of some sizes, dtypes and needs for gradients."""
    sizes = {"batch": 1, "heads": 4, "dim": 8, "dtype": torch.float32, "grad": True} | options
    batch, heads, dim, dtype, grad = (sizes.pop(name) for name in ("batch", "heads", "dim", "dtype", "grad"))
    rest = {"mask_name": "full", "kernel": "reference" if dtype == torch.float16 else "sdpa"} | sizes
    made = [torch.ones(batch, h, plan.tokens.shape[1], dim, dtype=dtype) / (1 + h) for h in (heads, 4, 4)]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: spanwise.RankPlan) -> Any:
        return spanwise.context_parallel_attention(q, k, v, plan, mesh, **rest)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    return run(*(x.requires_grad_(grad) for x in made), plan)


def step(mesh: DeviceMesh, plan: spanwise.RankPlan, **options: Any) -> None:
    """A call and its backward, if it has one."""
    out = attend(mesh, plan, **options)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.sum().backward()


CHANGES: dict[str, tuple[Options, str]] = {
    "another plan": ({"plan": "b"}, "rank 1: plan "),
    "another mask": ({"mask_name": "near"}, "rank 1: mask near"),
    "half precision of another kind": ({"dtype": torch.float16}, "dtype float16"),
    "a wider dtype": ({"dtype": torch.float64}, "rank 1: dtype float64"),
    "batch": ({"batch": 3}, r"\(3, 4, 4, 8, 8\)"),
    "head dim": ({"dim": 16}, r"\(1, 4, 4, 16, 16\)"),
    "query heads": ({"heads": 8}, r"\(1, 8, 4, 8, 8\)"),
    "kernel": ({"kernel": "reference"}, "rank 1: kernel reference"),
    "no gradients": ({"grad": False}, "rank 1: requires grad"),
    "scale": ({"scale": 2.0}, "rank 1: scale 2.0"),
    "softcap": ({"softcap": 3.0}, "rank 1: softcap 3.0"),
    "max_logit": ({"return_aux": spanwise.AuxRequest(max_logit=True)}, "rank 1: returns"),
}


def differ(rank: int, mesh: DeviceMesh, exchange: str, names: list[str], steady: int) -> list[str]:
    """The error of each change; rank 1's call differs after `steady` equal calls."""
    local = {which: local_plan(mesh, which, exchange) for which in ("a", "b")}
    said = []
    for name in names:
        for _ in range(steady):
            step(mesh, local["a"])
        options = dict(CHANGES[name][0]) if rank == 1 else {}
        plan = local[options.pop("plan", "a")]
        said.append(mismatch(functools.partial(step, mesh, plan, **options)))
    if not steady:  # nobody had gone on, so the groups still work
        step(mesh, local["a"])
    return said


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_first_call_that_differs_raises_on_every_rank_and_leaves_the_groups_usable(
    gloo_pool: GlooPool, exchange: str
) -> None:
    for said in gloo_pool.run(2, differ, exchange, [*CHANGES], 0):
        for name, text in zip(CHANGES, said, strict=True):
            assert re.search(r"ranks disagree on call \d+", text), (name, text)
            assert "rank 0: context_parallel_attention(plan " in text
            assert re.search(CHANGES[name][1], text), (name, text)


@pytest.mark.parametrize(
    ("exchange", "name"),
    [
        *((exchange, "another plan") for exchange in (*EXCHANGES, "hierarchical")),
        *((exchange, "a wider dtype") for exchange in ("ring", "hierarchical")),
        ("ulysses", "no gradients"),
    ],
)
def test_a_call_that_differs_after_equal_ones_raises_on_every_rank(
    gloo_pool: GlooPool, exchange: str, name: str
) -> None:
    """The others repeat what they did, go on, and wait for rank 1."""
    num_ranks, others = (2, "rank 0: ") if exchange == "ulysses" else (3, "ranks 0, 2: ")
    for (text,) in gloo_pool.run(num_ranks, differ, exchange, [name], 8):
        assert re.search(CHANGES[name][1], text) and f"{others}context_parallel_attention" in text, text


# ---------------------------------------------------------------- scenarios: one error on every rank, or none


def two_known_plans(rank: int, mesh: DeviceMesh) -> None:
    """All ranks know both plans and their order; then rank 1 takes the other one."""
    local = {which: local_plan(mesh, which) for which in ("a", "b")}
    for which in [*"abababababababab", "b" if rank == 1 else "a"]:
        step(mesh, local[which], batch=1 + (which == "b"))


def one_of_two_axes(rank: int, mesh: DeviceMesh, steady: int) -> None:
    """Rank 1 of a mesh of two axes differs alone; rank 2 shares no axis with it."""
    local = local_plan(mesh)
    for _ in range(steady):
        step(mesh, local)
    step(mesh, local, **({"dim": 16} if rank == 1 else {}))


def eager_and_compiled(rank: int, mesh: DeviceMesh, all_compiled: bool) -> None:
    changes = {"dtype": torch.float64} if all_compiled and rank == 1 else {}
    attend(mesh, local_plan(mesh), compiled=rank == 1 or all_compiled, **changes)


def compiled_layer_left_out(rank: int, mesh: DeviceMesh, backend: str) -> None:
    """Compiled layers that are all alike; in a later step rank 1 leaves one out."""
    torch._dynamo.reset()
    local = local_plan(mesh)

    @torch.compile(fullgraph=True, backend=backend)
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, local, mesh, mask_name="full", kernel="sdpa")

    with spanwise.exchange_errors(mesh):  # rank 0 had gone on
        for number in range(6):
            qkv = [torch.ones(1, 4, local.tokens.shape[1], 8, requires_grad=True) for _ in range(3)]
            for out in [call(*qkv) for _ in range(3 - (rank == 1 and number == 5))]:
                out.sum().backward()


def another_call(rank: int, mesh: DeviceMesh) -> None:
    local = local_plan(mesh)
    if rank == 1:
        spanwise.unshard(local, mesh, torch.ones(1, local.tokens.shape[1]))
    attend(mesh, local)


def many_calls_ahead(rank: int, mesh: DeviceMesh) -> None:
    """Rank 0 reads nothing of others and makes many calls before rank 1, which is late, makes another one."""
    local = local_plan(mesh, "apart")
    for _ in range(16):
        attend(mesh, local)
    if rank == 1:
        hear(mesh, "rank 0 has called")
    outs = [attend(mesh, local, **({"scale": 2.0} if rank == 1 else {})) for _ in range(12)]
    if rank == 0:
        tell(mesh, "rank 0 has called")
    outs[0].sum().backward()


def skips(rank: int, mesh: DeviceMesh, exchange: str, moment: str) -> None:
    """Layers that are all alike; in one step rank 1 leaves one out, or its backward."""
    local = local_plan(mesh, "a", exchange)
    for number in range(5):
        differs = rank == 1 and number == 3
        outs = [attend(mesh, local) for _ in range(4 - (differs and moment == "forward"))]
        for out in outs[differs and moment == "backward" :]:
            out.sum().backward()


def next_plan(rank: int, mesh: DeviceMesh) -> None:
    """A plan for each step; rank 1 leaves a backward out and comes to the plan of the next step."""
    for number in range(6):
        out = attend(mesh, local_plan(mesh))
        if not (rank == 1 and number == 4):
            out.sum().backward()


def equal_numbers(rank: int, mesh: DeviceMesh) -> None:
    """Equal scales of other types; the tensor is new in every call of rank 1."""
    local, kept = local_plan(mesh), torch.tensor(2.0)
    for number in range(12):
        scale: Any = [2.0, 2, kept.clone() if rank else kept][number % 3 if rank else (number + number // 6) % 3]
        step(mesh, local, scale=scale)


def forks(rank: int, mesh: DeviceMesh) -> None:
    """A process forked in the middle of a comparison ends before rank 1 joins, and takes no part in the parent's."""
    local = local_plan(mesh, "apart")
    for _ in range(16):
        attend(mesh, local)
    if rank == 0:
        attend(mesh, local)  # not compared before rank 1 makes it
        (log,) = call_log.logs()
        with log._changed:  # as the thread may have it at any moment
            child = os.fork()
            if not child:
                call_log.FLUSH = HANG
                call_log._finish()
                os._exit(0)
        os.waitpid(child, 0)
        tell(mesh, "the child has ended")
    if rank == 1:
        hear(mesh, "the child has ended")
        attend(mesh, local)
    for _ in range(3):
        step(mesh, local)


def orders(rank: int, mesh: DeviceMesh, exchange: str, differs: str, before: int) -> None:
    """Calls of equal sizes and their backwards in another order on rank 0, or with other backwards."""
    called = ["full", "near"] if differs == "another order of forwards" else ["full", "full"]
    masks = {"full": SpanMask.causal(96), "near": SpanMask.sliding_window(96, 60)}
    plan = spanwise.make_plan(masks, mesh.size(), exchange=exchange, balancer="head_tail", block_size=4, keep_kv=True)
    local = plan.local(mesh)

    def training(differs: str) -> None:
        outs = []
        for name in reversed(called) if differs == "another order of forwards" else called:
            q, k, v = (torch.randn(1, 6, local.tokens.shape[1], 8, requires_grad=True) for _ in range(3))
            call = functools.partial(spanwise.context_parallel_attention, mask_name=name)
            recomputed = differs == "a checkpoint"
            outs.append(checkpoint(call, q, k, v, local, use_reentrant=False) if recomputed else call(q, k, v, local))
            if differs == "a gradient of q alone":
                torch.autograd.grad(outs[0].sum(), [q])
                return
        for out in reversed(outs) if differs == "another order" else outs:
            out.sum().backward()

    for _ in range(before):
        training("")
    training(differs if rank == 0 else "")
    training("")


def no_connection(rank: int, mesh: DeviceMesh) -> None:
    """Hosts whose other network does not connect them."""
    with (
        mock.patch.object(_torch, "host_group", side_effect=RuntimeError("no route to host")),
        pytest.raises(spanwise.ExchangeError, match=f"connections to compare calls failed on rank {rank}") as error,
    ):
        local_plan(mesh)
    assert "spanwise.compare_calls leaves them out" in str(error.value) and "no route to host" in str(error.value)


class Scenario(NamedTuple):
    """What ranks do, and what the error of each names; none if nothing."""

    run: Callable[..., None]
    args: tuple[Any, ...] = ()
    texts: tuple[str, ...] = ()
    ranks: int = 2
    mesh: Any = {}  # noqa: RUF012
    marks: tuple[Any, ...] = ()


CALL = "rank 0: context_parallel_attention"
COMPILED, SLOW = pytest.mark.compiles, pytest.mark.slow
# A layer makes two exchanges in a step; a ring that fetches K/V again in the backward, three.
SKIPS = {
    (exchange, moment): f"ranks disagree on call {1 + 12 * (3 if exchange == 'ring' else 2) + after} "
    for exchange in EXCHANGES[:3]
    for moment, after in (("forward", 4), ("backward", 5))
}
ORDERS = [
    (exchange, differs, before, ranks)
    for exchange in EXCHANGES
    for differs in ("another order", "a checkpoint", "a gradient of q alone", "another order of forwards")
    for before, ranks in ((0, 2), (4, 3))
]
QUICK = [ORDERS[i] for i in (1, 10, 21, 25, 31)]
SCENARIOS = {
    "two known plans": Scenario(two_known_plans, (), (r"\(2, 4, 4, 8, 8\)",), 3),
    **{f"one of two axes after {n}": Scenario(one_of_two_axes, (n,), (r"ranks 0, 2, 3: context_parallel_attention\(",
                                              r"\(1, 4, 4, 16, 16\)"), 4, LEVELS) for n in (0, 8)},
    "eager and compiled": Scenario(eager_and_compiled, (False,), ("compiled context_parallel",), marks=(COMPILED,)),
    "compiled": Scenario(eager_and_compiled, (True,), ("compiled context_parallel",), marks=(COMPILED, SLOW)),
    **{f"a layer left out by {backend}": Scenario(
        compiled_layer_left_out, (backend,), ("rank 1: backward of compiled context_parallel_attention",),
        marks=(COMPILED, *([SLOW] if backend == "inductor" else []))) for backend in ("aot_eager", "inductor")},
    "another call": Scenario(another_call, (), (r"rank 0: context_parallel_attention\(", "rank 1: unshard or roll")),
    "many calls ahead": Scenario(many_calls_ahead, (), ("disagree on call 18 ", "rank 1: scale 2.0", CALL)),
    **{f"skips {moment} of {exchange}": Scenario(
        skips, (exchange, moment), ("backward of context_parallel_attention", text),
        marks=() if (exchange == "needed") == (moment == "forward") else (SLOW,))
       for (exchange, moment), text in SKIPS.items()},
    "next plan": Scenario(next_plan, (), (r"rank 0: backward of context_parallel", r"rank 1: plan.local\(\)")),
    **{f"{exchange}, {differs}, {before}": Scenario(
        orders, (exchange, differs, before), ("mask near" if "forwards" in differs else "of call",), ranks,
        marks=() if (exchange, differs, before, ranks) in QUICK else (SLOW,))
       for exchange, differs, before, ranks in ORDERS},
    "equal numbers": Scenario(equal_numbers),
    "forked": Scenario(forks),
    "the same order of needed": Scenario(orders, ("needed", "", 1)),
    "the same order of ring": Scenario(orders, ("ring", "", 1)),
    "no connection": Scenario(no_connection),
}  # fmt: skip


def said(rank: int, mesh: DeviceMesh, name: str) -> str:
    scenario = SCENARIOS[name]
    return mismatch(lambda: scenario.run(rank, mesh, *scenario.args))


@pytest.mark.parametrize("name", [pytest.param(name, marks=x.marks) for name, x in SCENARIOS.items()])
def test_scenarios(gloo_pool: GlooPool, name: str) -> None:
    scenario = SCENARIOS[name]
    for text in gloo_pool.run(scenario.ranks, said, name, **scenario.mesh):
        assert all(re.search(each, text) for each in scenario.texts), text
        assert bool(text) == bool(scenario.texts), text


# ---------------------------------------------------------------- what is left after a comparison


def no_traffic(rank: int, mesh: DeviceMesh) -> tuple[str, bool]:
    """Rank 0 computes a whole output before it can learn that rank 1's scale is another."""
    local = local_plan(mesh, "apart")
    for _ in range(8):
        step(mesh, local)
    q, k, v = (torch.ones(1, 4, local.tokens.shape[1], 8, requires_grad=True) for _ in range(3))
    finished = []

    def call() -> None:
        scale = 2.0 if rank == 1 else None
        out = spanwise.context_parallel_attention(q, k, v, local, mesh, mask_name="full", kernel="sdpa", scale=scale)
        finished.append(out)
        out.sum().backward()

    text = mismatch(call)
    assert q.grad is None and k.grad is None and v.grad is None
    return text, bool(finished)


def test_no_gradient_comes_from_calls_that_differ(gloo_pool: GlooPool) -> None:
    (first, finished), (second, _) = gloo_pool.run(2, no_traffic)
    assert finished and "rank 1: scale 2.0" in first and "rank 1: scale 2.0" in second


def recovered(rank: int, mesh: DeviceMesh) -> float:
    """After a mismatch that all ranks met in the call itself, a right call gives right numbers."""
    mask = SpanMask.causal(LENGTH)
    num_ranks: Any = mesh.size() if mesh.ndim == 1 else (2, 2)
    local = spanwise.make_plan(mask, num_ranks, exchange="needed", block_size=4).local(mesh, kernel="sdpa")
    problem = make_problem(mask.dense(), heads=(4, 4))
    q, k, v, grad = (spanwise.shard(local, mesh, x, dim=2) for x in problem[:4])
    with pytest.raises(spanwise.MismatchError, match="scale 0.25"):
        spanwise.context_parallel_attention(q, k, v, local, mesh, kernel="sdpa", scale=[0.5, 0.25][rank % 2])
    q.requires_grad_()
    out = spanwise.context_parallel_attention(q, k, v, local, mesh, kernel="sdpa")
    (dq,) = torch.autograd.grad(out, q, grad)
    return relative_error(dq, spanwise.shard(local, mesh, problem.dq, dim=2))


@pytest.mark.parametrize("axes", [{}, LEVELS], ids=["one axis", "two axes"])
def test_after_a_mismatch_in_the_call_itself_the_ranks_go_on(gloo_pool: GlooPool, axes: Any) -> None:
    assert max(gloo_pool.run(4, recovered, **axes)) < 1e-10


def passes(rank: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Steps that are alike on all ranks, of every kind: no error, and all calls are compared in the end."""
    local = {which: local_plan(mesh, which) for which in ("a", "apart")}
    for number in range(6):
        outs = [attend(mesh, local["a"], mask_name=mask) for mask in ("full", "near")]
        sum(out.sum() for out in outs).backward(retain_graph=True)
        outs[0].sum().backward()
        out, extra = attend(mesh, local["a"], return_aux=spanwise.AuxRequest(lse=True))
        # Ranks may use other results of a call.
        (out.sum() if rank % 2 else out.sum() + extra.lse.sum()).backward()
        with torch.no_grad():
            attend(mesh, local["apart"])
        q, k, v = (torch.ones(1, 4, local["a"].tokens.shape[1], 8, requires_grad=True) for _ in range(3))
        checkpoint(
            lambda q, k, v: spanwise.context_parallel_attention(q, k, v, local["a"], mesh, mask_name="full"),
            q, k, v, use_reentrant=number % 2 == 0,
        ).sum().backward()  # fmt: skip
    (log,) = call_log.logs()
    log.confirm(log.count, HANG)
    return log.count, log.confirmed


def test_equal_steps_of_every_kind_are_no_mismatch(gloo_pool: GlooPool) -> None:
    for count, confirmed in gloo_pool.run(3, passes):
        assert count == confirmed > 60


def many(rank: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Calls made faster than the thread compares them. How far it lags is a matter of the machine's load."""
    log = call_log.log_of(*mesh_ranks(mesh))
    assert log is not None
    tell(mesh, f"{rank} begins")
    hear(mesh, "0 begins", "1 begins")
    for _ in range(5000):
        log.add(Call("attention"))
    log.confirm(log.count, HANG)
    return log.count, log.confirmed


def test_the_thread_catches_up_with_thousands_of_calls(gloo_pool: GlooPool) -> None:
    for count, confirmed in gloo_pool.run(2, many):
        assert count == confirmed >= 5000


def switched_off(rank: int, mesh: DeviceMesh) -> tuple[int, str]:
    """Nothing travels, so that ranks that differ do not notice."""
    scale = {"scale": 2.0} if rank else {}
    spanwise.compare_calls(mesh, False)
    local = local_plan(mesh, "apart")
    different = mismatch(lambda: step(mesh, local, **scale))
    none = len(call_log.logs())
    spanwise.compare_calls(mesh, True)
    return none, different or mismatch(lambda: step(mesh, local, **scale))


def test_the_comparison_can_be_switched_off(gloo_pool: GlooPool) -> None:
    for none, text in gloo_pool.run(2, switched_off):
        assert none == 0 and "rank 1: scale 2.0" in text, text

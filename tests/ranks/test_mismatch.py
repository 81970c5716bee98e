"""Ranks that make different calls: an error on every rank that says what each has; no number, and no abort."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any
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
from tests.ranks.gloo import GlooPool, hear, tell

LENGTH = 48
EXCHANGES = ("needed", "all_gather", "ring", "ulysses")
HOSTS = spanwise.H100.with_host_size(2)
Change = Callable[[dict[str, Any]], None]


def plan_of(which: str, exchange: str, num_ranks: int) -> spanwise.Plan:
    """Plans a and b give the ranks equally many tokens, so that every tensor of one fits the other."""
    causal, window = SpanMask.causal(LENGTH), SpanMask.sliding_window(LENGTH, 20)
    masks = {"a": {"full": causal, "near": window}, "b": {"full": window, "near": causal}}
    apart = {name: SpanMask.documents(range(0, LENGTH + 1, LENGTH // num_ranks)) for name in ("full", "near")}
    return spanwise.make_plan(
        (masks | {"apart": apart})[which], num_ranks, balancer="contiguous", block_size=4, exchange=exchange,
        hardware=HOSTS if exchange == "hierarchical" else None,
    )  # fmt: skip


def inputs(options: dict[str, Any]) -> list[torch.Tensor]:
    """q, k, v of one rank for the options of a call; those in `options` that are not of the call are taken out."""
    batch, heads, dim = options.pop("batch", 1), options.pop("heads", 4), options.pop("dim", 8)
    dtype, grad = options.pop("dtype", torch.float32), options.pop("grad", True)
    tokens = options["plan"].tokens.shape[1]
    made = [torch.ones(batch, h, tokens, dim, dtype=dtype) / (1 + h) for h in (heads, 4, 4)]
    return [x.requires_grad_(grad) for x in made]


def attend(options: dict[str, Any], mesh: DeviceMesh, compiled: bool = False) -> torch.Tensor:
    q, k, v = inputs(options)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        rest = {name: value for name, value in options.items() if name != "plan"}
        return spanwise.context_parallel_attention(q, k, v, plan, mesh, **rest)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    return run(q, k, v, options["plan"])


def mismatch(run: Callable[[], Any]) -> str:
    """The text of the `MismatchError` that `run` raises, empty if it raises none."""
    try:
        run()
    except spanwise.MismatchError as error:
        return str(error)
    return ""


def step(options: dict[str, Any], mesh: DeviceMesh) -> None:
    """A call and its backward, if it has one."""
    out = attend(options, mesh)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.sum().backward()


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
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


def options_for(plan: str, plans: dict[str, spanwise.RankPlan], changes: dict[str, Any]) -> dict[str, Any]:
    options = {"mask_name": "full", "kernel": "sdpa", "plan": plan} | changes
    if options.get("dtype") == torch.float16:
        options["kernel"] = "reference"
    return options | {"plan": plans[options["plan"]]}


def differ(rank: int, mesh: DeviceMesh, exchange: str, names: list[str], steady: int) -> list[str]:
    """The error of each case; rank 1's call differs after `steady` equal calls."""
    local = {which: plan_of(which, exchange, mesh.size()).local(mesh, kernel="sdpa") for which in ("a", "b")}
    said = []
    for name in names:
        for _ in range(steady):
            step(options_for("a", local, {}), mesh)
        options = options_for("a", local, CHANGES[name][0] if rank == 1 else {})
        said.append(mismatch(functools.partial(step, options, mesh)))
    if not steady:  # nobody had gone on, so the groups still work
        step(options_for("a", local, {}), mesh)
    return said


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_first_call_that_differs_raises_on_every_rank_and_leaves_the_groups_usable(
    gloo_pool: GlooPool, exchange: str
) -> None:
    names = [*CHANGES]
    for said in gloo_pool.run(2, differ, exchange, names, 0):
        for name, text in zip(names, said, strict=True):
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


def two_known_plans(rank: int, mesh: DeviceMesh) -> str:
    """All ranks know both plans and their order; then rank 1 takes the other one."""
    local = {which: plan_of(which, "needed", mesh.size()).local(mesh, kernel="sdpa") for which in ("a", "b")}
    plans = [*"abababababababab", "b" if rank == 1 else "a"]
    steps = [options_for(which, local, {"batch": 1 + (which == "b")}) for which in plans]
    return mismatch(lambda: [step(options, mesh) for options in steps])


def test_rank_0_repeats_a_known_plan_while_rank_1_takes_another_known_one(gloo_pool: GlooPool) -> None:
    for text in gloo_pool.run(3, two_known_plans):
        assert "ranks disagree on call 35 " in text and "(2, 4, 4, 8, 8)" in text, text


def no_traffic(rank: int, mesh: DeviceMesh) -> tuple[str, bool]:
    """Nothing travels: rank 0 computes a whole output before it can learn that rank 1's scale is another."""
    local = {"a": plan_of("apart", "needed", mesh.size()).local(mesh, kernel="sdpa")}
    for _ in range(8):
        attend(options_for("a", local, {}), mesh).sum().backward()
    options = options_for("a", local, {"scale": 2.0} if rank == 1 else {})
    q, k, v = inputs(options)
    came_out = False
    try:
        rest = {name: value for name, value in options.items() if name != "plan"}
        out = spanwise.context_parallel_attention(q, k, v, options["plan"], mesh, **rest)
        came_out = True
        out.sum().backward()
    except spanwise.MismatchError as error:
        assert q.grad is None and k.grad is None and v.grad is None
        return str(error), came_out
    return "", came_out


def test_no_gradient_comes_from_calls_that_differ(gloo_pool: GlooPool) -> None:
    (first, came_out), (second, _) = gloo_pool.run(2, no_traffic)
    assert came_out and "rank 1: scale 2.0" in first and "rank 1: scale 2.0" in second


def alone(rank: int, mesh: DeviceMesh, steady: int) -> str:
    """Rank 1 of a mesh of two axes differs alone; rank 2 shares no axis with it."""
    mask = SpanMask.causal(LENGTH)
    plan = spanwise.make_plan({"full": mask}, (2, 2), exchange="needed", block_size=4)
    local = plan.local(mesh, kernel="sdpa")
    for _ in range(steady):
        step(options_for("a", {"a": local}, {}), mesh)
    options = options_for("a", {"a": local}, {"dim": 16} if rank == 1 else {})
    return mismatch(lambda: step(options, mesh))


@pytest.mark.parametrize("steady", [0, 8])
def test_one_rank_of_two_axes_differs(gloo_pool: GlooPool, steady: int) -> None:
    for text in gloo_pool.run(4, alone, steady, mesh_shape=(2, 2), mesh_dim_names=("outer", "inner")):
        assert "ranks 0, 2, 3: context_parallel_attention(" in text and "(1, 4, 4, 16, 16)" in text, text


def eager_and_compiled(rank: int, mesh: DeviceMesh, all_compiled: bool) -> str:
    local = {which: plan_of(which, "needed", mesh.size()).local(mesh, kernel="sdpa") for which in ("a", "b")}
    changes = {"dtype": torch.float64} if all_compiled and rank == 1 else {}
    options = options_for("a", local, changes)
    return mismatch(lambda: attend(options, mesh, compiled=rank == 1 or all_compiled))


@pytest.mark.compiles
@pytest.mark.parametrize("all_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_calls_are_compared_before_their_collectives(gloo_pool: GlooPool, all_compiled: bool) -> None:
    for text in gloo_pool.run(2, eager_and_compiled, all_compiled):
        assert "compiled context_parallel_attention" in text and "ranks disagree on call 3 " in text, text


def leaves_out(rank: int, mesh: DeviceMesh, backend: str) -> tuple[int, str]:
    """Compiled layers that are all alike; in a later step rank 1 leaves one out."""
    torch._dynamo.reset()
    local = plan_of("a", "needed", mesh.size()).local(mesh, kernel="sdpa")

    @torch.compile(fullgraph=True, backend=backend)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, local, mesh, mask_name="full", kernel="sdpa")

    def steps(fewer: int) -> None:
        for number in range(3):
            outs = [attend(*inputs({"plan": local})) for _ in range(3 - fewer * (rank == 1 and number == 2))]
            for out in outs:
                out.sum().backward()

    def differ() -> None:
        with spanwise.exchange_errors(mesh):  # rank 0 had gone on
            steps(1)

    steps(0)
    (log,) = call_log.logs()
    return log.count, mismatch(differ)


@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_backwards_are_compared(gloo_pool: GlooPool, backend: str) -> None:
    for count, text in gloo_pool.run(2, leaves_out, backend):
        assert count == 1 + 18  # the plan, and each call once
        assert "call 34 " in text and "rank 1: backward of compiled context_parallel_attention" in text, text


def other_order(rank: int, mesh: DeviceMesh) -> str:
    plan = plan_of("a", "needed", mesh.size())
    local = plan.local(mesh, kernel="sdpa")

    def calls() -> None:
        if rank == 1:
            spanwise.unshard(local, mesh, torch.ones(1, local.tokens.shape[1]))
        attend(options_for("a", {"a": local}, {}), mesh)

    return mismatch(calls)


def test_another_order_of_calls(gloo_pool: GlooPool) -> None:
    for text in gloo_pool.run(2, other_order):
        assert "rank 0: context_parallel_attention(" in text and "rank 1: unshard or roll(" in text, text


def recovered(rank: int, mesh: DeviceMesh, levels: tuple[int, int] | None) -> float:
    """After a mismatch that all ranks met in the call itself, a right call gives right numbers."""
    mask = SpanMask.causal(LENGTH)
    num_ranks: Any = levels or mesh.size()
    local = spanwise.make_plan(mask, num_ranks, exchange="needed", block_size=4).local(mesh, kernel="sdpa")
    problem = make_problem(mask.dense(), heads=(4, 4))
    q, k, v, grad = (spanwise.shard(local, mesh, x, dim=2) for x in problem[:4])
    with pytest.raises(spanwise.MismatchError, match="scale 0.25"):
        spanwise.context_parallel_attention(q, k, v, local, mesh, kernel="sdpa", scale=[0.5, 0.25][rank % 2])
    q.requires_grad_()
    out = spanwise.context_parallel_attention(q, k, v, local, mesh, kernel="sdpa")
    (dq,) = torch.autograd.grad(out, q, grad)
    return relative_error(dq, spanwise.shard(local, mesh, problem.dq, dim=2))


@pytest.mark.parametrize("levels", [None, (2, 2)])
def test_after_a_mismatch_in_the_call_itself_the_ranks_go_on(gloo_pool: GlooPool, levels: Any) -> None:
    names = {} if levels is None else {"mesh_shape": levels, "mesh_dim_names": ("outer", "inner")}
    assert max(gloo_pool.run(4, recovered, levels, **names)) < 1e-10


def ahead(rank: int, mesh: DeviceMesh) -> str:
    """Rank 0 reads nothing of others and makes many calls before rank 1, which is late, makes another one."""
    local = {"a": plan_of("apart", "needed", mesh.size()).local(mesh, kernel="sdpa")}
    for _ in range(16):
        attend(options_for("a", local, {}), mesh)
    if rank == 1:
        hear(mesh, "rank 0 has called")

    def calls() -> None:
        outs = [attend(options_for("a", local, {"scale": 2.0} if rank == 1 else {}), mesh) for _ in range(12)]
        if rank == 0:
            tell(mesh, "rank 0 has called")
        outs[0].sum().backward()

    return mismatch(calls)


def test_a_rank_that_is_many_calls_ahead_still_says_what_it_had(gloo_pool: GlooPool) -> None:
    for text in gloo_pool.run(2, ahead):
        assert "ranks disagree on call 18 " in text and "rank 1: scale 2.0" in text, text
        assert "rank 0: context_parallel_attention(plan " in text, text


def skips(rank: int, mesh: DeviceMesh, exchange: str, moment: str) -> str:
    """Layers that are all alike; in one step rank 1 leaves one out, or its backward."""
    local = {"a": plan_of("a", exchange, mesh.size()).local(mesh, kernel="sdpa")}

    def training() -> None:
        for number in range(5):
            differs = rank == 1 and number == 3
            options = [options_for("a", local, {}) for _ in range(4 - (differs and moment == "forward"))]
            for out in [attend(each, mesh) for each in options][differs and moment == "backward" :]:
                out.sum().backward()

    return mismatch(training)


@pytest.mark.parametrize(
    ("exchange", "moment"),
    [
        pytest.param(
            exchange, moment, marks=[] if (exchange == "needed") == (moment == "forward") else pytest.mark.slow
        )
        for exchange in EXCHANGES[:3]
        for moment in ("forward", "backward")
    ],
)
def test_a_rank_that_skips_one_of_equal_calls(gloo_pool: GlooPool, exchange: str, moment: str) -> None:
    exchanges = 3 if exchange == "ring" else 2  # of a layer in a step; this ring fetches K/V again in the backward
    number = 1 + 3 * 4 * exchanges + (4 if moment == "forward" else 5)
    for text in gloo_pool.run(2, skips, exchange, moment):
        assert "backward of context_parallel_attention" in text, text
        assert f"ranks disagree on call {number} " in text, text


def goes_on(rank: int, mesh: DeviceMesh) -> str:
    """A plan for each step; rank 1 leaves a backward out and comes to the plan of the next step."""

    def training() -> None:
        for number in range(6):
            out = attend(options_for("a", {"a": plan_of("a", "needed", 2).local(mesh, kernel="sdpa")}, {}), mesh)
            if not (rank == 1 and number == 4):
                out.sum().backward()

    return mismatch(training)


def test_a_rank_that_goes_on_to_the_next_plan(gloo_pool: GlooPool) -> None:
    for text in gloo_pool.run(2, goes_on):
        assert "rank 0: backward of context_parallel_attention(" in text and "rank 1: plan.local()" in text, text


def passes(rank: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Steps that are alike on all ranks, of every kind: no error, and all calls are compared in the end."""
    local = {which: plan_of(which, "needed", mesh.size()).local(mesh, kernel="sdpa") for which in ("a", "apart")}
    aux = {"return_aux": spanwise.AuxRequest(lse=True)}
    for number in range(6):
        outs = [attend(options_for("a", local, {"mask_name": mask}), mesh) for mask in ("full", "near")]
        sum(out.sum() for out in outs).backward(retain_graph=True)
        outs[0].sum().backward()
        out, extra = attend(options_for("a", local, aux), mesh)
        # Ranks may use other results of a call.
        (out.sum() if rank % 2 else out.sum() + extra.lse.sum()).backward()
        with torch.no_grad():
            attend(options_for("apart", local, {}), mesh)
        q, k, v = inputs({"plan": local["a"]})
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


def numbers(rank: int, mesh: DeviceMesh) -> str:
    """Equal scales of other types; the tensor is new in every call of rank 1."""
    local = {"a": plan_of("a", "needed", mesh.size()).local(mesh, kernel="sdpa")}
    kept = torch.tensor(2.0)

    def calls() -> None:
        for number in range(12):
            scale: Any = [2.0, 2, kept.clone() if rank else kept][number % 3 if rank else (number + number // 6) % 3]
            step(options_for("a", local, {"scale": scale}), mesh)

    return mismatch(calls)


def test_equal_numbers_of_other_types_are_no_mismatch(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, numbers) == [""] * 2


def forks(rank: int, mesh: DeviceMesh) -> str:
    """A process forked in the middle of a comparison ends before rank 1 joins, and takes no part in the parent's."""
    local = {"a": plan_of("apart", "needed", mesh.size()).local(mesh, kernel="sdpa")}
    for _ in range(16):
        attend(options_for("a", local, {}), mesh)
    if rank == 0:
        attend(options_for("a", local, {}), mesh)  # not compared before rank 1 makes it
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
        attend(options_for("a", local, {}), mesh)
    return mismatch(lambda: [step(options_for("a", local, {}), mesh) for _ in range(3)])


def test_a_forked_process_leaves_the_comparison_alone(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, forks) == [""] * 2


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
    spanwise.compare_calls(mesh, False)
    local = {"a": plan_of("apart", "needed", mesh.size()).local(mesh, kernel="sdpa")}
    different = mismatch(lambda: step(options_for("a", local, {"scale": 2.0} if rank else {}), mesh))
    none = len(call_log.logs())
    spanwise.compare_calls(mesh, True)
    return none, different or mismatch(lambda: step(options_for("a", local, {"scale": 2.0} if rank else {}), mesh))


def test_the_comparison_can_be_switched_off(gloo_pool: GlooPool) -> None:
    for none, text in gloo_pool.run(2, switched_off):
        assert none == 0 and "rank 1: scale 2.0" in text, text


def unreachable(rank: int, mesh: DeviceMesh) -> str:
    """Hosts whose other network does not connect them."""
    with mock.patch.object(_torch, "host_group", side_effect=RuntimeError("no route to host")):
        try:
            plan_of("a", "needed", mesh.size()).local(mesh)
        except spanwise.ExchangeError as error:
            return str(error)
    return ""


def test_hosts_that_cannot_connect_say_so_in_the_first_call(gloo_pool: GlooPool) -> None:
    for text in gloo_pool.run(2, unreachable):
        assert text.startswith("connections to compare calls failed on rank "), text
        assert "spanwise.compare_calls leaves them out" in text and "no route to host" in text, text

"""Ranks that make different calls: an error on every rank that says what each has; no number, and no abort."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import SpanMask
from spanwise.attention.exchange.calls import Call, Expectation
from tests.oracle import make_problem, relative_error
from tests.ranks.gloo import GlooPool

LENGTH = 48
EXCHANGES = ("needed", "all_gather", "ring", "ulysses")
Change = Callable[[dict[str, Any]], None]


def plan_of(which: str, exchange: str, num_ranks: int) -> spanwise.Plan:
    """Plans a and b give the ranks equally many tokens, so that every tensor of one fits the other."""
    causal, window = SpanMask.causal(LENGTH), SpanMask.sliding_window(LENGTH, 20)
    masks = {"a": {"full": causal, "near": window}, "b": {"full": window, "near": causal}}
    apart = {name: SpanMask.documents(range(0, LENGTH + 1, LENGTH // num_ranks)) for name in ("full", "near")}
    return spanwise.make_plan(
        (masks | {"apart": apart})[which], num_ranks, balancer="contiguous", block_size=4, exchange=exchange
    )


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


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another plan": ({"plan": "b"}, "rank 1: plan "),
    "another mask": ({"mask_name": "near"}, "rank 1: mask near"),
    "half precision of another kind": ({"dtype": torch.float16}, "dtype float16"),
    "a wider dtype": ({"dtype": torch.float64}, "rank 1: dtype float64"),
    "batch": ({"batch": 3}, r"\(3, 4, 8\)"),
    "head dim": ({"dim": 16}, r"\(1, 4, 16\)"),
    "query heads": ({"heads": 8}, r"\(1, 8, 8\)"),
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


def differ(rank: int, mesh: DeviceMesh, exchange: str, names: list[str], steady: int) -> list[tuple[str, float]]:
    """The error of each case, and its seconds; rank 1's call differs after `steady` equal calls."""
    local = {which: plan_of(which, exchange, mesh.size()).local(mesh, kernel="sdpa") for which in ("a", "b")}
    said = []
    for name in names:
        for _ in range(steady):
            attend(options_for("a", local, {}), mesh).sum().backward()
        began = time.monotonic()
        try:
            out = attend(options_for("a", local, CHANGES[name][0] if rank == 1 else {}), mesh)
            if isinstance(out, torch.Tensor) and out.requires_grad:
                out.sum().backward()
            said.append(("", time.monotonic() - began))
        except spanwise.MismatchError as error:
            said.append((str(error), time.monotonic() - began))
    if not steady:  # nobody had gone on, so the groups still work
        attend(options_for("a", local, {}), mesh).sum().backward()
    return said


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_first_call_that_differs_raises_on_every_rank_and_leaves_the_groups_usable(
    gloo_pool: GlooPool, exchange: str
) -> None:
    names = [*CHANGES]
    for said in gloo_pool.run(2, differ, exchange, names, 0):
        for name, (text, seconds) in zip(names, said, strict=True):
            assert re.search(r"ranks disagree on call \d+", text) and seconds < 10.0, (name, text)
            assert "rank 0: context_parallel_attention(plan " in text
            assert re.search(CHANGES[name][1], text), (name, text)


@pytest.mark.parametrize("name", ["another plan", "a wider dtype", "no gradients"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_call_that_differs_after_equal_ones_raises_on_every_rank(
    gloo_pool: GlooPool, exchange: str, name: str
) -> None:
    """The others repeat what they did, go on, and wait for rank 1."""
    num_ranks, others = (2, "rank 0: ") if exchange == "ulysses" else (3, "ranks 0, 2: ")
    for ((text, seconds),) in gloo_pool.run(num_ranks, differ, exchange, [name], 8):
        assert re.search(CHANGES[name][1], text) and f"{others}context_parallel_attention" in text, text
        assert seconds < 10.0


def two_known_plans(rank: int, mesh: DeviceMesh) -> str:
    """All ranks know both plans and their order; then rank 1 takes the other one."""
    local = {which: plan_of(which, "needed", mesh.size()).local(mesh, kernel="sdpa") for which in ("a", "b")}
    try:
        for which in "abababababababab":
            attend(options_for(which, local, {"batch": 1 + (which == "b")}), mesh).sum().backward()
        which = "b" if rank == 1 else "a"
        attend(options_for(which, local, {"batch": 1 + (which == "b")}), mesh).sum().backward()
    except spanwise.MismatchError as error:
        return str(error)
    return ""


def test_rank_0_repeats_a_known_plan_while_rank_1_takes_another_known_one(gloo_pool: GlooPool) -> None:
    for text in gloo_pool.run(3, two_known_plans):
        assert "ranks disagree on call 17" in text and "(2, 4, 8)" in text, text


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
        attend(options_for("a", {"a": local}, {}), mesh).sum().backward()
    try:
        attend(options_for("a", {"a": local}, {"dim": 16} if rank == 1 else {}), mesh).sum().backward()
    except spanwise.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("steady", [0, 8])
def test_one_rank_of_two_axes_differs(gloo_pool: GlooPool, steady: int) -> None:
    for text in gloo_pool.run(4, alone, steady, mesh_shape=(2, 2), mesh_dim_names=("outer", "inner")):
        assert "ranks 0, 2, 3: context_parallel_attention(" in text and "(1, 4, 16)" in text, text


def eager_and_compiled(rank: int, mesh: DeviceMesh, all_compiled: bool) -> str:
    local = {which: plan_of(which, "needed", mesh.size()).local(mesh, kernel="sdpa") for which in ("a", "b")}
    changes = {"dtype": torch.float64} if all_compiled and rank == 1 else {}
    try:
        attend(options_for("a", local, changes), mesh, compiled=rank == 1 or all_compiled)
    except spanwise.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("all_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_calls_are_compared_before_their_collectives(gloo_pool: GlooPool, all_compiled: bool) -> None:
    for text in gloo_pool.run(2, eager_and_compiled, all_compiled):
        assert "compiled context_parallel_attention" in text and "ranks disagree on call 1" in text, text


def other_order(rank: int, mesh: DeviceMesh) -> str:
    plan = plan_of("a", "needed", mesh.size())
    local = plan.local(mesh, kernel="sdpa")
    try:
        if rank == 1:
            spanwise.unshard(local, mesh, torch.ones(1, local.tokens.shape[1]))
        attend(options_for("a", {"a": local}, {}), mesh)
    except spanwise.MismatchError as error:
        return str(error)
    return ""


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


def test_equal_histories_expect_the_same_and_repeating_ones_expect_what_comes() -> None:
    kinds = [Call(b"plan", "attention", ("mask",), (mask,)) for mask in ("near", "near", "near", "full")]
    steps = [call for step in range(6) for call in kinds + kinds[::-1]]
    expected = Expectation()
    met = [expected.meets(call) for call in steps]
    assert all(met[-8:]) and not met[0]
    other = Expectation()
    assert [other.meets(call) for call in steps] == met
    # What is expected follows from the calls before, not from the call itself.
    for calls in itertools.product(kinds[2:], repeat=6):
        first, second = Expectation(), Expectation()
        assert [first.meets(call) for call in calls[:-1]] == [second.meets(call) for call in calls[:-1]]
        assert first.meets(kinds[2]) + second.meets(kinds[3]) <= 1
    assert not expected.meets(kinds[0]._replace(plan=b"other")) and expected.meets(kinds[0]._replace(plan=b"other"))

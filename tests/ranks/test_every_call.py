"""Every call that communicates: where ranks differ, one is refused, fails or stays away, each rank raises, in time."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise import recurrence
from spanwise.attention import call_log, failure
from tests.limits import HANG
from tests.ranks.calls import mismatch
from tests.ranks.gloo import GlooPool, hear, tell

TOKENS = 4  # of a rank
TREE = spanwise.TokenTree([-1, 0, 0], [2, 1, 2])
SLOW, COMPILED = pytest.mark.slow, pytest.mark.compiles
Options = dict[str, Any]
Call = Callable[[torch.Tensor], Any]


def plan_of(mesh: DeviceMesh, balancer: str = "contiguous") -> spanwise.Plan:
    mask = spanwise.SpanMask.causal(TOKENS * mesh.size())
    return spanwise.make_plan(mask, mesh.size(), balancer=balancer, block_size=2)


def attention(mesh: DeviceMesh, options: Options) -> Call:
    local = plan_of(mesh).local(mesh)
    return lambda x: spanwise.context_parallel_attention(*[x[None, None]] * 3, local)


def packed(mesh: DeviceMesh, options: Options) -> Call:
    local = plan_of(mesh).local(mesh)
    return lambda x: spanwise.packed_attention(*[x[:, None]] * 3, local)


def unshard(mesh: DeviceMesh, options: Options) -> Call:
    local = plan_of(mesh).local(mesh)
    return lambda x: spanwise.unshard(local, x=x[None])


def roll(mesh: DeviceMesh, options: Options) -> Call:
    local, cu = plan_of(mesh).local(mesh), [0, TOKENS * mesh.size()]
    return lambda x: spanwise.roll(x[None], 1, local, cu_seqlens=cu)


def gated_linear(mesh: DeviceMesh, options: Options) -> Call:
    route, gates = recurrence.recurrence_route(plan_of(mesh), mesh), -torch.ones(1, TOKENS, 1)
    return lambda x: recurrence.gated_linear(*[x[None, :, None]] * 3, gates, route)


def gated_delta(mesh: DeviceMesh, options: Options) -> Call:
    """Behind a convolution."""
    route = recurrence.recurrence_route(plan_of(mesh), mesh)
    bias, normalize = options.get("bias"), options.get("normalize", False)

    def call(x: torch.Tensor) -> Any:
        x = recurrence.causal_conv(x[None], torch.ones(5, 3), bias, route)[:, :, None]
        gates = torch.full((1, x.shape[1], 1), 0.5)
        return recurrence.gated_delta(x, x, x, -gates, gates, route, normalize=normalize)

    return call


def causal_conv(mesh: DeviceMesh, options: Options) -> Call:
    route, width = recurrence.recurrence_route(plan_of(mesh), mesh), options.get("width", 3)
    return lambda x: recurrence.causal_conv(x, torch.ones(5, width), None, route)


def relayout(mesh: DeviceMesh, options: Options) -> Call:
    way = spanwise.relayout_route(plan_of(mesh), plan_of(mesh, "head_tail"), mesh)
    return lambda x: spanwise.relayout(x, way, dim=0)


def cross_entropy(mesh: DeviceMesh, options: Options) -> Call:
    count, weights = options.get("count", 6), options.get("weights")
    labels = torch.tensor([1, -100, 2, 0])
    return lambda x: spanwise.cross_entropy(x, labels, mesh, num_valid=count, weights=weights)


def linear_cross_entropy(mesh: DeviceMesh, options: Options) -> Call:
    given = {name: options[name] for name in ("softcap", "reduction") if name in options}

    def call(x: torch.Tensor) -> Any:
        weight = torch.ones(7, x.shape[-1])
        return spanwise.linear_cross_entropy(x, weight, torch.arange(TOKENS), loss_mesh=mesh, **given)

    return call


def each_loss(mesh: DeviceMesh, options: Options) -> Call:
    """The loss of each token, which has no collective."""
    return linear_cross_entropy(mesh, {"reduction": "none"} | options)


def token_logprobs(mesh: DeviceMesh, options: Options) -> Call:
    """Scores of hidden states, or of logits, or a loss of them."""
    weight, bias = (torch.ones(shape, dtype=options.get("dtype", torch.float32)) for shape in ((3, 5), (3,)))
    labels = torch.arange(options.get("tokens", TOKENS))
    given = {name: options[name] for name in ("temperature", "softcap", "entropy") if name in options}

    def call(x: torch.Tensor) -> Any:
        x = x[: len(labels)] if "tokens" in options else x
        if "loss" in options:
            return spanwise.linear_cross_entropy(
                x, weight, labels, loss_mesh=None, vocab_mesh=mesh, reduction=options["loss"],
                num_valid=options.get("count"),
            )  # fmt: skip
        return spanwise.token_logprobs(
            x, labels, vocab_weight=None if "logits" in options else weight, bias=bias if "bias" in options else None,
            vocab_mesh=mesh, **given,
        )  # fmt: skip

    return call


def unshard_edges(mesh: DeviceMesh, options: Options) -> Call:
    tree = options.get("tree", TREE)
    own = spanwise.shard_edges(tree, spanwise.make_plan(tree.mask(), 2, block_size=1), mesh)
    return lambda x: spanwise.unshard_edges(own, mesh, x.repeat(2, 1)[: len(own.targets)], dim=0)


# What rank 1 does otherwise, and what the error names. "wrong" is refused on that rank alone: a token too few.
CALLS: dict[Callable[[DeviceMesh, Options], Call], dict[str, tuple[Options, str]]] = {
    attention: {},
    packed: {},
    unshard: {},
    roll: {},
    gated_linear: {},
    gated_delta: {
        "a bias": ({"bias": torch.ones(5)}, "(3, None, True)"),
        "normalized": ({"normalize": True}, "rank 1: gated_delta(normalize=True)"),
    },
    causal_conv: {"a width": ({"width": 2}, "(2, None, False)")},
    relayout: {"no gradient": ({"grad": False}, "requires grad (False,)")},
    cross_entropy: {
        "a count of its own": ({"count": 2}, "rank 1: amount 2.0"),
        "no count": ({"count": None}, "num_valid None, weighted False"),
        "a count in a tensor": ({"count": torch.tensor(6)}, "rank 1: num_valid a tensor"),
        "a wider dtype": ({"dtype": torch.float64}, "rank 1: dtype float64"),
        "weights": ({"weights": torch.ones(TOKENS)}, "rank 1: weighted True"),
        "no gradient": ({"grad": False}, "rank 1: requires grad False"),
    },
    linear_cross_entropy: {
        "a softcap": ({"softcap": 3.0}, "softcap 3.0"),
        "a hidden size": ({"columns": 4}, "last dim (4,)"),
    },
    each_loss: {
        "a sum": ({"reduction": "sum"}, 'linear_cross_entropy(reduction="sum")'),
        "a softcap": ({"softcap": 3.0}, "softcap 3.0"),
    },
    token_logprobs: {
        "fewer tokens": ({"tokens": 3}, "(3, 5)"),
        "a wider dtype": ({"dtype": torch.float64}, "dtype float64"),
        "no gradient": ({"grad": False}, "requires grad False"),
        "a temperature": ({"temperature": 0.5}, "temperature 0.5"),
        "a softcap": ({"softcap": 3.0}, "softcap 3.0"),
        "entropies": ({"entropy": True}, "entropy True"),
        "logits": ({"logits": True}, "given logits"),
        "a bias": ({"bias": True}, "bias True"),
        "another loss": ({"loss": "sum"}, 'linear_cross_entropy(reduction="sum")'),
        "a count": ({"loss": "mean", "count": 5}, "amount 5"),
    },
    unshard_edges: {
        "another tree": ({"tree": spanwise.TokenTree([-1, 0, 0], [2, 1, 3])}, "(6, 5)"),
        "a wider dtype": ({"dtype": torch.float64}, "dtype float64"),
        "no gradient": ({"grad": False}, "requires grad (False,)"),
        "edges of another batch": ({"tree": spanwise.TokenTree([-1, 0, 0], [1, 2, 2])}, "rank 1: plan "),
    },
}


def run(make: Any, mesh: DeviceMesh, options: Options, backend: str | None = None, times: int = 1) -> None:
    """Calls, and then the backward of all but the first `skipped` of them."""
    dtype = options.get("dtype", torch.float32)
    x = torch.ones(TOKENS, options.get("columns", 5), dtype=dtype, requires_grad=options.get("grad", True))
    call = make(mesh, options)
    outs = [(torch.compile(call, backend=backend, fullgraph=True) if backend else call)(x) for _ in range(times)]
    for out in outs[options.get("skipped", 0) :]:
        parts = out if isinstance(out, tuple) else (out,)
        if parts[0].requires_grad:
            sum(part.sum() for part in parts).backward()


# ---------------------------------------------------------------- calls that differ


def differ(
    rank: int, mesh: DeviceMesh, make: Any, names: list[str], backend: str | None, steady: int
) -> dict[str, str]:
    said = {}
    for name in names:
        for _ in range(steady):
            run(make, mesh, {})
        torch._dynamo.reset()  # compiled once for each name, it would meet the limit of torch
        own = CALLS[make][name][0] if rank == 1 else {}
        said[name] = mismatch(lambda own=own: [run(make, mesh, own, backend), run(make, mesh, {}, backend)])
    if not steady:
        run(make, mesh, {}, backend if rank == 0 else None)  # only one rank has compiled it: the same call
    return said


class Differing(NamedTuple):
    make: Any
    names: list[str]
    backend: str | None = None
    steady: int = 0


DIFFERING = [
    *(Differing(make, list(changes)) for make, changes in CALLS.items() if changes),
    # One rank has gone on, and the groups are closed.
    *(Differing(cross_entropy, [name], steady=8) for name in ("a count of its own", "no gradient")),
    pytest.param(Differing(token_logprobs, ["a temperature", "a bias"], "aot_eager"), marks=COMPILED),
    pytest.param(Differing(cross_entropy, ["a count of its own", "no count"], "aot_eager"), marks=COMPILED),
    *(
        pytest.param(Differing(make, [name], "aot_eager"), marks=[COMPILED, SLOW])
        for make, name in ((unshard_edges, "a wider dtype"), (each_loss, "a softcap"))
    ),
    *(
        pytest.param(Differing(make, list(CALLS[make]), "inductor"), marks=[COMPILED, SLOW])
        for make in (token_logprobs, unshard_edges, cross_entropy)
    ),
]


@pytest.mark.parametrize("case", DIFFERING, ids=lambda x: f"{x.make.__name__}-{x.backend}-{x.names[0]}-{x.steady}")
def test_calls_that_differ(gloo_pool: GlooPool, case: Differing) -> None:
    for said in gloo_pool.run(2, differ, *case):
        for name, text in said.items():
            assert "ranks disagree on call" in text and CALLS[case.make][name][1] in text, (name, text)


def skips(rank: int, mesh: DeviceMesh, make: Any, backend: str | None) -> str:
    """Equal steps of several calls; then rank 1 leaves out the backward of one call."""
    torch._dynamo.reset()

    def steps() -> None:
        with spanwise.exchange_errors(mesh):  # compiled code raises torch's own error where it waits
            for number in range(6):
                run(make, mesh, {"skipped": int(rank == 1 and number == 4)}, backend, times=3)

    return mismatch(steps)


@pytest.mark.parametrize("make", [token_logprobs, unshard_edges, gated_delta, causal_conv, relayout])
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=[SLOW, COMPILED])])
def test_a_backward_that_one_rank_leaves_out(gloo_pool: GlooPool, make: Any, backend: str | None) -> None:
    for text in gloo_pool.run(2, skips, make, backend):
        assert "ranks disagree on call" in text and "backward of " in text, text


def counts(rank: int, mesh: DeviceMesh, backend: str | None) -> list[str]:
    """Counts in tensors of the host; and of ranks on two axes, where the loss is the mean over all of them."""
    torch._dynamo.reset()
    both = mesh["dp", "cp"]
    loss = spanwise.cross_entropy(torch.zeros(1, 4, 5), torch.tensor([[1, -100, 2, 0]]), both, num_valid=12).item()
    assert loss == pytest.approx(math.log(5))
    said = []
    for count, own in ((12, 3 + rank // 3), (torch.tensor(6), torch.tensor(6 - 3 * (rank == 3)))):
        run(cross_entropy, both, {"count": count}, backend)
        said.append(mismatch(lambda own=own: run(cross_entropy, both, {"count": own}, backend)))
    return said


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=[SLOW, COMPILED])])
def test_counts_are_compared_over_two_axes(gloo_pool: GlooPool, backend: str | None) -> None:
    for first, second in gloo_pool.run(4, counts, backend, mesh_shape=(2, 2), mesh_dim_names=("dp", "cp")):
        assert "rank 3: amount 4.0" in first, first
        assert "cross_entropy(amount 6.0" in second and "rank 3: amount 3.0" in second, second


# ---------------------------------------------------------------- a call that is refused or fails on one rank


def lives_on(rank: int, mesh: DeviceMesh, make: Any, steady: int) -> str:
    """Rank 1 makes no further call until the others have learned of its error."""
    plan_of(mesh).local(mesh)  # the ranks have compared something before
    call, x = make(mesh, {}), torch.ones(TOKENS, 5)
    for _ in range(steady):
        call(x)
    if rank == 1:
        with pytest.raises(ValueError) as raised:
            call(x[1:])
        hear(mesh, "0 has learned", "2 has learned")
        return str(raised.value)
    with pytest.raises(spanwise.MismatchError) as raised:
        for _ in range(100):
            call(x)
    tell(mesh, f"{rank} has learned")
    return str(raised.value)


REFUSED = [make for make in CALLS if make not in (unshard_edges, each_loss, gated_delta)]


@pytest.mark.parametrize("steady", [0, 16])
@pytest.mark.parametrize(
    "make", [pytest.param(x, marks=[] if x in (attention, linear_cross_entropy) else SLOW) for x in REFUSED]
)
def test_the_others_learn_why_a_call_was_refused(gloo_pool: GlooPool, make: Any, steady: int) -> None:
    first, second, third = gloo_pool.run(3, lives_on, make, steady)
    for text in (first, third):
        assert f"rank 1: an error(raised ValueError: {second})" in text, text


def alike(rank: int, mesh: DeviceMesh) -> tuple[int, int]:
    """All ranks are refused a call, in other words; one is late by more than the patience."""
    call, other, x = attention(mesh, {}), unshard(mesh, {}), torch.ones(TOKENS, 5)
    with mock.patch.object(call_log, "PATIENCE", 0.2):
        for late in (0, 1):
            with pytest.raises(ValueError):
                (call if rank else other)(x[1:])
            if rank == late:
                time.sleep(0.5)  # the longer, the later
            call(x)
    for _ in range(3):
        call(x)
    (log,) = call_log.logs()
    log.confirm(log.count, HANG)
    return log.count, log.confirmed


def test_ranks_that_are_refused_together_go_on(gloo_pool: GlooPool) -> None:
    for count, confirmed in gloo_pool.run(3, alike):
        assert count == confirmed


class Fragile(torch.autograd.Function):
    """Identity whose backward fails where the number is negative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.number < 0:
            raise torch.OutOfMemoryError("no memory")
        return grad, None


def fails(rank: int, mesh: DeviceMesh, inside: str, exchange: str, steady: int, whom: tuple[int, ...]) -> list[str]:
    """Some ranks fail inside a call, or in the backward between two; they leave the step out and go on."""
    plan = spanwise.make_plan(spanwise.SpanMask.causal(12), mesh.size(), block_size=2, exchange=exchange)
    local, said = plan.local(mesh), []

    def score_mod(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        if inside == "forward" and failing:
            raise torch.OutOfMemoryError("no memory")
        return score

    for number in range(steady + 3):
        failing = rank in whom and number == steady
        x = torch.ones(1, 4, local.tokens.shape[1], 8, requires_grad=inside == "backward")
        try:
            out = spanwise.context_parallel_attention(x, x, x, local, kernel="reference", score_mod=score_mod)
            if inside == "backward":
                out = Fragile.apply(out, -1 if failing else 1)
                spanwise.context_parallel_attention(out, out, out, local).sum().backward()
        except RuntimeError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


@pytest.mark.parametrize(
    ("inside", "exchange", "steady"),
    [
        ("forward", "needed", 8), ("backward", "needed", 8),
        pytest.param("forward", "needed", 0, marks=SLOW), pytest.param("forward", "ring", 8, marks=SLOW),
        pytest.param("backward", "needed", 0, marks=SLOW),
    ],
)  # fmt: skip
def test_a_rank_that_fails_ends_the_step_for_all(gloo_pool: GlooPool, inside: str, exchange: str, steady: int) -> None:
    """Its next call would meet what the others still do in this one: wrong numbers, a hang, or an abort inside gloo."""
    first, second, third = gloo_pool.run(3, fails, inside, exchange, steady, (1,))
    for text in (*first, *second[1:], *third):  # a rank that needs nothing of rank 1 finds its error in the next call
        assert text.startswith("MismatchError") and "rank 1" in text, text
        assert ("an error in its backward" if inside == "backward" else "OutOfMemoryError: no memory") in text, text
    assert second[0] == "OutOfMemoryError no memory" and min(map(len, (first, second, third))) >= 2


def fail_alike(rank: int, mesh: DeviceMesh) -> list[str]:
    """However late a rank is."""
    with mock.patch.object(call_log, "PATIENCE", HANG):
        return fails(rank, mesh, "backward", "needed", 3, (0, 1, 2))


def test_ranks_that_fail_alike_go_on(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, fail_alike) == [["OutOfMemoryError no memory"]] * 3


# ---------------------------------------------------------------- a rank that stays away


def one_stays_away(rank: int, mesh: DeviceMesh, make: Any) -> Any:
    """Rank 1 is alive and has made its groups, but does not call before rank 0 has given it up."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=2.0)
    short = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",), backend_override={"cp": ("gloo", options)})
    if rank == 1:
        hear(mesh, "given up")
        return None
    try:
        with mock.patch.object(failure, "GRACE", 0.3):
            make(short, {})(torch.ones(TOKENS, 5))
    except spanwise.ExchangeError as error:
        return error
    finally:
        tell(mesh, "given up")
    return None


@pytest.mark.parametrize(
    "make", [pytest.param(x, marks=[] if x in (attention, causal_conv, cross_entropy) else SLOW) for x in CALLS]
)
def test_a_rank_that_stays_away_is_named_after_the_timeout_of_the_group(gloo_pool: GlooPool, make: Any) -> None:
    error, _ = gloo_pool.run(2, one_stays_away, make)
    assert isinstance(error, spanwise.ExchangeError) and error.lost == (1,), error
    assert "lost: rank 1, no word within" in str(error)
    found = re.search(r"failed on rank 0, .* of 2 ranks, after (\d+\.\d) s", str(error))
    assert found is not None and float(found[1]) >= 2.0, str(error)  # rank 1 stays away until rank 0 has failed


def one_is_late(rank: int, mesh: DeviceMesh) -> list[float]:
    if rank == 1:
        hear(mesh, "0 comes", "2 comes")
    else:
        tell(mesh, f"{rank} comes")
    said = [spanwise.cross_entropy(torch.zeros(1, 4, 5), torch.arange(4)[None], mesh).item()]
    for size in (1, 7, 100_000):
        said.append(failure.all_reduce(torch.ones(size), "sum", mesh, "ones").sum().item() / size)
    return said


def test_a_late_rank_is_waited_for(gloo_pool: GlooPool) -> None:
    for said in gloo_pool.run(3, one_is_late):
        assert said == pytest.approx([math.log(5), 3.0, 3.0, 3.0])

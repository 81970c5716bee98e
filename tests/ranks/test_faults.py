"""Ranks that differ: a table of calls, what rank 1 does otherwise, and what the error of every rank names.

No rank gets a number from calls that differ. All raise `MismatchError`, on 2 and 3 ranks, in a first call and after
equal ones, eager and compiled. Where a rank does not take part at all, or is refused in its very first call on a mesh,
before anything was compared, the others raise when the timeout of their group is over.
"""

from __future__ import annotations

import math
import os
import re
import time
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise.attention import call_log, compare, failure
from tests.limits import HANG
from tests.ranks.calls import mismatch
from tests.ranks.faulty import CALLS, TOKENS, Options, attention, plan_of, play
from tests.ranks.gloo import GlooPool, hear, tell

TWO: dict[str, Any] = {"mesh_shape": (2,)}
AXES: dict[str, Any] = {"mesh_shape": (2, 2), "mesh_dim_names": ("dp", "cp")}
REFUSED = [name for name in CALLS if name not in ("rank_plan", "unshard_edges", "gated_delta")]
COMPILED = pytest.mark.compiles
EXCHANGES = ("needed", "all_gather", "ring", "ulysses", "hierarchical")
LEVELS: dict[str, Any] = {"mesh_shape": (2, 2), "mesh_dim_names": ("outer", "inner")}
STEP = "f b0"

# ---------------------------------------------------------------- arguments that differ: of rank 1, and what is named

ARGUMENTS: dict[str, dict[str, tuple[Options, str]]] = {
    "attention": {
        "plan": ({"plan": "b"}, "rank 1: plan "),
        "mask": ({"mask_name": "near"}, "rank 1: mask near"),
        "dtype": ({"dtype": torch.float64}, "rank 1: dtype float64"),
        "batch": ({"batch": 3}, "(3, 6, 6, 5, 5)"),
        "head dim": ({"columns": 16}, "(1, 6, 6, 16, 16)"),
        "query heads": ({"heads": 12}, "(1, 12, 6, 5, 5)"),
        "kernel": ({"kernel": "reference"}, "rank 1: kernel reference"),
        "no gradient": ({"grad": False}, "rank 1: requires grad"),
        "scale": ({"scale": 2.0}, "rank 1: scale 2.0"),
        "softcap": ({"softcap": 3.0}, "rank 1: softcap 3.0"),
        "max_logit": ({"return_aux": spanwise.AuxRequest(max_logit=True)}, "rank 1: returns"),
        "compiled": ({"backend": "aot_eager"}, "rank 1: compiled context_parallel_attention"),
    },
    "rank_plan": {x: ({"plan": x}, "rank 1: plan ") for x in "bc"},
    "gated_delta": {
        "a bias": ({"bias": torch.ones(5)}, "(3, None, True)"),
        "normalized": ({"normalize": True}, "gated_delta(normalize=True)"),
    },
    "relayout": {"no gradient": ({"grad": False}, "requires grad (False,)"), "columns": ({"columns": 4}, "token (4,)")},
    "cross_entropy": {
        "a count": ({"count": 2}, "rank 1: amount 2.0"),
        "no count": ({"count": None}, "num_valid None, weighted False"),
        "a count in a tensor": ({"count": torch.tensor(6)}, "rank 1: num_valid a tensor"),
        "weights": ({"weights": torch.ones(TOKENS)}, "rank 1: weighted True"),
        "no gradient": ({"grad": False}, "rank 1: requires grad False"),
    },
    "linear_cross_entropy": {
        "a softcap": ({"softcap": 3.0}, "softcap 3.0"),
        "a hidden size": ({"columns": 4}, "last dim (4,)"),
    },
    "token_logprobs": {
        "fewer tokens": ({"tokens": 3}, "(3, 5)"),
        "a temperature": ({"temperature": 0.5}, "temperature 0.5"),
        "a softcap": ({"softcap": 3.0}, "softcap 3.0"),
        "logits": ({"logits": True}, "given logits"),
        "a bias": ({"bias": True}, "bias True"),
        "a loss": ({"loss": True}, "rank 1: for linear_cross_entropy"),
        "a count": ({"loss": True, "count": 5}, "amount 5"),
    },
    "unshard_edges": {
        "another tree": ({"tree": spanwise.TokenTree([-1, 0, 0], [2, 1, 3])}, "(6, 5)"),
        "dtype": ({"dtype": torch.float64}, "dtype float64"),
        "edges of another batch": ({"tree": spanwise.TokenTree([-1, 0, 0], [1, 2, 2])}, "rank 1: plan "),
    },
}  # fmt: skip


class Differing(NamedTuple):
    """Rank 1 has other arguments, in a first call or after `steady` equal steps."""

    name: str
    what: tuple[str, ...]
    ranks: int = 2
    exchange: str = "needed"
    steady: int = 0
    backend: str | None = None


def compiled(name: str, backend: str, *what: str) -> Any:
    return pytest.param(Differing(name, what, backend=backend), marks=COMPILED)


EAGER = tuple(what for what in ARGUMENTS["attention"] if what != "compiled")
DIFFERING = [
    *(Differing("attention", EAGER, exchange=exchange) for exchange in EXCHANGES[:4]),
    *(Differing(name, tuple(changes)) for name, changes in ARGUMENTS.items() if name != "attention"),
    # One rank has gone on, and the groups are closed.
    *(Differing("attention", ("plan",), 2 if x == "ulysses" else 3, x, steady=8) for x in EXCHANGES),
    *(Differing("attention", ("dtype",), 3, x, steady=8) for x in ("ring", "hierarchical")),
    *(Differing("cross_entropy", (what,), steady=8) for what in ("a count", "no gradient")),
    pytest.param(Differing("attention", ("compiled",)), marks=COMPILED),
    compiled("attention", "aot_eager", "dtype", "plan"),
    compiled("token_logprobs", "aot_eager", "a temperature"),
    compiled("cross_entropy", "aot_eager", "a count", "no count"),
    compiled("gated_delta", "eager", "normalized"),
    compiled("relayout", "eager", "columns"),
]


COMPILED_APART = ("attention", "gated_delta", "relayout")  # compiled, they are calls of another name


def made(name: str, mesh: DeviceMesh, options: Options, backend: str | None = None) -> Any:
    call, backend = CALLS[name](mesh, options), options.get("backend", backend)
    return torch.compile(call, backend=backend, fullgraph=True) if backend else call


def differ(rank: int, mesh: DeviceMesh, case: Differing) -> dict[str, str]:
    common, said = {"exchange": case.exchange}, {}
    usual = made(case.name, mesh, common)
    for what in case.what:
        options = common | (ARGUMENTS[case.name][what][0] if rank == 1 else {})
        for _ in range(case.steady):
            play(case.name, mesh, usual, STEP, common)
        torch._dynamo.reset()  # compiled once for each name, it would meet the limit of torch
        call = made(case.name, mesh, options | {"plan": "a"}, case.backend)
        changed = {name: options[name] for name in ("plan",) if name in options}

        def step(call: Any = call, changed: Any = changed, options: Any = options) -> None:
            play(case.name, mesh, lambda x: call(x, **changed), STEP, options)
            play(case.name, mesh, usual, STEP, common)

        said[what] = mismatch(step)
    if not case.steady:  # nobody had gone on, so the groups still work; and one rank may have compiled the same call
        backend = case.backend if rank == 0 and case.name not in COMPILED_APART else None
        play(case.name, mesh, made(case.name, mesh, common, backend), STEP, common)
    return said


@pytest.mark.parametrize("case", DIFFERING, ids=lambda x: f"{x.name}-{x.exchange}-{x.what[0]}-{x.steady}-{x.backend}")
def test_arguments_that_differ(gloo_pool: GlooPool, case: Differing) -> None:
    for said in gloo_pool.run(case.ranks, differ, case):
        for what, text in said.items():
            assert "ranks disagree on call" in text and ARGUMENTS[case.name][what][1] in text, (what, text)
            assert ("ranks 0, 2: " if case.ranks == 3 else "rank 0: ") in text, (what, text)


# ---------------------------------------------------------------- steps that differ


class Step(NamedTuple):
    """A step in the words of `play`: on all ranks `before` times, then on the others, on rank 1, and what is named."""

    name: str
    usual: str
    other: str
    before: int
    texts: tuple[str, ...]
    ranks: int = 2
    exchange: str = "needed"
    backend: str | None = None
    mesh: Any = {}  # noqa: RUF012


THREE = "f f f b0 b1 b2"
ORDER = "f f b1 b0"
STEPS = {
    **{f"{name} without a backward": Step(name, THREE, "f f f b1 b2", 4, ("backward of ",))
       for name in ("token_logprobs", "gated_delta", "relayout")},
    "needed without a forward": Step("attention", "f f f f b0 b1 b2 b3", THREE, 3, ("backward of context_p",)),
    # Another order of the same calls: backwards, under a checkpoint, of q alone, forwards.
    "needed, under a checkpoint": Step("attention", ORDER, "c c b1 b0", 4, ("of call",), 3),
    "all_gather, of q alone": Step("attention", ORDER, "f q0", 0, ("of call",), 2, "all_gather"),
    "ring, backwards": Step("attention", ORDER, "f f b0 b1", 4, ("of call",), 3, "ring"),
    "ulysses, forwards": Step("attention", "f n b1 b0", "n f b1 b0", 0, ("mask near",), 2, "ulysses"),
    "a plan for each step": Step("attention", "p f b0", "p f", 4, ("rank 0: backward of context_parallel",
                                                                   r"rank 1: plan.local\(")),
    "two known plans": Step("attention", "f b0 g b1", "g b0 g b1", 8, ("rank 1: plan ",), 3),
    "one of two axes": Step("attention", "f b0", "n b0", 8, ("ranks 0, 2, 3: ", "mask near"), 4, mesh=LEVELS),
    "the same": Step("attention", "f n g c b3 b2 b1 b0", "f n g c b3 b2 b1 b0", 3, (), 3),
    "compiled layers, one left out": Step("attention", THREE, "f f b0 b1", 5, (
        "rank 1: backward of compiled context_parallel_attention",), backend="aot_eager"),
}  # fmt: skip


def steps(rank: int, mesh: DeviceMesh, name: str) -> str:
    step = STEPS[name]
    torch._dynamo.reset()
    options = {"exchange": step.exchange}
    call = made(step.name, mesh, options, step.backend)

    def run() -> None:
        with spanwise.exchange_errors(mesh):  # compiled code raises torch's own error where it waits
            for number in range(step.before + 2):
                words = step.other if rank == 1 and number == step.before else step.usual
                play(step.name, mesh, call, words, options)

    return mismatch(run)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=(COMPILED,) if x.backend else ()) for name, x in STEPS.items()]
)
def test_steps_that_differ(gloo_pool: GlooPool, name: str) -> None:
    step = STEPS[name]
    for text in gloo_pool.run(step.ranks, steps, name, **step.mesh):
        assert all(re.search(each, text) for each in step.texts), text
        assert bool(text) == bool(step.texts), text


# ---------------------------------------------------------------- other faults: what each rank does and says


def counts(rank: int, mesh: DeviceMesh) -> str:
    """Counts of a loss that is the mean over two axes, also in tensors of the host."""
    both, said = mesh["dp", "cp"], []
    for count, own in ((12, 3 + rank // 3), (torch.tensor(6), torch.tensor(6 - 3 * (rank == 3)))):
        play("cross_entropy", both, made("cross_entropy", both, {"count": count}), STEP)
        call = made("cross_entropy", both, {"count": own})
        said.append(mismatch(lambda call=call: play("cross_entropy", both, call, STEP)))
    return " ".join(said)


def lives_on(rank: int, mesh: DeviceMesh, name: str, steady: int) -> str:
    """Rank 1 is refused a call, and makes no further one until the others have learned why."""
    plan_of(mesh).local(mesh)  # the ranks have compared something before
    call, x = CALLS[name](mesh, {}), torch.ones(TOKENS, 5)
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


def fails(rank: int, mesh: DeviceMesh, inside: str, whom: tuple[int, ...], steady: int = 8) -> str:
    """Ranks fail inside a call or in the backward between two; they leave the step out.

    The next call would meet what the others still do in this one: wrong numbers, a hang, or an abort inside gloo.
    """
    said, failing = [], False

    def score_mod(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        if inside == "forward" and failing:
            raise torch.OutOfMemoryError("no memory")
        return score

    # Where all are to fail alike, they may be late by any time.
    with mock.patch.object(compare, "PATIENCE", HANG if len(whom) > 1 else compare.PATIENCE):
        call = attention(mesh, {"kernel": "reference", "score_mod": score_mod})
        for number in range(steady + 3):
            failing = rank in whom and number == steady
            x = torch.ones(TOKENS, 8, requires_grad=inside != "forward")
            try:
                out = call(x)
                if inside != "forward":
                    fragile = failing and inside == "backward"
                    call(Fragile.apply(out, -1 if fragile else 1)[0, 0]).sum().backward()
            except RuntimeError as error:
                said.append(f"{type(error).__name__} {error}".replace("\n", " "))
    return "\n".join(said)


def ahead(rank: int, mesh: DeviceMesh) -> str:
    """Rank 0 reads nothing of others, and has an output before rank 1, which is late, makes another call."""
    usual, other = (attention(mesh, {"plan": "apart", **more}) for more in ({}, {"scale": 2.0}))
    x = torch.ones(TOKENS, 5, requires_grad=True)

    def run() -> None:
        for _ in range(12):
            play("attention", mesh, usual, STEP)
        if rank == 1:
            hear(mesh, "rank 0 has called")
        out = (other if rank == 1 else usual)(x)
        if rank == 0:
            tell(mesh, "rank 0 has called")
        out.sum().backward()

    text = mismatch(run)
    assert x.grad is None  # no gradient comes from calls that differ
    return text


def stays_away(rank: int, mesh: DeviceMesh, name: str, refused: bool) -> str:
    """Rank 1 lives, but makes no call that is taken until rank 0 has given it up, when the group's timeout is over."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=2.0)
    short = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",), backend_override={"cp": ("gloo", options)})
    if rank == 1:
        if refused:  # nothing has been compared yet
            with pytest.raises(ValueError):
                CALLS[name](short, {})(torch.ones(TOKENS - 1, 5))
        hear(mesh, "given up")
        return ""
    began = time.monotonic()
    with mock.patch.object(failure, "GRACE", 0.3), pytest.raises(spanwise.ExchangeError) as error:
        CALLS[name](short, {})(torch.ones(TOKENS, 5))
    tell(mesh, "given up")
    assert error.value.lost == (1,) and time.monotonic() - began >= 2.0
    return str(error.value)


def confirmed() -> str:
    """Calls that were made, and that were compared in the end."""
    (log,) = call_log.logs()
    log.confirm(log.count, HANG)
    return f"{log.count > 5} {log.count == log.confirmed}"


def passes(rank: int, mesh: DeviceMesh) -> str:
    """Steps that are alike on all ranks, of every kind."""
    call, aux = attention(mesh, {}), attention(mesh, {"return_aux": spanwise.AuxRequest(lse=True)})
    scales: Any = [2.0, 2, torch.tensor(2.0)]  # equal numbers of other types
    for number in range(6):
        play("attention", mesh, call, "f n c g b3 b2 b1 b0")
        x = torch.ones(TOKENS, 5, requires_grad=True)
        outs = [call(x), call(x, mask_name="near")]
        sum(out.sum() for out in outs).backward(retain_graph=True)
        outs[0].sum().backward()
        out, extra = aux(x)
        # Ranks may use other results of a call.
        (out.sum() if rank % 2 else out.sum() + extra.lse.sum()).backward()
        with torch.no_grad():
            attention(mesh, {"plan": "apart", "scale": scales[(number + rank) % 3]})(x)
    return confirmed()


def forks(rank: int, mesh: DeviceMesh) -> str:
    """A process forked in the middle of a comparison ends before rank 1 joins, and takes no part in the parent's."""
    call, x = attention(mesh, {"plan": "apart"}), torch.ones(TOKENS, 5)
    for _ in range(16):
        call(x)
    if rank == 0:
        call(x)  # not compared before rank 1 makes it
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
        call(x)
    for _ in range(3):
        call(x)
    return confirmed()


def switched_off(rank: int, mesh: DeviceMesh) -> str:
    """Nothing travels, so that ranks that differ do not notice; until it is switched on again."""
    options = {"plan": "apart", **({"scale": 2.0} if rank else {})}
    spanwise.compare_calls(mesh, False)
    play("attention", mesh, attention(mesh, options), STEP)
    assert call_log.logs() == []
    spanwise.compare_calls(mesh, True)
    return mismatch(lambda: play("attention", mesh, attention(mesh, options), STEP))


# What the ranks run, with which arguments, and what each of them says, as a pattern; the last one for all others too.
# A rank that needs nothing of the one that fails finds its error in the next call.
LEARNED, OUT_OF_MEMORY = r"rank 1: an error\(raised ValueError: ", r"\AOutOfMemoryError no memory"
RAISED = r"((\n|\A)(Mismatch|Exchange)Error .*rank 1.*)+\Z"
FAILED, QUOTED = OUT_OF_MEMORY + RAISED, r"\A(?=.*no memory)" + RAISED
FAULTS: dict[str, tuple[Any, tuple[Any, ...], tuple[str, ...], Any]] = {
    "two_axes": (counts, (), (r"rank 3: amount 4\.0.*amount 6\.0.*rank 3: amount 3\.0",), AXES),
    **{f"{name} refused": (lives_on, (name, i % 2 * 16), (LEARNED, "", LEARNED), {}) for i, name in enumerate(REFUSED)},
    "fails in a forward": (fails, ("forward", (1,)), (QUOTED, FAILED, QUOTED), {}),
    "fails in a backward": (fails, ("backward", (1,)), (r"\A" + RAISED, FAILED, r"\A" + RAISED), {}),
    "fail alike": (fails, ("backward", (0, 1, 2), 3), (OUT_OF_MEMORY + r"\Z",), {}),
    "no_gradient": (ahead, (), ("disagree on call 29 .*rank 1: scale 2.0",), TWO),
    "stays away": (stays_away, ("attention", False), ("lost: rank 1, no word within", "^$"), TWO),
    "stays away, refused": (stays_away, ("linear_cross_entropy", True), ("lost: rank 1, no word within", "^$"), TWO),
    **{run.__name__: (run, (), ("True True",), TWO if run is forks else {}) for run in (passes, forks)},
    "switched off": (switched_off, (), (r"rank 1: scale 2\.0",), TWO),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_all_ranks_learn_of_a_fault(gloo_pool: GlooPool, name: str) -> None:
    run, arguments, patterns, mesh = FAULTS[name]
    found = gloo_pool.run(math.prod(mesh.get("mesh_shape", (3,))), run, *arguments, **mesh)
    for rank, text in enumerate(found):
        assert re.search(patterns[min(rank, len(patterns) - 1)], text), (rank, text)
    assert run is not lives_on or all(found[1] in text for text in found), found  # the others quote the error

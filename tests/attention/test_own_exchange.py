"""The exchange of docs/add-an-exchange.md, run as the page prints it, is exact on every rank and in every report."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import spanwise
from spanwise import Plan, SpanMask
from spanwise.routes.route import EVERYONE, RECEIVER, SENDER, RouteProblem, Step
from tests.oracle import make_problem, relative_error
from tests.pairs import covering
from tests.ranks.harness import run_ranks

LENGTH = 50
Function = Callable[[RouteProblem], list[Step]]


@contextlib.contextmanager
def code_of(page: str, folder: Path) -> Iterator[ModuleType]:
    """The Python blocks of a page of docs/ that import something, as a module that lies outside of the package."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    name = "the_users_" + page.removesuffix(".md").replace("-", "_")
    (folder / f"{name}.py").write_text("\n".join(re.findall(r"```python\n(import .*?)```", text, re.DOTALL)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Function]:
    with code_of("add-an-exchange.md", tmp_path_factory.mktemp("outside")) as module:
        yield module.neighbours


def with_empty_rows(mask: SpanMask) -> SpanMask:
    keep = np.ones(mask.q_len, bool)
    keep[[0, 7, *range(20, 31), mask.q_len - 1]] = False
    return SpanMask(mask.start * keep, mask.end * keep, mask.kv_len)


DOCUMENTS = with_empty_rows(SpanMask.documents([0, 5, 6, 30, LENGTH]))
WINDOW = SpanMask.sliding_window(LENGTH, 6) | SpanMask(np.zeros((1, LENGTH), int), np.full((1, LENGTH), 2), LENGTH)
MASKS = {
    "documents": DOCUMENTS,
    "window and global": with_empty_rows(WINDOW),
    "a batch of both": SpanMask.stack([DOCUMENTS, WINDOW]),
}


def make(mask: SpanMask, ranks: Any, relay: Function, **options: Any) -> Plan:
    options = {"balancer": "head_tail", "block_size": 4, "num_q_heads": 4, "num_kv_heads": 2} | options
    return spanwise.make_plan(mask, ranks, exchange=relay, **options)


@pytest.mark.parametrize(
    ("steps", "name", "ranks", "kernel", "keep_kv"),
    covering(
        ["the page's", "passed on"], list(MASKS), [1, 2, 3, 4, (2, 2)], ["sdpa", "reference"], [True, False],
        possible=lambda steps, name, ranks, *_: steps == "the page's" or ranks == 4,
    ),
)  # fmt: skip
def test_exact(relay: Function, steps: str, name: str, ranks: Any, kernel: str, keep_kv: bool) -> None:
    """Output and gradients of all ranks; on two levels the exchange is between groups of ranks that trade heads."""
    mask = MASKS[name]
    plan = make(mask, ranks, relay if steps == "the page's" else passed_on, keep_kv=keep_kv)
    problem = make_problem(mask.dense(), batch=mask.batch_size)

    def on_rank(rank: int, mesh: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, grad = (plan.shard(x, rank, dim=2) for x in problem[:4])
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel=kernel)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    levels = {"mesh_shape": ranks, "mesh_dim_names": ("outer", "inner")} if ranks == (2, 2) else {}
    for rank, results in enumerate(run_ranks(plan.num_ranks, on_rank, **levels)):
        for got, wanted in zip(results, (problem.out, problem.dq, problem.dk, problem.dv), strict=True):
            assert relative_error(got, plan.shard(wanted, rank, dim=2)) < 1e-10


def test_plans_with_it_are_counted_saved_and_explained(relay: Function, tmp_path: Path) -> None:
    plan = make(DOCUMENTS, 4, relay, head_dim=8, dtype="float32")
    assert plan.exchange == "neighbours" and plan.num_chunks() == 2
    assert plan.recv_tokens().tolist() == plan.needed_tokens().tolist()
    assert plan.recv_bytes().tolist() == (plan.needed_tokens() * 2 * 16 * 4).tolist()
    assert (plan.resident_bytes() >= plan.saved_bytes()).all() and plan.predict()["total"] > 0
    assert "exchange neighbours," in plan.explain() and "K/V tokens (chunks: 2), reads" in plan.explain()
    plan.save(tmp_path / "plan.npz")
    assert Plan.load(tmp_path / "plan.npz", exchange=relay) == plan == pickle.loads(pickle.dumps(plan))
    with pytest.raises(ValueError, match="its exchange 'neighbours' is not spanwise's: pass Plan.load"):
        Plan.load(tmp_path / "plan.npz")
    assert plan != spanwise.make_plan(DOCUMENTS, 4, exchange="all_gather", balancer="head_tail", block_size=4)


def test_what_is_no_exchange_is_refused(relay: Function, tmp_path: Path) -> None:
    for wrong in (object(), ["needed"], {}, "relay", type("Relay", (), {})):
        with pytest.raises(ValueError, match="unknown exchange"):
            make(DOCUMENTS, 2, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got stages=3; use exchange='needed'"):
        make(DOCUMENTS, 2, relay, stages=3)
    for name in ("auto", "needed", "ulysses"):  # a file could mistake these
        steps = functools.partial(cut, at=2)
        steps.__name__ = name  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=f"the function '{name}' needs another name"):
            make(DOCUMENTS, 2, steps)
    make(DOCUMENTS, 2, relay).save(tmp_path / "plan.npz")
    with pytest.raises(ValueError, match="unknown exchange 'relay'"):
        Plan.load(tmp_path / "plan.npz", exchange="relay")


def passed_on(problem: RouteProblem, source: int = 0) -> list[Step]:
    """All that the others own goes to rank 0, which passes on what ranks read of one another."""
    owned = problem.owned()  # batch row, group, start, stop
    to_first = np.insert(owned, RECEIVER, 0, axis=1)[owned[:, 1] > 0]
    reads = problem.reads[problem.reads[:, RECEIVER] > 0]
    own, rest = reads[reads[:, SENDER] == 0], reads[reads[:, SENDER] > 0]
    rest[:, SENDER] = 0
    return [Step(-1, to_first), Step(-1, own), Step(source, rest)]


def test_promises_are_checked() -> None:
    def changed(change: Callable[[list[Step]], Any]) -> Function:
        def steps(problem: RouteProblem) -> list[Step]:
            found = passed_on(problem)
            return change(found) or found

        return steps

    def moved(i: int, column: int, value: int) -> Callable[[list[Step]], None]:
        def change(steps: list[Step]) -> None:
            steps[i].moves[0, column] = value

        return change

    wrong = {
        "source must be -1 or an earlier step, got 2": functools.partial(passed_on, source=2),
        r"group \d sends keys that it does not have": functools.partial(passed_on, source=1),
        r"moves must be int64 \[m, 5\]": changed(lambda steps: [Step(-1, steps[0].moves.astype(np.int32))]),
        r"the receiver of a move must be in \[-1, 4\), in step 0": changed(moved(0, RECEIVER, 4)),
        "must return a list of Step, got None": lambda problem: None,
        "a move is of a token at least, and to another group": changed(moved(1, RECEIVER, 0)),
        "does not get all keys that it reads": changed(lambda steps: steps[:2]),
        "gets a key twice": changed(lambda steps: [*steps, steps[1]]),
        "a step to everyone sends all that the groups own": changed(moved(1, RECEIVER, EVERYONE)),
    }
    for message, steps in wrong.items():
        with pytest.raises(ValueError, match=message):
            make(SpanMask.causal(LENGTH), 4, steps)


def test_steps_are_part_of_the_fingerprint() -> None:
    plans = [make(DOCUMENTS, 4, functools.partial(cut, at=at)) for at in (2, 2, 3)]
    assert plans[0] == plans[1] != plans[2]


def cut(problem: RouteProblem, at: int) -> list[Step]:
    return [Step(-1, problem.reads[:at]), Step(np.int64(-1), problem.reads[at:])]

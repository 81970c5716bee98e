"""The exchange of docs/add-an-exchange.md, run as the page prints it, is exact on every rank and in every report."""

from __future__ import annotations

import contextlib
import dataclasses
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

import spanwise
from spanwise import Plan, SpanMask
from spanwise.routes.route import EVERYONE, RECEIVER, SENDER, RouteProblem, Step
from tests.pairs import covering
from tests.properties.cases import check
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import Setting

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


DOCUMENTS = SpanMask.documents([0, 5, 6, 30, LENGTH])


def make(mask: SpanMask, ranks: Any, relay: Function, **options: Any) -> Plan:
    options = {"balancer": "head_tail", "block_size": 4, "num_q_heads": 4, "num_kv_heads": 2} | options
    return spanwise.make_plan(mask, ranks, exchange=relay, **options)


def passed_on(problem: RouteProblem, source: int = 0) -> list[Step]:
    """All that the others own goes to rank 0, which passes on what ranks read of one another."""
    owned = problem.owned()  # batch row, group, start, stop
    to_first = np.insert(owned, RECEIVER, 0, axis=1)[owned[:, 1] > 0]
    reads = problem.reads[problem.reads[:, RECEIVER] > 0]
    own, rest = reads[reads[:, SENDER] == 0], reads[reads[:, SENDER] > 0]
    rest[:, SENDER] = 0
    return [Step(-1, to_first), Step(-1, own), Step(source, rest)]


CELLS = covering(
    [{"exchange": x, "keep_kv": keep} for x in ("the page's", passed_on) for keep in (True, False)],
    [(2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 2, 1)], ["documents", "random, empty rows", "rows", "two spans"],
    ["head_tail"], [("sdpa", "float64"), ("reference", "float64")], [{}], [((4, 2), (8, 6))],
    possible=lambda way, levels, *_: way["exchange"] != passed_on or levels == (4, 1, 1),
)  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: str(Setting(*cell)))
def test_exact(relay: Function, cell: Any) -> None:
    """On two levels the exchange is between groups of ranks that trade heads."""
    case = Setting(*cell).case()
    check(case if case.exchange == passed_on else dataclasses.replace(case, exchange=relay), run_ranks)


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
    with pytest.raises(ValueError, match="stages=3"):
        make(DOCUMENTS, 2, relay, stages=3)
    for name in ("auto", "needed", "ulysses"):  # a file could mistake these
        steps = functools.partial(cut, at=2)
        steps.__name__ = name  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=f"the function '{name}' needs another name"):
            make(DOCUMENTS, 2, steps)
    make(DOCUMENTS, 2, relay).save(tmp_path / "plan.npz")
    with pytest.raises(ValueError, match="unknown exchange 'relay'"):
        Plan.load(tmp_path / "plan.npz", exchange="relay")


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

"""The exchange of docs/add-an-exchange.md, run as the page prints it, is exact on every rank and in every report."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import spanwise
from spanwise import Plan, SpanMask
from spanwise.attention.exchange.base import Exchange
from spanwise.attention.exchange.needed import Needed
from tests.oracle import make_problem, relative_error
from tests.ranks.harness import run_ranks

PAGE = Path(__file__).parents[2] / "docs/add-an-exchange.md"
LENGTH = 50


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exchange]:
    """The page's exchange, out of a module that holds the page's code and lies outside of the package."""
    (code,) = re.findall(r"```python\n(import .*?)```", PAGE.read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("outside")
    (folder / "the_users_exchange.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("the_users_exchange").Relay()


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


def make(mask: SpanMask, ranks: Any, relay: Exchange, **options: Any) -> Plan:
    options = {"balancer": "head_tail", "block_size": 4, "num_q_heads": 4, "num_kv_heads": 2} | options
    return spanwise.make_plan(mask, ranks, exchange=relay, **options)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("ranks", "kernel", "keep_kv"),
    [(1, "sdpa", True), (2, "sdpa", True), (4, "sdpa", False), (4, "reference", True), (3, "sdpa", True)],
)
def test_exact(relay: Exchange, name: str, ranks: int, kernel: str, keep_kv: bool) -> None:
    mask = MASKS[name]
    problem, plan = make_problem(mask.dense(), batch=mask.batch_size), make(mask, ranks, relay, keep_kv=keep_kv)
    check(problem, plan, kernel, ranks, {})


def test_exact_on_two_levels(relay: Exchange) -> None:
    """The exchange between groups of ranks that trade heads."""
    problem, plan = make_problem(DOCUMENTS.dense()), make(DOCUMENTS, (2, 2), relay)
    check(problem, plan, "sdpa", 4, {"mesh_shape": (2, 2), "mesh_dim_names": ("outer", "inner")})


def check(problem: Any, plan: Plan, kernel: str, ranks: int, mesh_of: dict[str, Any]) -> None:
    """Output and gradients of all ranks against dense float64 attention of the whole sequence."""

    def on_rank(rank: int, mesh: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, grad = (plan.shard(x, rank, dim=2) for x in problem[:4])
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel=kernel)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    found = run_ranks(ranks, on_rank, **mesh_of)
    reference = (problem.out, problem.dq, problem.dk, problem.dv)
    for rank, results in enumerate(found):
        for got, wanted in zip(results, reference, strict=True):
            assert relative_error(got, plan.shard(wanted, rank, dim=2)) < 1e-10


def test_plans_with_it_are_counted_saved_and_explained(relay: Exchange, tmp_path: Path) -> None:
    plan = make(DOCUMENTS, 4, relay, head_dim=8, dtype="float32")
    tokens = plan.layout.tokens_per_rank
    assert plan.exchange == "relay" and plan.num_chunks() == 3
    assert plan.recv_tokens().tolist() == [LENGTH - n for n in tokens]
    assert plan.recv_bytes().tolist() == [3 * tokens.max() * 2 * 16 * 4] * 4
    assert (plan.resident_bytes() >= plan.saved_bytes()).all() and plan.predict()["total"] > 0
    assert "exchange relay" in plan.explain()
    assert pickle.loads(pickle.dumps(plan)) == plan
    plan.save(tmp_path / "plan.npz")
    assert Plan.load(tmp_path / "plan.npz", exchange=relay) == plan
    with pytest.raises(ValueError, match="its exchange 'relay' is not spanwise's: pass Plan.load"):
        Plan.load(tmp_path / "plan.npz")
    other = spanwise.make_plan(DOCUMENTS, 4, exchange="all_gather", balancer="head_tail", block_size=4)
    assert plan.fingerprint != other.fingerprint


def test_what_is_no_exchange_is_refused(relay: Exchange) -> None:
    with pytest.raises(ValueError, match=r"an exchange is an object, got the class Relay: pass Relay\(\)"):
        make(DOCUMENTS, 2, type(relay))  # type: ignore[arg-type]
    for wrong in (object(), ["needed"], {}):
        with pytest.raises(ValueError, match="unknown exchange"):
            make(DOCUMENTS, 2, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got stages=3; use exchange='needed'"):
        make(DOCUMENTS, 2, relay, stages=3)


def changed(relay: Exchange, **members: Any) -> Any:
    return type("Changed", (type(relay),), members)()


@pytest.mark.parametrize("name", ["", "auto", "needed", "ulysses"])
def test_names_that_a_file_could_mistake_are_refused(relay: Exchange, name: str) -> None:
    with pytest.raises(ValueError, match=f"the exchange Changed needs another name than '{name}'"):
        make(DOCUMENTS, 2, changed(relay, name=name))


def test_promises_that_planning_can_check(relay: Exchange, tmp_path: Path) -> None:
    def started_late(self: Any, *args: Any) -> Iterator[Any]:
        yield from type(relay).start(self, *args)

    with pytest.raises(ValueError, match="start is a generator function, so nothing is in flight"):
        make(DOCUMENTS, 2, changed(relay, start=started_late))
    with pytest.raises(ValueError, match="must move K/V between all ranks"):
        make(DOCUMENTS, 2, changed(relay, levels=lambda self, n: (1, n)))
    make(DOCUMENTS, 2, relay).save(tmp_path / "plan.npz")
    with pytest.raises(ValueError, match=r"got the class Relay: pass Relay\(\)"):
        Plan.load(tmp_path / "plan.npz", exchange=type(relay))
    with pytest.raises(ValueError, match="unknown exchange 'relay'"):
        Plan.load(tmp_path / "plan.npz", exchange="relay")


def test_replace_takes_names_and_objects(relay: Exchange) -> None:
    plan = make(DOCUMENTS, 2, relay)
    assert plan.replace(exchange="ring").replace(exchange=relay) == plan
    assert plan.replace(exchange="ring") == make(DOCUMENTS, 2, "ring", keep_kv=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [3, 4])
def test_chunks_that_lie_in_one_buffer_are_refetched(relay: Exchange, ranks: int) -> None:
    """A chunk fetched alone begins at another place of its buffer than in the forward, where all came at once."""

    def start(self: Any, *args: Any) -> Iterator[Any]:
        pairs = list(type(relay).start(self, *args))
        buffer = torch.cat([x.reshape(-1) for pair in pairs for x in pair])
        views = iter(buffer.split([x.numel() for pair in pairs for x in pair]))
        return iter([tuple(next(views).view(x.shape) for x in pair) for pair in pairs])

    problem = make_problem(DOCUMENTS.dense())
    plan = make(DOCUMENTS, ranks, changed(relay, name="one buffer", start=start), keep_kv=False)
    check(problem, plan, "sdpa", ranks, {})


@dataclasses.dataclass(frozen=True)
class Slow(Needed):
    """Needed, with a parameter."""

    name: ClassVar[str] = "slow"
    seconds_more: float = 0.0


def test_parameters_of_an_exchange_are_part_of_the_fingerprint() -> None:
    plans = [make(DOCUMENTS, 2, Slow(seconds), stages=1) for seconds in (0.0, 0.0, 1.0)]
    assert plans[0] == plans[1] != plans[2]

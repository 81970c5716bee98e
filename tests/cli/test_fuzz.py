"""``spanwise fuzz``: 300 cases pass; wrong results and wrongly accepted calls are found; cases are repeatable."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import spanwise.cli.fuzz
from spanwise.cli.app import app
from spanwise.cli.fuzz import command
from spanwise.cli.fuzz.build import on_rank
from spanwise.cli.fuzz.cases import random_case
from spanwise.cli.fuzz.cells import MaskCase
from spanwise.cli.fuzz.check import Outcome, check
from spanwise.cli.fuzz.command import FuzzOptions, fuzz, run, summary
from spanwise.cli.fuzz.oracle import Inputs, expected
from spanwise.cli.fuzz.ranks import Answer, Ranks, _preload
from spanwise.cli.fuzz.refusals import REFUSALS, Refusal
from tests.limits import HANG


def test_300_cases_pass_and_are_of_every_kind() -> None:
    options = FuzzOptions()
    cases = list(options.chosen())
    outcomes = run(cases)
    assert [f"{x.case.name}: {x.error}" for x in outcomes if x.error] == []
    result = summary(options, len(cases), outcomes, 1.0)
    assert result["cases"] == 300 and result["refused"] > 20
    least = {
        "mask": 13,
        "ranks": 8,
        "exchange": 10,
        "balancer": 9,
        "kernel": 3,
        "dtype": 4,
        "refusal": 15,
        "option": 15,
    }
    assert {group: len(found) for group, found in result["counts"].items() if len(found) < least[group]} == {}
    for dtype, errors in result["worst_errors"].items():
        assert set(errors) == {"out", "lse", "dq", "dk", "dv", "dsinks", "max_logit"}, dtype
        assert 0 < max(errors.values()) <= result["tolerances"][dtype]


def test_a_case_follows_from_its_seed_and_index_alone() -> None:
    assert random_case(3, 17) == random_case(3, 17) != random_case(3, 18)
    many = [random_case(3, index) for index in range(300)]
    assert {case.exchange for case in many} >= {"hierarchical", "ulysses"} and {case.sinks for case in many} == {
        0,
        1,
        2,
    }
    every = {case.name: case for case in FuzzOptions(num_cases=100).chosen()}
    some = list(FuzzOptions(num_cases=100, ranks=2, only=("ring", "float64")).chosen())
    assert 0 < len(some) < 20 and all(every[case.name] == case for case in some)
    assert all(case.num_ranks == 2 and case.exchange == "ring" and case.dtype == "float64" for case in some)
    two_levels = list(FuzzOptions(num_cases=100, only=("two levels", "ring", "GQA")).chosen())
    assert two_levels and all(case.levels[1] > 1 and case.heads[0] > case.heads[1] for case in two_levels)
    assert [case.name for case in FuzzOptions(case="3:17").chosen()] == ["3:17"]


@pytest.mark.parametrize("module", ["cells", "masks", "cases", "refusals", "oracle"])
def test_what_must_come_out_shares_no_code_with_the_package(module: str) -> None:
    source = Path(spanwise.cli.fuzz.__file__).with_name(f"{module}.py").read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert imported and all(
        not name.startswith("spanwise") or name.startswith("spanwise.cli.fuzz") for name in imported
    )


def by_hand(inputs: Inputs, visible: np.ndarray, scale: float, softcap: float) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of one head, number by number."""
    q, k, v = (x[0, 0].numpy() for x in inputs[:3])
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), float(inputs.sinks[0]))
    for i in range(len(q)):
        terms = {}
        for j in range(len(k)):
            if visible[i, j]:
                score = softcap * math.tanh(scale * sum(a * b for a, b in zip(q[i], k[j], strict=True)) / softcap)
                terms[j] = math.exp(score + 0.3 * (j - i) / 8 + 0.01 * i)
        total = sum(terms.values()) + math.exp(float(inputs.sinks[0]))
        lse[i] = math.log(total)
        for j, term in terms.items():
            out[i] += term / total * v[j]
    return out, lse


def test_the_oracle_agrees_with_sums_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = Inputs(draw(1, 1, 4, 3), draw(1, 1, 5, 3), draw(1, 1, 5, 2), draw(1, 1, 4, 2), draw(1, 1, 4), draw(1))
    visible = torch.tensor([[1, 0, 1, 1, 0], [0] * 5, [1] * 5, [0, 0, 0, 0, 1]], dtype=torch.bool)
    found = expected(inputs, visible[None], {"scale": 0.7, "softcap": 1.1, "bias": "alibi"}).values
    out, lse = by_hand(inputs, visible.numpy(), 0.7, 1.1)
    np.testing.assert_allclose(found["out"][0, 0], out, atol=1e-14)
    np.testing.assert_allclose(found["lse"][0, 0], lse, atol=1e-14)

    def loss(changed: Inputs) -> float:
        out, lse = by_hand(changed, visible.numpy(), 0.7, 1.1)
        return float((out * inputs.grad_out[0, 0].numpy()).sum() + (lse * inputs.grad_lse[0, 0].numpy()).sum())

    for name, gradient in (("q", "dq"), ("k", "dk"), ("v", "dv"), ("sinks", "dsinks")):
        given = getattr(inputs, name)
        step = torch.zeros_like(given)
        at = (0,) * given.dim()
        step[at] = 1e-5
        slope = (loss(inputs._replace(**{name: given + step})) - loss(inputs._replace(**{name: given - step}))) / 2e-5
        assert slope == pytest.approx(float(found[gradient][at]), abs=1e-8) and slope != 0


class OneRank:
    """In place of `Ranks`: one rank in this process, whose answer `spoil` changes."""

    def __init__(self, spoil) -> None:
        self.spoil = spoil

    def start(self, shape, fn, *args) -> None:
        assert shape == (1,) and fn is on_rank
        self.call = args

    def answers(self) -> list[Answer]:
        try:
            return [Answer(self.spoil(on_rank(0, None, *self.call)))]
        except Exception as error:
            return [Answer(None, type(error).__name__, str(error))]


@functools.cache
def one_rank_case(**wanted):
    for index in range(3000):
        case = random_case(1, index)
        if case.num_ranks == 1 and all(getattr(case, name) == value for name, value in wanted.items()):
            return case
    raise AssertionError(wanted)


FULL = {"sinks": True, "lse": True, "max_logit": True, "gradients": True, "refusal": None, "dtype": "float64"}


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dsinks", "max_logit"])
@pytest.mark.parametrize("change", ["a little", "nan", "shape"])
def test_a_wrong_result_is_found(name: str, change: str) -> None:
    case = one_rank_case(**FULL)

    def spoil(result):
        x = result[name].double().clone()
        if change == "shape":
            x = x[..., :-1]
        elif change == "nan":
            x.view(-1)[-1] = torch.nan
        else:
            x = torch.where(x.isfinite() & (x != 0), x + 1e-8 * x.abs().nan_to_num(posinf=0).max(), x)
        return {**result, name: x}

    assert check(case, OneRank(lambda result: result)).error == ""
    assert name in check(case, OneRank(spoil)).error


def test_any_number_where_the_mask_has_no_pair_is_found() -> None:
    """Below all tolerances: rows without a key and keys that no row reads have results of exactly 0."""
    case = one_rank_case(gradients=True, refusal=None, dtype="bfloat16", mask="default")
    length = case.kv_len
    empty = MaskCase("spans", {"start": [[0] * case.q_len], "end": [[0] * case.q_len], "kv_len": length})
    case = dataclasses.replace(case, masks={"default": empty}, cu_seqlens=None, balancer="contiguous")
    assert check(case, OneRank(lambda result: result)).error == ""
    for name in ("out", "dq", "dk", "dv"):
        found = check(case, OneRank(lambda result, name=name: {**result, name: result[name] + 1e-36}))
        assert f"{name} is not 0 where the mask has no pair" in found.error


def test_a_wrong_call_that_is_accepted_is_found(monkeypatch) -> None:
    case = one_rank_case(refusal="unknown mask")
    assert check(case, OneRank(lambda result: result)).error == ""
    accepting = OneRank(lambda result: result)
    accepting.answers = lambda: [Answer({})]
    assert check(case, accepting).error == "unknown mask: every rank must raise ValueError, got {0: 'no error'}"
    accepting.answers = lambda: [Answer(None, "KeyError", "x")]
    assert "{0: 'KeyError'}" in check(case, accepting).error
    planned = dataclasses.replace(one_rank_case(refusal=None), refusal="no ranks")
    assert check(planned, accepting).error == ""
    monkeypatch.setitem(REFUSALS, "nothing", Refusal("make_plan", lambda given: given))
    accepted = check(dataclasses.replace(planned, refusal="nothing"), accepting)
    assert accepted.error == "make_plan accepted a call that is wrong: nothing"
    monkeypatch.setitem(REFUSALS, "a slip", Refusal("make_plan", lambda given: {**given, "mistyped": 1}))
    assert "make_plan raised TypeError" in check(dataclasses.replace(planned, refusal="a slip"), accepting).error


def test_a_case_whose_ranks_are_lost_runs_again_once() -> None:
    case = one_rank_case(refusal=None)
    attempts = []
    ranks = OneRank(lambda result: result)
    ranks.timeout, once = 1.0, ranks.answers

    def answers() -> list[Answer]:
        attempts.append(1)
        return [Answer(error="stuck")] if len(attempts) <= losses else once()

    ranks.answers = answers
    losses = 1
    assert (outcome := check(case, ranks)).lost and outcome.error == "" and len(attempts) == 2
    attempts.clear()
    losses = 2
    assert check(case, ranks).error == "ranks [0] ended or gave no answer in 1 s" and len(attempts) == 2
    ranks.answers = lambda: [Answer(error="stuck"), Answer(None, "KeyError", "x")]
    assert "rank 1 raised KeyError: x" in check(case, ranks).error


def end_later(rank, mesh, answered):
    def end():
        while not answered.exists():
            time.sleep(0.01)
        os._exit(3)

    threading.Thread(target=end, daemon=True).start()
    return rank


def test_every_refusal_fits_some_case() -> None:
    found = {random_case(0, index).refusal for index in range(4000)}
    assert found == {None, *REFUSALS}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_keys_of_another_dtype_have_another_dtype(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 2, 4, dtype=dtype)
    q, k, v = REFUSALS["keys of another dtype"].spoil({"qkv": (x, x, x)})["qkv"]
    assert q.dtype == v.dtype != k.dtype


def test_failures_are_printed_with_a_line_that_reruns_them(monkeypatch, tmp_path, capsys) -> None:
    def failing(case, ranks) -> Outcome:
        return Outcome(case, error="out differs" if case.index == 1 else "")

    monkeypatch.setattr(command, "check", failing)
    assert fuzz(FuzzOptions(num_cases=3, seed=5, out=str(tmp_path / "out.json"))) == 1
    text = capsys.readouterr().out
    assert "spanwise fuzz --case 5:1\n    out differs\n2 of 3 cases passed" in text
    assert json.loads((tmp_path / "out.json").read_text())["failures"] == [{"case": "5:1", "error": "out differs"}]
    assert fuzz(FuzzOptions(case="5:0")) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "0"], "cases must be at least 1"),
        (["--ranks", "9"], "ranks must be between 1 and 8"),
        (["--case", "7"], "a case is SEED:INDEX"),
        (["--only", "ring", "--only", "ulysses"], "none of 300 cases is ring and ulysses"),
        (["--out", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["fuzz", *options])
    assert result.exit_code == 2 and message in result.output


def test_the_server_imports_this_copy_or_none(monkeypatch, tmp_path) -> None:
    """A server looks in its working directory first; its ranks would run the copy that it has imported."""
    ours = Path(spanwise.__file__).parents[1]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "bin"), str(ours), *filter(None, sys.path)])
    monkeypatch.chdir(tmp_path)
    assert "spanwise.cli.fuzz.build" in _preload()
    (tmp_path / "spanwise").mkdir()
    (tmp_path / "spanwise" / "__init__.py").write_text("")
    assert not any(name.startswith("spanwise") for name in _preload())
    monkeypatch.chdir(ours)
    assert "spanwise.cli.fuzz.build" in _preload()


def answer_rank(rank, mesh):
    return rank, mesh.shape


def fail_on_one(rank, mesh):
    if rank == 1:
        raise KeyError("broken")
    return rank


def end_on_one(rank, mesh):
    if rank == 1:
        os._exit(3)
    torch.distributed.barrier(mesh.get_group())


def hang_on_one(rank, mesh):
    if rank == 1:
        time.sleep(HANG)
    return rank


def test_ranks_that_fail_end_or_hang_are_told_apart_and_replaced(tmp_path: Path) -> None:
    def call(fn, shape=(2,), *args):
        ranks.start(shape, fn, *args)
        return ranks.answers()

    with Ranks(2, timeout=HANG) as ranks:
        assert [x.result for x in call(answer_rank, (1, 2))] == [(rank, (1, 2)) for rank in range(2)]
        failed = call(fail_on_one)
        assert (failed[0].result, failed[1].error) == (0, "KeyError") and "fail_on_one" in failed[1].trace
        assert call(end_on_one)[1].error == "died"
        assert [x.result for x in call(answer_rank)] == [(0, (2,)), (1, (2,))]
        ranks.start((2,), hang_on_one)
        assert ranks._workers[0][1].poll(HANG)
        ranks.timeout = 1.0
        assert [x.error for x in ranks.answers()] == ["", "stuck"]
        ranks.timeout = HANG
        assert call(end_later, (2,), tmp_path / "answered")[1].result == 1
        (tmp_path / "answered").touch()
        for process, _ in ranks._workers:
            process.join()
        assert call(answer_rank, (2,))[1].result == (1, (2,))

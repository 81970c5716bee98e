"""One case from end to end: expected and found results, compared on every rank."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from spanwise import Plan
from spanwise.cli.fuzz import build
from spanwise.cli.fuzz.cases import Case
from spanwise.cli.fuzz.cells import cells
from spanwise.cli.fuzz.oracle import Expected, expected
from spanwise.cli.fuzz.ranks import Answer, Ranks
from spanwise.cli.fuzz.refusals import REFUSALS
from spanwise.layouts.layout import Layout

#: Largest error of an entry by dtype, relative to the largest sum of absolute values of the terms of any entry (see
#: `oracle.expected`). Rounding units: 1e-16, 6e-8, 2e-3 and 2e-4.
TOLERANCES = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 1e-2, "float16": 1.25e-3}

_SIDES = {"out": "q", "lse": "q", "dq": "q", "dk": "kv", "dv": "kv"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        case: the case.
        error: the failure in one or a few lines; empty if the case passed.
        worst: largest relative error by result.
        lost: whether ranks ended or hung at a first attempt, and the case ran again on new ones.
    """

    case: Case
    error: str = ""
    worst: dict[str, float] = dataclasses.field(default_factory=dict)
    lost: bool = False


class Failed(Exception):
    """A difference between what is expected and what was found."""


class Lost(Exception):
    """Ranks ended or hung, and no rank raised an error."""


def check(case: Case, ranks: Ranks) -> Outcome:
    """Run a case on its ranks and compare it; a case that must be refused passes if every rank raises ValueError."""
    try:
        return Outcome(case, worst=_compared(case, ranks))
    except Lost:  # also where gloo does not connect, or memory is short: a defect shows again
        try:
            return Outcome(case, worst=_compared(case, ranks), lost=True)
        except (Failed, Lost) as failure:
            return Outcome(case, str(failure), lost=True)
    except Failed as failure:
        return Outcome(case, str(failure))


def _compared(case: Case, ranks: Ranks) -> dict[str, float]:
    spoiled = case.refusal and REFUSALS[case.refusal].stage == "make_plan"
    try:
        plan = build.plan_of(case)
    except Exception as error:
        if spoiled and type(error) is ValueError:
            return {}
        raise Failed(f"make_plan raised {type(error).__name__}: {error}") from error
    if spoiled:
        raise Failed(f"make_plan accepted a call that is wrong: {case.refusal}")
    inputs = build.inputs_of(case)
    outer, inner = case.levels
    shape = (outer,) if inner == 1 else case.levels
    ranks.start(shape, build.on_rank, case, plan, build.poisoned(case, inputs))
    options = {name: getattr(case, name) for name in ("scale", "softcap", "bias")}
    visible = torch.from_numpy(cells(case.masks[case.mask]))
    whole = None if case.refusal else expected(inputs, visible, options)  # while the ranks work
    answers = ranks.answers()
    lost = [rank for rank, answer in enumerate(answers) if answer.error in ("died", "stuck")]
    if lost and {answer.error for answer in answers} <= {"", "died", "stuck"}:
        raise Lost(f"ranks {lost} ended or gave no answer in {ranks.timeout:g} s")
    if whole is None:
        return _refused(case, answers)
    for rank, answer in enumerate(answers):
        if answer.error and rank not in lost:
            raise Failed(f"rank {rank} raised {answer.error}: {answer.text}\n{answer.trace}".rstrip())
    return _differences(case, plan, whole, visible, [answer.result for answer in answers])


def _refused(case: Case, answers: list[Answer]) -> dict[str, float]:
    others = {rank: answer.error or "no error" for rank, answer in enumerate(answers) if answer.error != "ValueError"}
    if others:
        raise Failed(f"{case.refusal}: every rank must raise ValueError, got {others}")
    return {}


def _differences(
    case: Case, plan: Plan, whole: Expected, visible: torch.Tensor, results: list[dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Largest relative error of each result over the ranks; raises `Failed` beyond the tolerance."""
    worst: dict[str, float] = {}
    whole.values["lse"][:, :, build.padding_of(case)[0]] = -math.inf
    # Rows without a key, and keys that no row reads, have results of exactly 0.
    zeros = {"q": ~visible.any(2), "kv": ~visible.any(1)}
    layouts = {"q": plan.layout, "kv": plan.kv_layout}
    for layout in layouts.values():
        _check_tiles(layout)
    for rank, result in enumerate(results):
        for name, got in result.items():
            if name == "dsinks":
                continue
            side, want, zero = _SIDES.get(name), whole.values[name], None
            if side is not None:
                want = _cut(layouts[side], want, rank)
                zero = _cut(layouts[side], zeros[side].expand(case.batch, -1)[:, None], rank)[:, 0]
            error = _difference(f"rank {rank} {name}", got, want, whole.sizes[name])
            worst[name] = max(worst.get(name, 0.0), error)
            if zero is not None and name != "lse" and bool((got.movedim(2, 1)[zero] != 0).any()):
                raise Failed(f"rank {rank} {name} is not 0 where the mask has no pair")
    if "dsinks" in results[0]:
        each = torch.stack([result["dsinks"] for result in results])
        total, size = each.double().sum(0).to(each.dtype), whole.sizes["dsinks"]
        worst["dsinks"] = _difference("dsinks, summed over ranks,", total, whole.values["dsinks"], size)
    return worst


def _difference(what: str, got: torch.Tensor, want: torch.Tensor, size: float) -> float:
    """The largest difference relative to `size`; raises `Failed` beyond the tolerance."""
    if got.shape != want.shape:
        raise Failed(f"{what} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    infinite = want == -math.inf
    if not torch.equal(got == -math.inf, infinite):
        raise Failed(f"{what} is -inf at other places than expected")
    difference = torch.where(infinite, 0.0, (got.double() - want).abs())
    largest = float(difference.max()) if difference.numel() else 0.0
    error = largest / max(size, 1e-30) if largest else 0.0
    tolerance = TOLERANCES[str(got.dtype).removeprefix("torch.")]  # the lse of bfloat16 is float32
    if not error <= tolerance:
        raise Failed(f"{what} differs by {largest:.3g}, {error:.3g} of its terms; the tolerance is {tolerance:g}")
    return error


def _cut(layout: Layout, x: torch.Tensor, rank: int) -> torch.Tensor:
    """The tokens of a rank: dim 2 of ``[B, H, T, …]``."""
    rows = []
    for b in range(x.shape[0]):
        runs = layout.runs(rank, b if layout.batch_size > 1 else 0)
        rows.append(x[b][:, [t for start, stop in runs.tolist() for t in range(start, stop)]])
    return torch.stack(rows)


def _check_tiles(layout: Layout) -> None:
    """Every token has exactly one rank."""
    for row in range(layout.batch_size):
        held = np.zeros(layout.seq_len, int)
        for rank in range(layout.num_ranks):
            for start, stop in layout.runs(rank, row).tolist():
                held[start:stop] += 1
        if (held != 1).any():
            raise Failed(f"token {int(np.argmax(held != 1))} is held by {held[held != 1][0]} ranks")

"""One case from end to end: expected and found results, compared on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spanwise import Plan
from spanwise.layouts.layout import Layout
from tests.oracle import Expected, expected
from tests.properties import build
from tests.properties.cases import Case

#: Largest error of an entry by dtype, relative to the largest sum of absolute values of the terms of any entry (see
#: `oracle.expected`). Rounding units: 1e-16, 6e-8, 2e-3 and 2e-4.
TOLERANCES = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 1e-2, "float16": 1.25e-3}

_SIDES = {"out": "q", "lse": "q", "dq": "q", "dk": "kv", "dv": "kv"}


class Failed(AssertionError):
    """A difference between what is expected and what was found."""


#: Runs ``fn(rank, mesh, *args)`` on so many ranks, results by rank; `tests.ranks.gloo.GlooPool.run` is one.
Run = Callable[..., list[Any]]


def check(case: Case, run: Run) -> None:
    """Run a case and compare its results on every rank."""
    plan, inputs = build.plan_of(case), build.inputs_of(case)
    outer, inner = case.levels
    mesh = {"mesh_shape": (outer,)} if inner == 1 else {"mesh_shape": case.levels, "mesh_dim_names": ("outer", "inner")}
    results = run(case.num_ranks, build.on_rank, case, plan, build.poisoned(case, inputs), **mesh)
    options = {name: getattr(case, name) for name in ("scale", "softcap", "bias")}
    visible = torch.from_numpy(case.cells)
    _compare(case, plan, expected(inputs, visible, options), visible, results)


def _compare(
    case: Case, plan: Plan, whole: Expected, visible: torch.Tensor, results: list[dict[str, torch.Tensor]]
) -> None:
    """Raise `Failed` if a result of a rank is wrong."""
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
            _difference(f"rank {rank} {name}", got, want, whole.sizes[name])
            if zero is not None and name != "lse" and bool((got.movedim(2, 1)[zero] != 0).any()):
                raise Failed(f"rank {rank} {name} is not 0 where the mask has no pair")
    if "dsinks" in results[0]:
        each = torch.stack([result["dsinks"] for result in results])
        total, size = each.double().sum(0).to(each.dtype), whole.sizes["dsinks"]
        _difference("dsinks, summed over ranks,", total, whole.values["dsinks"], size)


def _difference(what: str, got: torch.Tensor, want: torch.Tensor, size: float) -> None:
    """Raise `Failed` if a difference relative to `size` is beyond the tolerance."""
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

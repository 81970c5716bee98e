"""``metrics.json``: the numbers of a run, kept while it runs and extended when it is resumed."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

#: Lists with one entry a step, cut back to the checkpoint on resume.
PER_STEP = (
    "losses",
    "imbalance",
    "recv_tokens",
    "tokens_per_second",
    "grad_norms",
    "learning_rates",
    "documents",
    "epochs",
)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` in one piece: a reader, and a crash, find either the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(_finite(value), file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Metrics:
    """The content of ``metrics.json``; without a path, only in memory.

    ``steps`` counts finished steps. Of each step: ``losses`` (mean over the targets of all ranks, nats a token),
    ``imbalance`` (largest over mean attention work of the ranks of one sequence; the worst sequence of the step),
    ``recv_tokens`` (K/V tokens each rank receives for one layer's forward), ``tokens_per_second`` (over all ranks),
    ``grad_norms`` (before clipping), ``learning_rates``, ``documents`` (packed into the step), ``epochs`` (passes over
    the data when the step ended). ``eval_losses`` holds ``{"step", "loss"}``; ``runs`` says from which step on how
    many ranks worked. ``proved`` says whether the differences from one device (``loss_errors``, ``grad_errors``) stay
    within ``proof["tolerance"]``. A number that is not finite is written as null.
    """

    def __init__(self, path: Path | None, **facts: Any):
        self.path = path
        self.values: dict[str, Any] = {**facts, "steps": 0, "eval_losses": [], "runs": []}
        self.values.update((name, []) for name in PER_STEP)
        self._due = 0.0

    def restore(self, step: int) -> None:
        """Take over what an earlier run wrote, up to ``step``."""
        if self.path is None or not self.path.exists():
            return
        try:
            old = json.loads(self.path.read_text())
        except ValueError as error:
            raise ValueError(f"{self.path} is no valid JSON ({error}); move it away to resume without it") from error
        for name in PER_STEP:
            self.values[name] = old.get(name, [])[:step]
        for name in (
            "reference_losses",
            "loss_errors",
            "grad_errors",
            "max_loss_error",
            "max_grad_error",
            "proof",
            "proved",
        ):
            if name in old:
                self.values[name] = old[name]
        self.values["eval_losses"] = [e for e in old.get("eval_losses", []) if e["step"] <= step]
        self.values["runs"] = [r for r in old.get("runs", []) if r["first_step"] < step]
        self.values["steps"] = step

    def add_step(self, **values: Any) -> None:
        for name in PER_STEP:
            self.values[name].append(values[name])
        self.values["steps"] += 1

    def save(self, *, force: bool = False) -> None:
        """Write the file; unforced, so seldom that writing takes at most a twentieth of the time."""
        now = time.monotonic()
        if self.path is None or not (force or now >= self._due):
            return
        write_json(self.path, self.values)
        self._due = time.monotonic() + 20 * (time.monotonic() - now)

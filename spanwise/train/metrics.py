"""``metrics.json``: the numbers of a run, written while it runs and extended by a resumed run."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

#: Lists with one entry a step; a resumed run cuts them back to its checkpoint.
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
    """`value` with null for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically: a reader, or a crash, finds either the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            json.dump(_finite(value), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_metrics(path: Path | None) -> dict[str, Any]:
    """Numbers of an earlier run; empty without a file; ``ValueError`` if no run wrote it."""
    if path is None or not path.exists():
        return {}
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}")
        for name in (*PER_STEP, "eval_losses", "runs"):
            if not isinstance(values.get(name, []), list):
                raise ValueError(f"its {name!r} is no list")
        for name, key in (("eval_losses", "step"), ("runs", "first_step")):
            if not all(isinstance(entry, dict) and isinstance(entry.get(key), int) for entry in values.get(name, [])):
                raise ValueError(f"its {name!r} has an entry without {key!r}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no metrics file ({error}); move it away to resume without it") from error
    return values


class Metrics:
    """The content of ``metrics.json``; without a path, only in memory.

    ``steps`` is the number of finished steps. Lists with an entry a step (null where a resumed run found none):
    ``losses`` (mean over the targets of all ranks, nats a token), ``imbalance`` (largest over mean attention work of
    the ranks of one sequence; the worst sequence of the step), ``recv_tokens`` (K/V tokens that each rank receives for
    one layer's forward), ``tokens_per_second`` (over all ranks), ``grad_norms`` (before clipping), ``learning_rates``,
    ``documents`` (packed into the step), ``epochs`` (passes over the data at the end of the step).

    ``eval_losses`` holds ``{"step", "loss"}``. ``runs`` holds the first step and the ranks of each run. ``proved``:
    the differences from one device (``loss_errors``, ``grad_errors``) stay within ``proof["tolerance"]``. Numbers that
    are not finite are null.
    """

    def __init__(self, path: Path | None, **facts: Any):
        self.path = path
        self.values: dict[str, Any] = {**facts, "steps": 0, "eval_losses": [], "runs": []}
        self.values.update((name, []) for name in PER_STEP)
        self._due = 0.0

    def restore(self, step: int) -> None:
        """Take over the numbers of an earlier run up to `step`; steps that it does not hold become null."""
        old = read_metrics(self.path)
        for name in PER_STEP:
            kept = old.get(name, [])[:step]
            self.values[name] = kept + [None] * (step - len(kept))
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
        """Append one value to each list of `PER_STEP`."""
        for name in PER_STEP:
            self.values[name].append(values[name])
        self.values["steps"] += 1

    def save(self, *, force: bool = False) -> None:
        """Write the file. Without `force` only if writing takes at most a twentieth of the time."""
        now = time.monotonic()
        if self.path is None or not (force or now >= self._due):
            return
        write_json(self.path, self.values)
        self._due = time.monotonic() + 20 * (time.monotonic() - now)

"""The steps of the campaign and their time limits; and the process of one step: ``python -m benchmarks.gpu.steps``."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.campaign import Step

LIMIT = 600.0


class Context(NamedTuple):
    """What a step gets.

    Attributes:
        device: "cuda", or "cpu" in a dry run: then sizes are tiny.
        rows: file for `campaign.write_row`.
        seconds: time that the step has.
    """

    device: str
    rows: Path
    seconds: float

    @property
    def dry(self) -> bool:
        return self.device == "cpu"


# What would be worst to miss comes first, and what may crash last. The limits sum up to less than ten minutes.
_SECONDS = {
    "environment": 20,
    "tests": 70,
    "syncs": 35,
    "parity": 120,
    "replay": 120,
    "trace": 30,
    "layers": 40,
    "lengths": 45,
    "calibrate": 35,
    "train": 35,
    "overlap": 40,
}
NAMES = list(_SECONDS)


def make_steps(device: str) -> list[Step]:
    """All steps, in order; each is this file in a new process. A dry run shares its cores and gets more time."""
    limits = _SECONDS if device == "cuda" else dict.fromkeys(_SECONDS, 120.0)
    return [Step(name, functools.partial(_command, name, device), seconds) for name, seconds in limits.items()]


def _command(name: str, device: str, rows: Path, seconds: float) -> list[str]:
    return [sys.executable, "-m", __name__, name, device, str(rows), str(seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("rows", type=Path)
    parser.add_argument("seconds", type=float)
    given = parser.parse_args()
    if given.device == "cpu":
        import torch

        torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.gpu.step_{given.name}")
    module.run(Context(given.device, given.rows, given.seconds))


if __name__ == "__main__":
    main()

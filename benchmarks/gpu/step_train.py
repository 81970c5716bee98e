"""``spanwise train`` with one rank on the device, its first steps repeated without context parallelism and compared."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.campaign import write_row
from benchmarks.gpu.steps import Context


def run(context: Context) -> None:
    sizes = {"steps": 2, "seq-len": 256} if context.dry else {"steps": 10, "seq-len": 8192}
    with tempfile.TemporaryDirectory(prefix="spanwise-train-") as folder:
        command = [sys.executable, "-m", "spanwise", "train", "--device", context.device, "--ranks", "1"]
        command += ["--prove", "2", "--out", folder, "--data", str(Path(__file__).parent)]
        for name, value in sizes.items():
            command += [f"--{name}", str(value)]
        code = subprocess.run(command, check=False).returncode  # ends with 1 if the comparison fails
        if code:
            sys.exit(code)
        found = json.loads(Path(folder, "metrics.json").read_text())
    row = {**sizes, "first loss": found["losses"][0], "last loss": found["losses"][-1], "proved": found["proved"]}
    row |= {name.replace("_", " "): found[name] for name in ("max_loss_error", "max_grad_error")}
    write_row(context.rows, what="spanwise train", **row, tokens_per_second=found["tokens_per_second"][-1])

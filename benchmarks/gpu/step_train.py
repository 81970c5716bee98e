"""``examples/train_packed.py`` with one rank on the device; its first steps are compared with a dense mask."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.rows import Context, write_row


def run(context: Context) -> None:
    sizes = {"steps": 2, "seq-len": 256} if context.dry else {"steps": 10, "seq-len": 8192}
    with tempfile.TemporaryDirectory(prefix="spanwise-train-") as folder:
        example = Path(__file__).parents[2] / "examples" / "train_packed.py"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(example)]
        command += ["--device", context.device, "--prove", "2", "--out", folder]
        for name, value in sizes.items():
            command += [f"--{name}", str(value)]
        code = subprocess.run(command, check=False).returncode  # ends with 1 if the comparison fails
        if code:
            sys.exit(code)
        found = json.loads(Path(folder, "metrics.json").read_text())["steps"]
    row = {**sizes, "first loss": found[0]["loss"], "last loss": found[-1]["loss"], "proved": True}
    for name in ("loss_error", "gradient_error"):
        row[f"max {name.replace('_', ' ')}"] = max(step[name] for step in found[:2])
    write_row(context.rows, what="train_packed", **row, tokens_per_second=found[-1]["tokens_per_second"])

"""How many planted defects does ``spanwise fuzz`` find?

    python benchmarks/fuzz_mutants.py --out benchmarks/results/fuzz-mutants.json

Each defect is one replacement in a copy of the package. For each, the cases of a seed run until one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Name, file, text, its replacement.
MUTANTS = [
    ("a window is one key too wide", "masks/named.py", "right + np.int32(1)", "right + np.int32(2)"),
    (
        "a causal slice ends one key early",
        "masks/slices.py",
        "(q[of, 1] - 1 - edges[band])",
        "(q[of, 1] - edges[band])",
    ),
    ("a union forgets the longer span", "masks/spans.py", "reach[at] = np.maximum(before, e)", "reach[at] = e"),
    (
        "keys of later batch rows without their offset",
        "attention/chunks.py",
        "getattr(m, part) + offset",
        "getattr(m, part) + 0 * offset",
    ),
    (
        "keys of a chunk in another order",
        "attention/chunks.py",
        "place[by_sender] = np.cumsum(length[by_sender]) - length[by_sender]",
        "place[:] = np.cumsum(length) - length",
    ),
    (
        "chunks merged without rescaling (sdpa)",
        "attention/kernels/merge.py",
        "torch.sigmoid(new_lse - lse)",
        "torch.full_like(lse, 0.5)",
    ),
    (
        "chunks merged without rescaling (reference)",
        "attention/kernels/merge.py",
        "weights = torch.exp(lses - top)",
        "weights = (lses > -torch.inf).to(lses.dtype)",
    ),
    (
        "the gradient of lse is dropped",
        "attention/kernels/merge.py",
        "rows = torch.where(lse == -torch.inf, 0, grad_lse)",
        "rows = torch.zeros_like(grad_lse)",
    ),
    (
        "query heads read the wrong shared head",
        "attention/kernels/reference.py",
        "k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
        "k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)",
    ),
    (
        "gradients of keys that several ranks read are not summed",
        "attention/executor.py",
        "total.index_add_(0, send,",
        "total.index_copy_(0, send,",
    ),
    (
        "gradients of K/V heads that ranks share are not summed (Ulysses)",
        "attention/head_rows.py",
        ".unflatten(0, (num_heads, num_ranks // num_heads)).sum(1)",
        ".unflatten(0, (num_heads, num_ranks // num_heads))[:, 0]",
    ),
    ("a ring passes on only the last gradient", "attention/executor.py", "part.add_(x)", "part.copy_(x)"),
    (
        "part of the gradient of the sinks is lost",
        "attention/attention.py",
        "torch.logaddexp(lse, sink.expand_as(lse))",
        "torch.logaddexp(lse, sink.detach().expand_as(lse))",
    ),
    ("rows without a key give NaN", "attention/kernels/reference.py", "top = torch.where(has_key, top, 0)", "pass"),
    ("the slope of the softcap is left out", "attention/kernels/sdpa.py", "ds.mul_(slope)", "pass"),
    ("a score_mod sees local heads under Ulysses", "attention/attention.py", "h + first, q_idx", "h, q_idx"),
    (
        "a score_mod sees the wrong position in later rows",
        "attention/attention.py",
        "q_idx % seq_len, kv_idx)",
        "q_idx, kv_idx)",
    ),
    (
        "max_logit is 0 for heads of other ranks",
        "attention/attention.py",
        "first - q.shape[1]), value=-math.inf)",
        "first - q.shape[1]), value=0.0)",
    ),
    (
        "a wrong mask name is taken for the first",
        "attention/attention.py",
        "if call.mask not in local.chunks:",
        "if 0:",
    ),
]

_RUN = """
import json, sys
from spanwise.cli.fuzz.check import check
from spanwise.cli.fuzz.command import FuzzOptions
from spanwise.cli.fuzz.ranks import Ranks

def main():
    cases = list(FuzzOptions(num_cases=int(sys.argv[1]), seed=int(sys.argv[2])).chosen())
    with Ranks(8) as ranks:
        for case in cases:
            outcome = check(case, ranks)
            if outcome.error:
                return {"case": case.name, "after": case.index + 1, "error": outcome.error.split("\\n")[0][:200]}
    return {"case": None, "after": None, "error": ""}

if __name__ == "__main__":
    print(json.dumps(main()))
"""


def find(name: str, file: str, text: str, replacement: str, cases: int, seed: int) -> dict[str, object]:
    """The first case that fails with the defect planted."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "spanwise")
        shutil.copytree(ROOT / "spanwise", package, ignore=shutil.ignore_patterns("__pycache__"))
        source = (package / file).read_text()
        if source.count(text) != 1:
            raise ValueError(f"{file} must hold {text!r} once, it does {source.count(text)} times")
        (package / file).write_text(source.replace(text, replacement))
        Path(folder, "run.py").write_text(_RUN)
        done = subprocess.run(
            [sys.executable, f"{folder}/run.py", str(cases), str(seed)],
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=True,
        )
    return {"defect": name, "file": file, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for mutant in MUTANTS:
        rows.append(find(*mutant, options.cases, options.seed))
        print(f"{rows[-1]['after'] or 'not found':>10}  {rows[-1]['defect']}: {rows[-1]['error']}", flush=True)
    found = sum(row["case"] is not None for row in rows)
    print(f"{found} of {len(rows)} defects found within {options.cases} cases")
    if options.out:
        result = {"command": "python benchmarks/fuzz_mutants.py", "cases": options.cases, "seed": options.seed}
        options.out.write_text(json.dumps({**result, "found": found, "mutants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

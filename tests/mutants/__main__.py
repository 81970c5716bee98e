"""Do the tests find planted defects? `python -m tests.mutants masks --json runs/mutants.json`

After a change of tests, run the defects that they are to find: `python -m tests.mutants --tests tests/ranks`

A file `tests/mutants/FOLDER.toml` lists the defects of `spanwise/FOLDER`:

    [[mutant]]
    name = "window-one-wider"
    file = "spanwise/masks/span_mask.py"
    old = "window - 1"          # occurs once in the file
    new = "window"
    tests = "tests/masks"       # paths and options of pytest; default: tests/FOLDER

Each is planted in a copy of the tracked files; it is caught if one of its tests fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One defect: `old` becomes `new` in `file`."""

    folder: str
    name: str
    file: str
    old: str
    new: str
    tests: str

    def planted(self, text: str) -> str:
        """The file's text with the defect.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.folder}/{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}"
            )
        return text.replace(self.old, self.new)


def mutants(folders: list[str] | None = None) -> list[Mutant]:
    """The listed defects of all folders, or of some."""
    return [
        Mutant(path.stem, one["name"], one["file"], one["old"], one["new"], one.get("tests", f"tests/{path.stem}"))
        for path in sorted(LISTS.glob("*.toml"))
        if not folders or path.stem in folders
        for one in tomllib.loads(path.read_text())["mutant"]
    ]


def copy_tracked(target: Path) -> None:
    """Copy the files that git knows."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def is_caught(mutant: Mutant, tree: Path, limit_s: float) -> bool:
    """Run the defect's tests on a tree that has it; a run beyond the limit counts as caught.

    Raises:
        RuntimeError: pytest ran no test.
    """
    file = tree / mutant.file
    text = file.read_text()
    file.write_text(mutant.planted(text))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *mutant.tests.split()],
            cwd=tree, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(text)
    if done.returncode not in (0, 1, 2):  # 2: the package could not be imported
        raise RuntimeError(
            f"{mutant.folder}/{mutant.name}: pytest {mutant.tests} ended with {done.returncode}\n{done.stdout}"
        )
    return done.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", help="default: all")
    parser.add_argument("--name", help="only mutants whose name contains this")
    parser.add_argument("--tests", default="", help="only mutants whose tests contain this")
    parser.add_argument(
        "--json", type=Path, help="where to write name and result of each; kept results are not run again"
    )
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of one run of tests")
    args = parser.parse_args()
    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tracked(tree)
        for mutant in mutants(args.folders):
            key = f"{mutant.folder}/{mutant.name}"
            if key in results or args.tests not in mutant.tests or (args.name and args.name not in mutant.name):
                continue
            began = time.monotonic()
            results[key] = is_caught(mutant, tree, args.limit)
            print(f"{'caught' if results[key] else 'MISSED'}  {key}  {time.monotonic() - began:.0f} s", flush=True)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    caught = sum(results.values())
    print(f"{caught} of {len(results)} caught; missed: {', '.join(k for k, v in results.items() if not v) or 'none'}")
    sys.exit(caught < 0.95 * len(results))


if __name__ == "__main__":
    main()

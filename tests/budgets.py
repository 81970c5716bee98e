"""Hold the sizes of the project: lines of Python by folder, and words of the documents. `make check` runs it.

    python tests/budgets.py

Budgets may shrink. To add lines where none are left, delete others first.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = {
    "spanwise": 27_964, "spanwise/cli": 1_762, "spanwise/integrations": 2_504, "spanwise/calibrate": 448,
    "spanwise/batch": 1_468, "spanwise/recurrence": 1_256, "spanwise/attention": 5_112, "spanwise/advice": 433,
    "spanwise/planning": 1_820, "spanwise/routes": 650, "spanwise/layouts": 2_355, "spanwise/masks": 1_742,
    "spanwise/overlap": 7_455, "tests": 20_291, "benchmarks": 3_700, "examples": 570,
}  # fmt: skip
WORDS = 28_000  # of README and docs


def main() -> int:
    sizes = {name: size((ROOT / name).rglob("*.py"), "\n") for name in LINES}
    sizes["words"] = size([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    over = False
    for name, most in [*LINES.items(), ("words", WORDS)]:
        over |= sizes[name] > most
        print(f"{name:24}{sizes[name]:7,} of {most:7,}{'  too many' * (sizes[name] > most)}")
    return int(over)


def size(files, separator=None) -> int:
    """Words of files, or their lines."""
    texts = [file.read_text(encoding="utf-8").removesuffix("\n") for file in files]
    return sum(len(text.split(separator)) for text in texts if text)


if __name__ == "__main__":
    sys.exit(main())

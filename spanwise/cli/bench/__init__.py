"""Measurements behind `spanwise bench`: each module prints a table and writes JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(result: dict[str, Any], out: Path | None) -> None:
    """`result` as JSON to the file `out`, whose folder is made; nothing without one."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")

"""File of measured costs: milliseconds by signature, in sections by device, version of torch, host and backend."""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from spanwise.overlap.costs.timing import name_of

_FORMAT = "spanwise measured costs 1"
_OVER = " over +0"  # in the signatures of collectives, before their ranks


def sections(device: torch.device, group: dist.ProcessGroup | None) -> dict[bool, str]:
    """Sections of the file for operators (False) and collectives (True: this host only, as networks have no names)."""
    operators = name_of(device)
    size = 1 if group is None else group.size()
    backend = "" if group is None else f", {dist.get_backend_config(group)}"
    return {False: operators, True: f"{operators}, {size} ranks, {socket.gethostname()}{backend}"}


def read(path: str | os.PathLike[str], sections: Mapping[bool, str]) -> dict[str, float]:
    """Times of these sections, by signature; empty without a file; ``ValueError`` if it holds no measured costs."""
    content = _load(path)
    return {
        key: ms
        for of_groups, section in sections.items()
        for key, ms in content.get(section, {}).items()
        if (_OVER in key) == of_groups
    }


def _load(path: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """Milliseconds by section and key; empty without a file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:  # errors of JSON and Unicode are ValueErrors
        raise ValueError(_no_cache(path, str(error))) from error
    if not (isinstance(content, dict) and content.get("format") == _FORMAT and isinstance(content.get("ms"), dict)):
        raise ValueError(_no_cache(path, f'its format is not "{_FORMAT}"'))
    for section, table in content["ms"].items():
        if not isinstance(table, dict):
            raise ValueError(_no_cache(path, f"{section!r} has no times"))
        for key, ms in table.items():
            if not (isinstance(ms, (int, float)) and math.isfinite(ms) and ms >= 0):
                raise ValueError(_no_cache(path, f"{key!r} takes {ms} ms"))
    return content["ms"]


def _no_cache(path: str | os.PathLike[str], why: str) -> str:
    return f"{os.fspath(path)} is not a file of measured costs ({why}): remove it, or name another file"


def write(path: str | os.PathLike[str], sections: Mapping[bool, str], table: Mapping[str, float]) -> None:
    """Add to the file; of several writers at once, the last one's whole file stays."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    everything = _load(target)
    for key, ms in table.items():
        everything.setdefault(sections[_OVER in key], {})[key] = ms
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as file:
        json.dump({"format": _FORMAT, "ms": everything}, file, indent=1, sort_keys=True)
    os.replace(file.name, target)

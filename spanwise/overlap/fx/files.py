"""Graph files: captured fx graphs on disk, with the ranks of their process groups, to be scheduled anywhere.

    torch.compile backend | capture ─► save_graphs ─► file ─► load_graphs ─► graph

A line that says what it is, a line of JSON (torch's version, graphs, groups), then the graphs as torch's own graph
pickler writes them for its caches: nodes with ``meta["val"]`` as sizes, strides, dtypes and aliases; no tensor data.
Programs of ``torch.export`` can be loaded as well.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from spanwise import _torch
from spanwise.overlap.fx import operators

_MAGIC = b"spanwise graphs 1\n"

#: Files in the archives of ``torch.export.save``: of torch 2.8 and later, and of those before.
_OF_PROGRAMS = frozenset({"archive_format", "serialized_exported_program.json"})

#: Modules that define the operators of this package, by the operators' names; this half of it imports the last alone.
_DEFINED_IN = {
    "sdpa": "spanwise.attention.kernels.sdpa",
    "sdpa_backward": "spanwise.attention.kernels.sdpa",
    "varlen": "spanwise.attention.kernels.varlen",
    "varlen_backward": "spanwise.attention.kernels.varlen",
    "agree": "spanwise.overlap.consensus",
}


@dataclasses.dataclass(frozen=True)
class SavedGraphs:
    """What a file holds.

    Attributes:
        graphs: by their names, "forward" say.
        ranks: global ranks of the process groups whose collectives are in the graphs, by the names that these have for
            them; groups that were not known when they were saved are not there.
        labels: what groups are called, by the same names.
    """

    graphs: dict[str, fx.GraphModule]
    ranks: dict[str, tuple[int, ...]]
    labels: dict[str, str]


def save_graphs(
    path: str | os.PathLike[str],
    graphs: Mapping[str, fx.GraphModule],
    *,
    ranks: Mapping[str, Sequence[int]] | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Write graphs to a file that `load_graphs` and ``spanwise overlap --load`` read.

    Of a node's metadata ``"val"`` and ``"custom"`` are kept, of tensors no data, of a module nothing but its graph and
    the tensors that this names.

    Args:
        graphs: ATen graphs by name.
        ranks: global ranks of process groups by the names that the graphs have for them; groups that are left out are
            asked for here, if this process has them.
        labels: what to call groups in reports, by the same names.

    Raises:
        ValueError: no graph, or one that torch's pickler does not take.
    """
    if not isinstance(graphs, Mapping) or not all(isinstance(gm, fx.GraphModule) for gm in graphs.values()):
        kind = (
            f"a mapping from names to {', '.join(sorted({type(gm).__name__ for gm in graphs.values()}))}"
            if isinstance(graphs, Mapping)
            else type(graphs).__name__
        )
        raise ValueError(f'graphs must be a mapping from names to fx.GraphModule, {{"forward": gm}} say, got {kind}')
    if not graphs:
        raise ValueError("there is no graph to save")
    known = {name: [int(rank) for rank in members] for name, members in (ranks or {}).items()}
    blobs = []
    for name, gm in graphs.items():
        for group in sorted({operators.group_of(n) for n in gm.graph.nodes if n.target in operators.STARTS}):
            if group not in known and dist.is_initialized():
                try:
                    known[group] = dist.get_process_group_ranks(_torch.find_group(group))
                except (RuntimeError, ValueError, KeyError):
                    continue  # of another process: whoever loads the file has to say
        try:
            blobs.append(_torch.dump_graph(gm, ("val", "custom")))
        except Exception as error:  # of whatever kind an object has that cannot be pickled
            raise ValueError(f"graph {name!r} cannot be saved: {type(error).__name__}: {error}") from error
    head = {
        "torch": torch.__version__,
        "graphs": [{"name": name, "bytes": len(blob)} for name, blob in zip(graphs, blobs, strict=True)],
        "ranks": known,
        "labels": dict(labels or {}),
    }
    Path(path).write_bytes(_MAGIC + json.dumps(head).encode() + b"\n" + b"".join(blobs))


def load_graphs(path: str | os.PathLike[str]) -> SavedGraphs:
    """Graphs of a file by `save_graphs`, or the graph of a program that ``torch.export.save`` wrote (``.pt2``).

    Both are made of pickles: load none that you do not trust.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither, a graph calls an operator that nothing has registered in this process (import the
            module that defines it first), or another torch wrote it and this one does not understand it.
    """
    path = Path(path)
    data = path.read_bytes()
    if data.startswith(_MAGIC):
        return _load_own(path, data)
    if data.startswith(b"PK") and _is_program(data):
        try:
            program = torch.export.load(io.BytesIO(data))  # of a path it warns that the name should end in .pt2
        except Exception as error:  # of another version, say
            raise ValueError(f"{path} is no program of torch.export: {type(error).__name__}: {error}") from error
        return SavedGraphs({"graph": program.graph_module}, {}, {})
    what = "is a zip file without a program of torch.export, by torch.save perhaps" if data.startswith(b"PK") else ""
    raise ValueError(
        f"{path} {what or 'holds no graphs'}: save them with spanwise.overlap.fx.files.save_graphs, or a program "
        f"with torch.export.save"
    )


def group_sizes(graphs: Iterable[fx.GraphModule]) -> dict[str, dict[int, str]]:
    """The process groups of the graphs' collectives, by name: how many ranks each has, and a node that says so.

    A sum or a broadcast does not say; a group that nothing but such are of has no sizes.
    """
    found: dict[str, dict[int, str]] = {}
    for gm in graphs:
        for node in gm.graph.nodes:
            if node.target in operators.STARTS:
                sizes = found.setdefault(operators.group_of(node), {})
                given = dict(operators.arguments(node, operators.traits(node)))
                rows = given.get("output_split_sizes")  # of an exchange: of each rank
                size = len(rows) if isinstance(rows, (list, tuple)) else given.get("group_size")
                if isinstance(size, int):
                    sizes.setdefault(size, node.name)
    return found


def _is_program(data: bytes) -> bool:
    """Whether a zip file has what ``torch.export.save`` puts into all of its own; torch's loader warns about others."""
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except zipfile.BadZipFile:
        return False
    return any(Path(name).name in _OF_PROGRAMS for name in names)


def _load_own(path: Path, data: bytes) -> SavedGraphs:
    try:
        line, rest = data[len(_MAGIC) :].split(b"\n", 1)
        head = json.loads(line)
        sizes = [(one["name"], one["bytes"]) for one in head["graphs"]]
        written, labels = head["torch"], head["labels"]
        ranks = {name: tuple(members) for name, members in head["ranks"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: its second line does not say what graphs it holds") from error
    if sum(size for _, size in sizes) != len(rest):
        raise ValueError(f"{path} is damaged: {len(rest):,} bytes of graphs, expected {sum(s for _, s in sizes):,}")
    graphs, at = {}, 0
    for name, size in sizes:
        try:
            graphs[name] = _torch.load_graph(rest[at : at + size])
        except Exception as error:  # of whatever kind an unknown operator or class gives
            unknown = _unknown_operator(error)
            raise ValueError(
                f"{path}: graph {name!r} {unknown}"
                if unknown
                else f"{path}: graph {name!r} of torch {written} cannot be read by torch {torch.__version__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        at += size
    return SavedGraphs(graphs, ranks, labels)


def _unknown_operator(error: Exception) -> str:
    """Which operator is not registered in this process, and what would work; "" if that is not the error."""
    found = re.search(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'", str(error))
    if not found:
        return ""
    namespace, operator = found.groups()
    module = _DEFINED_IN.get(operator) if namespace == "spanwise" else None
    return (
        f"calls {namespace}::{operator}, and no such operator of the namespace {namespace!r} is registered in this "
        f"process: import {module or 'the module that defines it'} before you load the graphs"
    )

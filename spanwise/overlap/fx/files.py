"""Graph files: fx graphs and the ranks of their process groups on disk, to schedule them anywhere.

    torch.compile backend | capture ─► save_graphs ─► file ─► load_graphs ─► optimize

A file is a line with its format, a line of JSON (torch's version, graphs, groups), then pickled graphs. torch's graph
pickler writes them as for its caches: ``meta["val"]`` keeps sizes, strides, dtypes and aliases, but no tensor data.
Spans of attention (``meta["known"]``) follow as arrays, because they are what attention is priced by.

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

import numpy as np
import torch
import torch.distributed as dist
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx import operators

_MAGIC = b"spanwise graphs 1\n"

#: Files in the archives of ``torch.export.save``: of torch 2.8 and later, and of those before.
_OF_PROGRAMS = frozenset({"archive_format", "serialized_exported_program.json"})


@dataclasses.dataclass(frozen=True)
class SavedGraphs:
    """Contents of a file.

    Attributes:
        graphs: graphs by name, such as "forward".
        ranks: global ranks of the graphs' process groups, by their names in the graphs. A group that was unknown when
            the file was written is missing.
        labels: labels of groups for reports, by the same names.
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
    """Write graphs to a file for `load_graphs` and ``spanwise overlap --load``.

    Nodes keep ``meta["val"]`` and ``meta["custom"]``, without tensor data, and the tensors of ``meta["known"]``. A
    module keeps its graph and the tensors that the graph names.

    Args:
        path: file to write.
        graphs: ATen graphs by name.
        ranks: global ranks of process groups by their names in the graphs; other groups are looked up in this process.
        labels: labels of groups for reports, by the same names.

    Raises:
        ValueError: no graph, or one that torch's pickler refuses.

    >>> import pathlib, tempfile
    >>> gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "step.graphs"
    >>> save_graphs(path, {"forward": gm}, labels={"0": "dp"})
    >>> load_graphs(path).labels
    {'0': 'dp'}
    """
    if not isinstance(graphs, Mapping) or not all(isinstance(gm, fx.GraphModule) for gm in graphs.values()):
        kind = (
            f"a mapping from names to {', '.join(sorted({type(gm).__name__ for gm in graphs.values()}))}"
            if isinstance(graphs, Mapping)
            else type(graphs).__name__
        )
        raise ValueError(f'graphs must be a mapping from names to fx.GraphModule, as in {{"forward": gm}}, got {kind}')
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
                    continue  # a group of another process: the loader must pass its ranks
        try:
            blobs.append(_torch.dump_graph(gm, ("val", "custom")))
        except Exception as error:  # pickling may raise anything
            raise ValueError(f"graph {name!r} cannot be saved: {type(error).__name__}: {error}") from error
    contents = _dump_contents(graphs)
    head = {
        "torch": torch.__version__,
        "graphs": [{"name": name, "bytes": len(blob)} for name, blob in zip(graphs, blobs, strict=True)],
        "ranks": known,
        "labels": dict(labels or {}),
        "contents": len(contents),
    }
    Path(path).write_bytes(_MAGIC + json.dumps(head).encode() + b"\n" + b"".join(blobs) + contents)


def _dump_contents(graphs: Mapping[str, fx.GraphModule]) -> bytes:
    """The tensors of ``meta["known"]`` as arrays named "graph/node"."""
    found = {
        f"{name}/{node.name}": node.meta["known"].detach().cpu().numpy()
        for name, gm in graphs.items()
        for node in gm.graph.nodes
        if isinstance(node.meta.get("known"), torch.Tensor)
    }
    file = io.BytesIO()
    np.savez_compressed(file, **found)
    return file.getvalue() if found else b""


def _load_contents(graphs: Mapping[str, fx.GraphModule], data: bytes) -> None:
    """Give nodes the tensors that `_dump_contents` wrote."""
    if not data:
        return
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for name, gm in graphs.items():
            for node in gm.graph.nodes:
                if f"{name}/{node.name}" in arrays:
                    node.meta["known"] = torch.from_numpy(arrays[f"{name}/{node.name}"])


def load_graphs(path: str | os.PathLike[str]) -> SavedGraphs:
    """Load the graphs of a file by `save_graphs`, or the graph of a program by ``torch.export.save`` (``.pt2``).

    Both contain pickles, which may run code: load only files that you trust.

    Returns:
        `SavedGraphs` with ``graphs``, ``ranks`` and ``labels``; `save_graphs` has an example.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is neither; a graph calls an operator that is not registered in this process (import its
            module first); or another version of torch wrote it and this one cannot read it.
    """
    path = Path(path)
    data = path.read_bytes()
    if data.startswith(_MAGIC):
        return _load_own(path, data)
    if data.startswith(b"PK") and _is_program(data):
        try:
            program = torch.export.load(io.BytesIO(data))  # a path without .pt2 warns
        except Exception as error:  # for example another version of torch
            raise ValueError(f"{path} is no program of torch.export: {type(error).__name__}: {error}") from error
        return SavedGraphs({"graph": program.graph_module}, {}, {})
    what = "is a zip file without a program of torch.export, by torch.save perhaps" if data.startswith(b"PK") else ""
    raise ValueError(
        f"{path} {what or 'holds no graphs'}: save them with spanwise.overlap.save_graphs, or a program with "
        f"torch.export.save"
    )


def group_sizes(graphs: Iterable[fx.GraphModule]) -> dict[str, dict[int, str]]:
    """Sizes of the graphs' process groups, each with a node that shows it; by the group's name.

    An all-reduce or a broadcast does not show a size: a group with only those has none.
    """
    found: dict[str, dict[int, str]] = {}
    for gm in graphs:
        for node in gm.graph.nodes:
            if node.target in operators.STARTS:
                sizes = found.setdefault(operators.group_of(node), {})
                given = operators.named_arguments(node)
                rows = given.get("output_split_sizes")  # of an all-to-all: one per rank
                size = len(rows) if isinstance(rows, (list, tuple)) else given.get("group_size")
                if isinstance(size, int):
                    sizes.setdefault(size, node.name)
    return found


def _is_program(data: bytes) -> bool:
    """Whether a zip file is by ``torch.export.save``; torch's loader warns about others."""
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
        contents = head.get("contents", 0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: its second line does not say what graphs it holds") from error
    expected = sum(size for _, size in sizes) + contents
    if expected != len(rest):
        raise ValueError(f"{path} is damaged: {len(rest):,} bytes of graphs, expected {expected:,}")
    graphs, at = {}, 0
    for name, size in sizes:
        try:
            graphs[name] = _torch.load_graph(rest[at : at + size])
        except Exception as error:  # an unknown operator or class may raise anything
            unknown = _unknown_operator(error)
            raise ValueError(
                f"{path}: graph {name!r} {unknown}"
                if unknown
                else f"{path}: graph {name!r} of torch {written} cannot be read by torch {torch.__version__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        at += size
    _load_contents(graphs, rest[at:])
    return SavedGraphs(graphs, ranks, labels)


def _unknown_operator(error: Exception) -> str:
    """The operator that is not registered in this process, and the remedy; "" for other errors."""
    found = re.search(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'", str(error))
    if not found:
        return ""
    namespace, operator = found.groups()
    module = "spanwise" if namespace == "spanwise" else "the module that defines it"
    return (
        f"calls {namespace}::{operator}, and no such operator of the namespace {namespace!r} is registered in this "
        f"process: import {module} before you load the graphs"
    )

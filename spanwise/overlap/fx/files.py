"""Graph files: fx graphs and the ranks of their process groups on disk, to schedule them anywhere.

    torch.compile backend | capture ─► save_graphs ─► file ─► load_graphs ─► optimize

A file is a numpy archive of JSON (torch's version, graphs, groups), pickled graphs, and the spans of attention
(``meta["known"]``), by which attention is priced. torch's graph pickler writes the graphs as for its caches:
``meta["val"]`` keeps sizes, strides, dtypes and aliases, but no tensor data. Programs of ``torch.export`` can be loaded
as well.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx import operators

_HEAD = "spanwise graphs"

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
        given = graphs.values() if isinstance(graphs, Mapping) else [graphs]
        kinds = ", ".join(sorted({type(gm).__name__ for gm in given}))
        raise ValueError(f'graphs must be a mapping from names to fx.GraphModule, as in {{"forward": gm}}, got {kinds}')
    if not graphs:
        raise ValueError("there is no graph to save")
    known = {name: [int(rank) for rank in members] for name, members in (ranks or {}).items()}
    contents: dict[str, np.ndarray] = {}
    for name, gm in graphs.items():
        for group in sorted({operators.group_of(n) for n in gm.graph.nodes if n.target in operators.STARTS}):
            if group not in known and dist.is_initialized():
                try:
                    known[group] = dist.get_process_group_ranks(_torch.find_group(group))
                except (RuntimeError, ValueError, KeyError):
                    continue  # a group of another process: the loader must pass its ranks
        try:
            contents[f"graph {name}"] = np.frombuffer(_torch.dump_graph(gm, ("val", "custom")), np.uint8)
        except Exception as error:  # pickling may raise anything
            raise ValueError(f"graph {name!r} cannot be saved: {type(error).__name__}: {error}") from error
        for node in gm.graph.nodes:
            if isinstance(node.meta.get("known"), torch.Tensor):
                contents[f"known {name} {node.name}"] = node.meta["known"].detach().cpu().numpy()
    head = {"torch": torch.__version__, "graphs": list(graphs), "ranks": known, "labels": dict(labels or {})}
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **{_HEAD: np.array(json.dumps(head)), **contents})  # type: ignore[arg-type]


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
    try:
        names = {Path(name).name for name in zipfile.ZipFile(io.BytesIO(data)).namelist()}
    except zipfile.BadZipFile:
        names = set()
    if f"{_HEAD}.npy" in names:
        return _load_own(path, data)
    if names & _OF_PROGRAMS:  # torch's loader warns about other files
        try:
            program = torch.export.load(io.BytesIO(data))  # a path without .pt2 warns
        except Exception as error:  # for example another version of torch
            raise ValueError(f"{path} is no program of torch.export: {type(error).__name__}: {error}") from error
        return SavedGraphs({"graph": program.graph_module}, {}, {})
    raise ValueError(
        f"{path} holds no graphs, or is damaged: save them with spanwise.overlap.save_graphs, or a program with "
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


def _load_own(path: Path, data: bytes) -> SavedGraphs:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            contents = dict(archive)
        head = json.loads(str(contents[_HEAD]))
        written, labels = head["torch"], head["labels"]
        blobs = {name: contents[f"graph {name}"].tobytes() for name in head["graphs"]}
        ranks = {name: tuple(members) for name, members in head["ranks"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    graphs = {}
    for name, blob in blobs.items():
        try:
            graphs[name] = _torch.load_graph(blob)
        except Exception as error:  # an unknown operator or class may raise anything
            text = f"of torch {written} cannot be read by torch {torch.__version__}: {type(error).__name__}: {error}"
            raise ValueError(f"{path}: graph {name!r} {_unknown_operator(error) or text}") from error
        for node in graphs[name].graph.nodes:
            if (known := contents.get(f"known {name} {node.name}")) is not None:
                node.meta["known"] = torch.from_numpy(known)
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

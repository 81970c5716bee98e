"""Graph files: fx graphs and the ranks of their process groups on disk, to schedule them anywhere.

    torch.compile backend | capture ─► save_graphs ─► file ─► load_graphs ─► optimize

A file is a ``torch.save`` of groups, pickled graphs, and the spans of attention (``meta["known"]``), by which attention
is priced. ``meta["val"]`` keeps sizes, strides, dtypes and aliases, but no tensor data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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
        raise ValueError(f'graphs must be a mapping from names to fx.GraphModule, as {{"forward": gm}}, got {graphs!r}')
    if not graphs:
        raise ValueError("there is no graph to save")
    known = {name: [int(rank) for rank in members] for name, members in (ranks or {}).items()}
    pickles: dict[str, bytes] = {}
    spans: dict[str, dict[str, torch.Tensor]] = {}
    for name, gm in graphs.items():
        for group in {operators.group_of(n) for n in gm.graph.nodes if n.target in operators.STARTS} - set(known):
            with contextlib.suppress(RuntimeError, ValueError, KeyError):  # a group of another process
                known[group] = dist.get_process_group_ranks(_torch.find_group(group))
        try:
            pickles[name] = zlib.compress(_torch.dump_graph(gm, ("val", "custom")))
        except Exception as error:  # pickling may raise anything
            raise ValueError(f"graph {name!r} cannot be saved: {type(error).__name__}: {error}") from error
        spans[name] = {n.name: n.meta["known"].detach().cpu() for n in gm.graph.nodes if "known" in n.meta}
    head = {"ranks": known, "labels": dict(labels or {})}
    with Path(path).open("wb") as file:  # torch.save refuses some names of paths
        torch.save({_HEAD: head, "graphs": pickles, "known": spans}, file)


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
    data = Path(path).read_bytes()
    try:
        names = {Path(name).name for name in zipfile.ZipFile(io.BytesIO(data)).namelist()}
        if names & _OF_PROGRAMS:  # torch's loader warns about other files
            return SavedGraphs({"graph": torch.export.load(io.BytesIO(data)).graph_module}, {}, {})
        contents = torch.load(io.BytesIO(data), weights_only=True)
        if not isinstance(contents, dict) or _HEAD not in contents:
            raise ValueError("it has no graphs")
        graphs = {name: _torch.load_graph(zlib.decompress(of)) for name, of in contents["graphs"].items()}
    except Exception as error:  # a damaged file, another version of torch, an unknown operator or class
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(
            f"{os.fspath(path)} holds no graphs that torch {torch.__version__} can read ({why}): save them with "
            f"spanwise.overlap.save_graphs, or a program with torch.export.save, and import the modules that define "
            f"their operators before you load"
        ) from error
    for name, of_nodes in contents["known"].items():
        for node in graphs[name].graph.nodes:
            if node.name in of_nodes:
                node.meta["known"] = of_nodes[node.name]
    head = contents[_HEAD]
    ranks = {name: tuple(members) for name, members in head["ranks"].items()}
    return SavedGraphs(graphs, ranks, head["labels"])


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

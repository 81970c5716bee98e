"""RecurrenceRoute: how states and halos of a sharded sequence travel, made once a batch from a plan.

The maps of a rank go by all-to-all to the ranks that hold later tokens of the same documents, which compose them. Their
gradients travel back.
"""

# B batch, T tokens of this rank in a batch row, R rows of its shard: T, or B * T where batch rows differ

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spanwise import _torch
from spanwise.attention.chunks import on_device, size
from spanwise.attention.executor import RankStep
from spanwise.attention.rank_plan import compare_fingerprints, device_of, rank_on
from spanwise.layouts import document_runs
from spanwise.layouts.document_runs import DocumentRuns
from spanwise.layouts.runs import ragged_arange
from spanwise.masks.arrays import Bool, Int64
from spanwise.masks.checks import check_positive
from spanwise.planning import documents
from spanwise.planning.plan import Plan

# Tokens of a chunk; where each key dim has a decay, a chunk holds 16² K of them. `chunkwise` gives times.
_CHUNK = 16


@dataclasses.dataclass(frozen=True)
class ChunkTable:
    """Runs of this rank of one kind, cut into chunks.

    Attributes:
        tokens: int64 ``[N, C]``, rows of the shard, R in places that are empty. First the first chunk of each run,
            the longest run first; then the second chunks; …
        order: int64 ``[P]``, the runs by number of chunks.
        counts: int64 in host memory, runs that have a first, a second, … chunk.
    """

    tokens: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor


@dataclasses.dataclass(frozen=True)
class RecurrenceRoute:
    """One rank's part of a plan for layers that carry a state along the sequence; a pytree of tensors.

    Attributes:
        tokens: ``[T, 0]``; carries the rank's tokens in a batch row in its shape.
        whole: runs that are documents.
        first, middle: runs of documents that go on elsewhere, numbered together: one has the chunks of those that open
            a document, the other the chunks of those that do not.
        rest: runs of documents that began elsewhere.
        through: int64 ``[R]``, the run in `middle` of each token; the number of runs for other tokens.
        step: maps that travel, of runs as `first` and `middle` number them.
        chain, counts, reads, read_from, read_counts: see `_ops.compose`; counts lie in host memory. Maps are those own
            ones, then the received ones, and states enter the runs of `rest`.
        halo: rows before the runs of this rank that travel, for convolutions up to `conv_width`.
        stream: int64, each run behind its halo: rows of the shard, then arrived rows, then one row of zeros.
        outputs: int64 ``[R]``, where the window of each token begins in the stream.
        digest: uint8 ``[16]`` in host memory, of plan and documents; compared across the ranks in each call.
        apart: whether any document lies on several ranks, so that calls communicate.
        rows: batch rows with layouts or documents of their own; 1 where one serves all.
        mesh: of all ranks, 1-D; None for one rank.
    """

    tokens: torch.Tensor
    whole: ChunkTable
    first: ChunkTable
    middle: ChunkTable
    rest: ChunkTable
    through: torch.Tensor
    step: RankStep
    chain: torch.Tensor
    counts: torch.Tensor
    reads: torch.Tensor
    read_from: torch.Tensor
    read_counts: torch.Tensor
    halo: RankStep
    stream: torch.Tensor
    outputs: torch.Tensor
    digest: torch.Tensor
    apart: bool
    rows: int
    conv_width: int
    mesh: DeviceMesh | None


_torch.register_pytree_dataclass(ChunkTable, static=())
_torch.register_pytree_dataclass(RecurrenceRoute, static=("apart", "rows", "conv_width", "mesh"))


def recurrence_route(
    plan: Plan,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    *,
    cu_seqlens: Any = None,
    conv_width: int = 4,
) -> RecurrenceRoute:
    """What `causal_conv`, `gated_linear` and `gated_delta` need of a plan: make it once a batch, for all layers.

    A collective call over `mesh`, which compares the plans of all ranks; outside of compiled code. Compiled code takes
    the routes of any number of plans without compiling again.

    Args:
        plan: of a square mask; its layout and its documents count, whatever the mask lets tokens read.
        mesh: 1-D mesh of all ranks of the plan; None on one rank.
        device: where the tensors live; default: the mesh's device type.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one array per batch row; default: those of the plan, or one
            document where the plan's mask cannot hold several. Padding of a packing belongs to no document.
        conv_width: largest width of a convolution; one row less travels before each run.

    Raises:
        ValueError: a plan of cross attention, unknown or bad document offsets, a mesh that does not fit, or plans that
            differ between the ranks.

    >>> import spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 3, 8]), num_ranks=1)
    >>> spanwise.recurrence.recurrence_route(plan).apart
    False
    """
    if torch.compiler.is_compiling():
        raise ValueError("call recurrence_route outside of compiled code, and pass the result")
    if not isinstance(plan, Plan):
        raise ValueError(f"recurrence_route needs the Plan, got a {type(plan).__name__}")
    if plan.kv_layout != plan.layout:
        raise ValueError("a layer with a state runs along one sequence; the plan is for cross attention")
    packings = documents.packings(plan, cu_seqlens, state=True)
    rank, conv_width = rank_on(mesh, plan.num_ranks), check_positive(conv_width, "conv_width")
    device = device_of(device, mesh)
    everyone, rows = document_runs.find(plan.layout, packings), max(plan.layout.batch_size, len(packings))
    prints = hashlib.blake2b(f"recurrence of {plan.fingerprint}, {conv_width}".encode(), digest_size=16)
    for values in everyone:
        prints.update(np.ascontiguousarray(values).tobytes())
    if mesh is not None and plan.num_ranks > 1:
        compare_fingerprints("recurrence_route", prints.hexdigest(), mesh)
    with _torch.plain_tensors() as to_active_mode:
        built = _built(plan, everyone, rows, rank, device, conv_width, mesh, prints.digest())
    route: RecurrenceRoute = to_active_mode(built)
    return route


def _built(
    plan: Plan, of: DocumentRuns, rows: int, rank: int, device: torch.device, conv_width: int, mesh: DeviceMesh | None,
    digest: bytes,
) -> RecurrenceRoute:  # fmt: skip
    """The route of one rank, from the runs of all."""
    length, host = plan.layout.num_tokens(rank), torch.device("cpu")
    mine, opens, size_of = of.rank == rank, of.opens, of.stop - of.start
    sent, rest = np.flatnonzero(mine & ~of.closes), np.flatnonzero(mine & ~opens)

    def table(runs: Int64, kind: Bool) -> ChunkTable:
        size, at = np.where(kind, size_of, 0)[runs], of.at[runs]
        order, counts, place, step = _side_by_side(-(-size // _CHUNK))
        run, inside = order[place], step[:, None] * _CHUNK + np.arange(_CHUNK)
        tokens = np.where(inside < size[run][:, None], at[run][:, None] + inside, rows * length)
        return ChunkTable(_index(tokens, device), _index(order, device), _index(counts, host))

    # Maps: own ones of runs that go on elsewhere, then those of other ranks, as they arrive.
    reader, run = document_runs.maps(of, plan.num_ranks)
    away = of.rank[run] != reader
    leaves, comes, sizes = exchanged(reader[away], of.rank[run[away]], rank, plan.num_ranks)
    chain, row, entered = run[reader == rank], *np.zeros((2, len(mine)), dtype=np.int64)
    row[sent], entered[rest] = np.arange(len(sent)), np.arange(len(rest))
    row[run[away][comes]] = len(sent) + np.arange(len(comes))
    document, first, links = np.unique(of.document[chain], return_index=True, return_counts=True)
    order, counts, place, step = _side_by_side(links)
    read_from = np.argsort(order)[np.searchsorted(document, of.document[rest])]
    read_step = rest - chain[first][order][read_from] - 1
    by_step = np.lexsort((read_from, read_step))
    middle = sent[~opens[sent]]
    through = np.full(rows * length, len(sent))
    through[_tokens(of.at[middle], size_of[middle])] = np.repeat(row[middle], size_of[middle])
    halo, stream, outputs = _halo(of, rank, plan.num_ranks, rows * length, conv_width - 1, device)
    return RecurrenceRoute(
        tokens=_torch.mark_dynamic(torch.empty(length, 0, device=device), 0),
        whole=table(np.flatnonzero(mine & opens & of.closes), mine),
        first=table(sent, opens),
        middle=table(sent, ~opens),
        rest=table(rest, mine),
        # Compiled code knows that these have as many entries as the shard has rows.
        through=_torch.mark_dynamic(on_device(through, device), 0),
        step=step_of(row[run[away][leaves]], sizes, device),
        chain=_index(row[chain[first[order][place] + step]], device),
        counts=_index(counts, host),
        reads=_index(entered[rest[by_step]], device),
        read_from=_index(read_from[by_step], device),
        read_counts=_index(np.bincount(read_step, minlength=len(counts)), host),
        halo=halo,
        stream=_index(stream, device),
        outputs=_torch.mark_dynamic(on_device(outputs, device), 0),
        digest=torch.tensor(list(digest), dtype=torch.uint8),
        apart=bool((~opens).any()),
        rows=rows,
        conv_width=conv_width,
        mesh=mesh,
    )


def _side_by_side(lengths: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Chains of these lengths, walked side by side, the longest first.

    Returns:
        The chains by length; chains that go on at each step; for each link, step by step, the place of its chain in
        that order, and its step.
    """
    order = np.argsort(-lengths, kind="stable")
    counts = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(lengths.max(initial=0)), side="right")
    step = np.repeat(np.arange(len(counts)), counts)
    return order, counts, _tokens(np.zeros_like(counts), counts), step


def _halo(
    of: DocumentRuns, rank: int, num_ranks: int, num_tokens: int, width: int, device: torch.device
) -> tuple[RankStep, Int64, Int64]:
    """`halo`, `stream` and `outputs` of a rank's route, for a convolution that reads `width` tokens back."""
    reader, token = document_runs.halos(of, width)
    run = of.holder(token)
    leaves, comes, sizes = exchanged(reader, of.rank[run], rank, num_ranks)
    # Before each run its halo, or zeros before its document.
    mine = np.flatnonzero(of.rank == rank)
    size = of.stop[mine] - of.start[mine]
    place = _tokens(of.start[mine] - width, size + width)
    lowest = np.repeat(of.floor[mine], size + width)
    holder = of.holder(np.maximum(place, lowest))
    by_token = np.argsort(token[comes])
    arrived = np.append(by_token, 0)[np.searchsorted(token[comes], place, sorter=by_token)]
    stream = np.where(of.rank[holder] == rank, of.at[holder] + place - of.start[holder], num_tokens + arrived)
    stream[place < lowest] = num_tokens + len(comes)
    stream = np.append(stream, np.full(width, num_tokens + len(comes)))
    outputs = np.full(num_tokens, len(stream) - width)
    outputs[_tokens(of.at[mine], size)] = _tokens(np.cumsum(size + width) - size - width, size)
    return step_of((of.at[run] + token - of.start[run])[leaves], sizes, device), stream, outputs


def _tokens(start: Int64, size: Int64) -> Int64:
    return ragged_arange(np.stack([start, start + size], axis=1))


def exchanged(receiver: Int64, sender: Int64, rank: int, num_ranks: int) -> tuple[Int64, Int64, tuple[Int64, Int64]]:
    """What a rank sends and receives of rows that travel, in one order on all ranks.

    Returns:
        Rows that leave, those for rank 0 first; rows that come, rank 0's first; how many to and from each rank.
    """
    leaves, comes = np.flatnonzero(sender == rank), np.flatnonzero(receiver == rank)
    to, source = receiver[leaves], sender[comes]
    counts = np.bincount(to, minlength=num_ranks), np.bincount(source, minlength=num_ranks)
    return leaves[np.argsort(to, kind="stable")], comes[np.argsort(source, kind="stable")], counts


def step_of(send: Int64, counts: tuple[Int64, Int64], device: torch.device, order: Int64 | None = None) -> RankStep:
    """A step of the executor: rows sent, rank 0's first; rows sent to and received from each rank; their order."""
    sent, received = (tuple(size(n, device) for n in each.tolist()) for each in counts)
    return RankStep(_index(send, device), None if order is None else _index(order, device), sent, received)


def _index(numbers: Int64, device: torch.device) -> torch.Tensor:
    return _torch.mark_unbacked(on_device(np.ascontiguousarray(numbers, dtype=np.int64), device), 0)


def check_route(route: RecurrenceRoute, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """``ValueError`` for anything but a route, such as a plan, and for DTensors."""
    if not isinstance(route, RecurrenceRoute):
        raise ValueError(f"route must come from recurrence_route(plan, mesh), got a {type(route).__name__}")
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise ValueError(f"{name} is a DTensor {x.placements}; give whole heads or channels by {name}.to_local()")


def to_rows(name: str, x: torch.Tensor, route: RecurrenceRoute, features: int) -> torch.Tensor:
    """``[R, b, …]`` from a shard ``[B, T, …]`` or ``[T, …]``; b is 1 where R has the batch rows, else B.

    ``ValueError`` names the tensor, whose dims after T are `features`.
    """
    before = x.dim() - features
    if before not in (1, 2) or x.shape[before - 1] != route.tokens.shape[0]:
        tokens = f"this rank's {route.tokens.shape[0]} tokens"
        raise ValueError(f"{name} must be {tokens} and {features} dims after them, got shape {tuple(x.shape)}")
    _torch.fix_sizes(*x.shape[before:])
    if before == 1:
        x = x.unsqueeze(0)
    if route.rows == 1:
        return x.transpose(0, 1)
    if x.shape[0] != route.rows:
        raise ValueError(f"{name} must have a batch dim of {route.rows}, as the route, got shape {tuple(x.shape)}")
    return x.flatten(0, 1).unsqueeze(1)


def from_rows(rows: torch.Tensor, route: RecurrenceRoute, flat: bool) -> torch.Tensor:
    """The inverse of `to_rows`; `flat` if the shard has no batch dim."""
    if route.rows == 1:
        x = rows.transpose(0, 1)
        return x.squeeze(0) if flat else x
    return rows.squeeze(1).unflatten(0, (route.rows, route.tokens.shape[0]))

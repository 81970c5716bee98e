"""K/V that each exchange holds, by the length of the sequence: ``python -m benchmarks.memory``.

From plans, for lengths that no CPU computes: `Plan.resident_bytes`, the most that a rank holds in a layer's forward in
addition to its own shards, and `Plan.saved_bytes`, the part that it keeps for the backward. Then measured, for lengths
that a CPU computes: real ranks over gloo run one forward and backward, and every storage to which q, K, V or the output
were copied counts while it lives. If only K/V travel the two are equal, except that gloo may free the buffer of an
all-gather a moment late. Under Ulysses q and the output travel as well; the measurement, unlike the plan, then counts
results of the kernel and of the merge.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.plan import document_offsets
from benchmarks.publish import main, publish
from spanwise import _torch
from spanwise.attention.attention import context_parallel_attention
from spanwise.cli.report.page import Table
from spanwise.masks.span_mask import SpanMask
from spanwise.overlap.explain.units import num_bytes
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

RANKS = 8
LENGTHS = tuple(2**n for n in range(14, 21))
SHAPE: dict[str, Any] = dict(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
WINDOW = 4096
# Ways to exchange: ranks, or (outer, inner) of two levels; exchange.
WAYS: dict[str, tuple[int | tuple[int, int], str]] = {
    "all_gather": (RANKS, "all_gather"),
    "needed": (RANKS, "needed"),
    "ring": (RANKS, "ring"),
    "ulysses": (RANKS, "ulysses"),
    "ulysses x 2, needed": ((RANKS // 2, 2), "needed"),
    "ulysses x 2, ring": ((RANKS // 2, 2), "ring"),
}
BALANCERS = {"documents": "local", "causal": "head_tail", "window": "contiguous"}
# Bytes follow from heads and tokens alone. A CPU gets fewer heads, and masks whose area grows with the length.
MEASURED_LENGTHS, QUICK_LENGTHS = (8192, 16_384, 32_768), (2048,)
MEASURED_MASKS = ("documents", "window")
MEASURED_SHAPE = {**SHAPE, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}


class Copies(_torch.TorchDispatchMode):
    """Follows tensors through operators that only move their elements, and sums the bytes of live storages.

    Results of operators on a followed tensor are followed under its name. Results of an attention kernel are named
    "out".

    Args:
        tensors: by name; their own storages do not count.

    Attributes:
        peaks: most bytes that were alive at once, by name and of "all" together; may be emptied to begin anew.
    """

    def __init__(self, **tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        # Name and bytes of each storage. A weak reference keeps its address from being used again.
        self._followed: dict[StorageWeakRef, tuple[str, int]] = {}
        self.peaks: dict[str, int] = {}
        for name, group in tensors.items():
            for x in group:
                self._follow(x, name)
        self._own = set(self._followed)

    def alive(self) -> dict[str, int]:
        """Bytes by name, without the tensors that were given."""
        found: dict[str, int] = {}
        for storage, (name, size) in self._followed.items():
            if storage not in self._own and not storage.expired():
                found[name] = found.get(name, 0) + size
        return found

    def _follow(self, x: torch.Tensor, name: str) -> None:
        storage = x.untyped_storage()
        self._followed.setdefault(StorageWeakRef(storage), (name, storage.nbytes()))

    def _name(self, x: torch.Tensor) -> set[str]:
        known = self._followed.get(StorageWeakRef(x.untyped_storage()))
        return set() if known is None else {known[0]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names: set[str] = set()
        for x in _torch.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                names |= self._name(x)
        results = func(*args, **(kwargs or {}))
        if func.name().startswith("spanwise::"):
            names = {"out"}
        for x in _torch.tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.dim():  # a scalar is a stand-in without memory
                for name in names:
                    self._follow(x, name)
        alive = self.alive()
        alive["all"] = sum(alive.values())
        self.peaks = {name: max(alive.get(name, 0), self.peaks.get(name, 0)) for name in alive | self.peaks}
        return results


def copied_bytes(
    plan: Plan, mesh: DeviceMesh | None, inputs: list[torch.Tensor], grad_out: torch.Tensor, kept: int
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes of copies of "q", "kv" and "out" in one call: most in the forward, after it, most in the backward.

    A collective call, on the CPU.

    Args:
        inputs: this rank's q, k and v, leaves that require gradients.
        grad_out: of the output.
        kept: bytes of "kv" expected after the forward. gloo's threads free the buffer of an all-gather late; while
            there is more, wait up to five seconds.
    """
    q, k, v = inputs
    local = plan.local(mesh, "cpu", kernel="sdpa")
    copies = Copies(q=(q,), kv=(k, v))
    with copies:
        out = context_parallel_attention(q, k, v, local, mesh, kernel="sdpa")
    deadline = time.monotonic() + 5
    while copies.alive().get("kv", 0) > kept and time.monotonic() < deadline:
        time.sleep(0.01)
    forward, after = copies.peaks, copies.alive()
    copies.peaks = {}
    with copies:
        out.backward(grad_out)
    return forward, after, copies.peaks


def masks(seq_len: int) -> dict[str, SpanMask]:
    """The masks by name."""
    return {
        "documents": SpanMask.documents(document_offsets(seq_len, 0)),
        "causal": SpanMask.causal(seq_len),
        "window": SpanMask.sliding_window(seq_len, min(WINDOW, seq_len // 4)),
    }


def plan_of(way: str, name: str, mask: SpanMask, shape: dict[str, Any]) -> Plan:
    """The plan of one way to exchange. K/V are kept by default, except in a ring."""
    ranks, exchange = WAYS[way]
    return make_plan(mask, ranks, balancer=BALANCERS[name], exchange=exchange, **shape)


def run(out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Plan, measure, print two tables, and write JSON to `out` if it is given.

    Args:
        quick: lengths to 65,536 tokens are planned, 2,048 tokens are measured.

    Returns:
        ``{"torch", "ranks", "shape", "planned": [...], "measured_shape", "measured": [...]}``; all sizes in bytes, of
        the rank with the most. A row has ``tokens``, ``mask``, ``way``, ``shard`` (K/V that a rank holds anyway),
        ``resident`` and ``saved``, and where it was measured ``resident_measured`` (K/V alive at once; under Ulysses q
        and outputs too) and ``saved_measured`` (after the forward, without the layer's output and lse).
    """
    planned = []
    for seq_len in LENGTHS[:3] if quick else LENGTHS:
        for name, mask in masks(seq_len).items():
            planned += [_row(way, name, plan_of(way, name, mask, SHAPE)) for way in WAYS]
    title = f"K/V in addition to a rank's own, from plans: {RANKS} ranks, 32 heads (8 K/V) of 128, bfloat16"
    print(_table(planned, title))
    lengths = QUICK_LENGTHS if quick else MEASURED_LENGTHS
    cases = [(way, name, n) for n in lengths for name in MEASURED_MASKS for way in WAYS]
    measured = measure(cases)
    result = {
        "torch": torch.__version__,
        "ranks": RANKS,
        "shape": SHAPE,
        "measured_shape": MEASURED_SHAPE,
        "planned": planned,
        "measured": measured,
    }
    title = f"The same measured: {RANKS} processes, 8 heads (2 K/V) of 64, bfloat16"
    return publish(result, out, _table(measured, title))


def _row(way: str, name: str, plan: Plan) -> dict[str, Any]:
    _, kv_heads, qk_dim, v_dim = plan.attention_shape
    return {
        "tokens": plan.seq_len,
        "mask": name,
        "way": way,
        "shard": int(plan.kv_layout.tokens_per_rank.max()) * kv_heads * (qk_dim + v_dim) * plan.itemsize,
        "resident": int(plan.resident_bytes().max()),
        "saved": int(plan.saved_bytes().max()),
    }


def measure(cases: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """Rows for ways, masks and lengths, of one forward and backward each on real ranks."""
    with tempfile.TemporaryDirectory(prefix="spanwise-") as folder:
        torch.multiprocessing.spawn(_measure_rank, (cases, folder), nprocs=RANKS)
        found = [json.loads(Path(folder, f"rank-{rank}").read_text()) for rank in range(RANKS)]
    rows = []
    for (way, name, seq_len), of_ranks in zip(cases, zip(*found, strict=True), strict=True):
        row = _row(way, name, plan_of(way, name, masks(seq_len)[name], MEASURED_SHAPE))
        most = np.array(of_ranks).max(axis=0)
        rows.append({**row, "resident_measured": int(most[0]), "saved_measured": int(most[1])})
    return rows


def _measure_rank(rank: int, cases: list[tuple[str, str, int]], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    meshes = {
        False: init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)),
        True: init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("outer", "inner")),
    }
    found = []
    for way, name, seq_len in cases:
        plan = plan_of(way, name, masks(seq_len)[name], MEASURED_SHAPE)
        found.append(measure_plan(rank, meshes[isinstance(WAYS[way][0], tuple)], plan))
    Path(folder, f"rank-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_plan(rank: int, mesh: DeviceMesh, plan: Plan) -> tuple[int, int]:
    """Most bytes of this rank in a forward, and bytes it keeps after it: of K/V, or of everything that travels."""
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    tokens, group = plan.layout.num_tokens(rank), plan.groups.num_tokens(rank // plan.inner)
    sizes = (heads, qk_dim), (kv_heads, qk_dim), (kv_heads, v_dim), (heads, v_dim)
    dtype = getattr(torch, plan.dtype)
    q, k, v, grad = (torch.randn(1, tokens, n, d, dtype=dtype).transpose(1, 2) for n, d in sizes)
    saved, share = int(plan.saved_bytes()[rank]), group * heads // plan.inner
    kept = saved - (share * (qk_dim + v_dim) * plan.itemsize if plan.inner > 1 else 0)
    forward, after, _ = copied_bytes(plan, mesh, [x.requires_grad_() for x in (q, k, v)], grad, kept)
    dist.barrier()
    # Every exchange keeps the layer's output and its lse, in float64.
    return _exchanged(forward), sum(after.values()) - grad.numel() * plan.itemsize - share * 8


def _exchanged(peaks: dict[str, int]) -> int:
    """Most bytes at once: of K/V, or of everything that travels."""
    return peaks.get("all" if peaks.get("q", 0) else "kv", 0)


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    columns = ["tokens", "mask", "exchange", "own shard", "resident", "in shards", "saved"]
    keys = ["shard", "resident", "saved"]
    if "saved_measured" in rows[0]:
        columns += ["resident, measured", "saved, measured"]
        keys += ["resident_measured", "saved_measured"]
    table = []
    for row in rows:
        cells = [num_bytes(row[key]) for key in keys]
        cells.insert(2, f"{row['resident'] / row['shard']:.2f}")
        table.append((f"{row['tokens']:,.0f}", row["mask"], row["way"], *cells))
    return Table(title, tuple(columns), table, left=3)


if __name__ == "__main__":
    main(run, __doc__ or "")

"""What attention really holds of K/V, q and what is traded against what the plan says, on real ranks: to the byte."""

from __future__ import annotations

import collections
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

import spanwise
from spanwise import SpanMask, _torch
from spanwise.planning.explain import describe_exchange
from tests.limits import HANG
from tests.pairs import covering
from tests.ranks.calls import CU_SEQLENS, EXCHANGES, LENGTH, mesh_of
from tests.ranks.gloo import GlooPool

ONE_LEVEL = [way for way in EXCHANGES if way["exchange"] != "ulysses"]  # with several, heads are traded anyway


class Copies(_torch.TorchDispatchMode):
    """Follows tensors through operators that only move their elements, and sums the bytes of live storages.

    Results of operators on a followed tensor are followed under its name. What kernels and merges give is "result"; a
    copy of it that is put in order to leave, and what comes, is "out"; what `attention` returns is "layer".

    Args:
        result: bytes of the result, if it is traded.
        tensors: by name; their own storages do not count.

    Attributes:
        most: bytes of q, K/V and "out" that were alive at once, with `result` beside the last.
        most_kv: bytes of K/V that were alive at once; may be set to 0 to begin anew.
    """

    def __init__(self, result: int, **tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        # Name and bytes of each storage. A weak reference keeps its address from being used again.
        self._followed: dict[StorageWeakRef, tuple[str, int]] = {}
        self.most, self.most_kv, self.result, self.op = 0, 0, result, ""
        self.gathered: StorageWeakRef | None = None
        for name, group in tensors.items():
            for x in group:
                self._follow(x, name)
        self._own = set(self._followed)

    def alive(self) -> dict[str, int]:
        """Bytes by name, without the tensors that were given."""
        found: dict[str, int] = collections.Counter()
        for storage, (name, size) in self._followed.items():
            if storage not in self._own and not storage.expired():
                found[name] += size
        return found

    def _follow(self, x: torch.Tensor, name: str) -> None:
        if name == "out":
            name = "result" if self.op.startswith("spanwise::") else "layer" if self.op == "aten::clone" else name
        elif name == "result" and self.op in ("aten::index_select", "aten::index.Tensor"):
            name = "out"
        storage = x.untyped_storage()
        self._followed.setdefault(StorageWeakRef(storage), (name, storage.nbytes()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op = func.name()
        given = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = [self._followed.get(StorageWeakRef(x.untyped_storage())) for x in given]
        names = {"out"} if self.op.startswith("spanwise::") else {found[0] for found in known if found}
        results = func(*args, **(kwargs or {}))
        for x in _torch.tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.dim():  # a scalar is a stand-in without memory
                for name in names:
                    self._follow(x, name)
        if "all_gather" in self.op:
            self.gathered = StorageWeakRef(args[0].untyped_storage())
        del args, given
        if "wait_tensor" in self.op and self.gathered is not None:
            # gloo's thread lets go of what it sent when it gets round to it, after the wait.
            deadline = time.monotonic() + HANG
            while not self.gathered.expired() and time.monotonic() < deadline:
                time.sleep(1e-3)
        alive = self.alive()
        out = alive["out"]
        self.most = max(self.most, alive["q"] + alive["kv"] + out + self.result * bool(out))
        self.most_kv = max(self.most_kv, alive["kv"])
        return results


def measured(
    rank: int, mesh: DeviceMesh, plans: list[spanwise.Plan], batch: int, by_head: bool
) -> list[tuple[int, int, int]]:
    """For each plan bytes held at most in a forward, kept after it, and copies of K/V at most in the backward.

    Args:
        by_head: whether tokens of a head are beside one another in memory, or heads of a token.
    """
    found = []
    for plan in plans:
        heads, kv_heads, qk_dim, v_dim = plan.attention_shape("tests")
        tokens, keys = plan.layout.num_tokens(rank), plan.kv_layout.num_tokens(rank)
        result = batch * plan.groups.num_tokens(rank // plan.inner) * (heads // plan.inner) * v_dim * plan.itemsize
        leaves = [
            torch.randn(batch, n, num_heads, dim, dtype=getattr(torch, plan.dtype)).transpose(1, 2)
            for n, num_heads, dim in ((tokens, heads, qk_dim), (keys, kv_heads, qk_dim), (keys, kv_heads, v_dim))
        ]
        q, k, v = ((x.contiguous() if by_head else x).requires_grad_() for x in leaves)
        del leaves
        local = plan.local(mesh, "cpu", kernel="sdpa")
        copies = Copies(result if plan.inner > 1 else 0, q=(q,), kv=(k, v))
        with copies:
            out = spanwise.context_parallel_attention(q, k, v, local, mesh, kernel="sdpa")
        most, after = copies.most, copies.alive()
        kept, copies.most_kv = after["q"] + after["kv"] + copies.result, 0
        with copies:
            out.backward(torch.randn_like(out))
        found.append((most, kept, copies.most_kv))
    return found


DOCUMENTS = SpanMask.documents(CU_SEQLENS)
MASKS = {
    "documents": (DOCUMENTS, "head_tail"),
    "causal": (SpanMask.causal(LENGTH), "contiguous"),
    "window": (SpanMask.sliding_window(LENGTH, 5), "head_tail"),
    "cross": (SpanMask.full(LENGTH, 41), "contiguous"),
    # Rows that differ follow one another, which is no copy where heads of a token lie beside one another.
    "rows": (SpanMask.stack([DOCUMENTS, SpanMask.causal(LENGTH)]), "head_tail"),
}
# K/V heads: as many as ranks, shared by ranks, all read one, windows that overlap and heads that are repeated.
HEADS = [(8, 4), (8, 2), (4, 1), (12, 3), (8, 8)]
# Each with all ways, every third in `make test`.
CELLS = covering([4, (2, 2)], list(MASKS), HEADS, [torch.float32, torch.bfloat16], [1, 2], [True, False])


def is_exact(way: dict[str, Any], mask: str, heads: tuple[int, int], by_head: bool) -> bool:
    """Whether the plan counts this to the byte: of other rings it leaves out less than a block of the larger shards."""
    return way["exchange"] != "ring" or (heads == (8, 4) and (by_head or mask in ("documents", "rows")))


@pytest.mark.parametrize(
    ("ranks", "mask", "heads", "dtype", "batch", "by_head"),
    [pytest.param(*cell, marks=pytest.mark.slow if i % 3 else []) for i, cell in enumerate(CELLS)],
    ids=str,
)
def test_what_is_held_is_what_the_plan_says(
    gloo_pool: GlooPool, ranks: Any, mask: str, heads: Any, dtype: torch.dtype, batch: int, by_head: bool
) -> None:
    what, balancer = MASKS[mask]
    batch, by_head = (2, False) if mask == "rows" else (batch, by_head)
    shape = dict(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=8, v_head_dim=6, dtype=dtype)
    ways = [way for way in (EXCHANGES if ranks == 4 else ONE_LEVEL) if is_exact(way, mask, heads, by_head)]
    plans = [spanwise.make_plan(what, ranks, balancer=balancer, block_size=4, **shape, **way) for way in ways]
    compare(gloo_pool, plans, batch, by_head)


def compare(pool: GlooPool, plans: list[spanwise.Plan], batch: int, by_head: bool) -> np.ndarray:
    """What is measured is what is planned, on every rank; returns what is measured."""
    found = np.array(pool.run(plans[0].num_ranks, measured, plans, batch, by_head, **mesh_of(plans[0])))
    found = found.transpose(1, 0, 2)
    for plan, of_ranks in zip(plans, found, strict=True):
        rows, name = batch // plan.batch_size, f"{describe_exchange(plan)}, keep_kv {plan.keep_kv}"
        assert of_ranks[:, 0].tolist() == (rows * plan.resident_bytes()).tolist(), name
        assert of_ranks[:, 1].tolist() == (rows * plan.saved_bytes()).tolist(), name
    return found


def test_a_ring_holds_two_shards(gloo_pool: GlooPool) -> None:
    """No copies but the shards themselves; in the backward one that all are sent from, and two that arrive."""
    plan = spanwise.make_plan(SpanMask.causal(64), 4, balancer="contiguous", exchange="ring", block_size=8,
                              num_q_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=6, dtype=torch.float32)  # fmt: skip
    two = 2 * 16 * 4 * 14 * 4  # shards, tokens, heads, dims, bytes
    assert plan.resident_bytes().tolist() == [two] * 4 and not plan.saved_bytes().any()
    (found,) = compare(gloo_pool, [plan], 1, True)
    assert (found[:, 2] <= two * 3 // 2).all()

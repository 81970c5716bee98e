"""What attention really holds of K/V, q and what is traded against what the plan says, on real ranks: to the byte."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

import spanwise
from spanwise import Packing, SpanMask, _torch
from spanwise.attention.attention import context_parallel_attention
from spanwise.planning.explain import describe_exchange
from tests.limits import HANG
from tests.ranks.calls import HOSTS, mesh_of
from tests.ranks.gloo import GlooPool

LENGTH = 67  # divides by nothing


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


class Exchanged(Copies):
    """Follows what is copied so that it can travel, apart from what is computed.

    What kernels and merges give is "result"; a copy of it that is put in order to leave, and what comes, is "out"; what
    `attention` returns is "layer".

    Attributes:
        most: bytes of q, K/V and "out" that were alive at once, with `result` beside the last.
    """

    def __init__(self, result: int, **tensors: tuple[torch.Tensor, ...]) -> None:
        self.most, self.result, self.op = 0, result, ""
        self.gathered: StorageWeakRef | None = None
        super().__init__(**tensors)

    def _follow(self, x: torch.Tensor, name: str) -> None:
        if name == "out":
            name = "result" if self.op.startswith("spanwise::") else "layer" if self.op == "aten::clone" else name
        elif name == "result" and self.op in ("aten::index_select", "aten::index.Tensor"):
            name = "out"
        super()._follow(x, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op = func.name()
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if "all_gather" in self.op:
            self.gathered = StorageWeakRef(args[0].untyped_storage())
        del args
        if "wait_tensor" in self.op and self.gathered is not None:
            # gloo's thread lets go of what it sent when it gets round to it, after the wait.
            deadline = time.monotonic() + HANG
            while not self.gathered.expired() and time.monotonic() < deadline:
                time.sleep(1e-3)
        alive = self.alive()
        out = alive.get("out", 0)
        self.most = max(self.most, alive.get("q", 0) + alive.get("kv", 0) + out + self.result * bool(out))
        return results


def measured(
    rank: int, mesh: DeviceMesh, plans: list[spanwise.Plan], batch: int, by_head: bool
) -> list[tuple[int, int, int]]:
    """For each plan bytes held at most in a forward, kept after it, and copies of K/V at most in the backward.

    Args:
        by_head: whether tokens of a head are beside one another in memory, or heads of a token.
    """
    return [_measured(plan, rank, mesh, batch, by_head) for plan in plans]


def _measured(plan: spanwise.Plan, rank: int, mesh: DeviceMesh, batch: int, by_head: bool) -> tuple[int, int, int]:
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    tokens, keys = plan.layout.num_tokens(rank), plan.kv_layout.num_tokens(rank)
    result = batch * plan.groups.num_tokens(rank // plan.inner) * (heads // plan.inner) * v_dim * plan.itemsize

    def make(n: int, num_heads: int, dim: int) -> torch.Tensor:
        x = torch.randn(batch, n, num_heads, dim, dtype=getattr(torch, plan.dtype)).transpose(1, 2)
        return (x.contiguous() if by_head else x).requires_grad_()

    q, k, v = make(tokens, heads, qk_dim), make(keys, kv_heads, qk_dim), make(keys, kv_heads, v_dim)
    local = plan.local(mesh, "cpu", kernel="sdpa")
    copies = Exchanged(result if plan.inner > 1 else 0, q=(q,), kv=(k, v))
    with copies:
        out = context_parallel_attention(q, k, v, local, mesh, kernel="sdpa")
    most, after = copies.most, copies.alive()
    kept = after.get("q", 0) + after.get("kv", 0) + copies.result
    copies.peaks = {}
    with copies:
        out.backward(torch.randn_like(out))
    return most, kept, copies.peaks.get("kv", 0)


def check(pool: GlooPool, plans: list[spanwise.Plan], batch: int = 1, by_head: bool = True) -> np.ndarray:
    """What is measured is what is planned, on every rank; returns what is measured, ``[plans, ranks, 3]``."""
    found = np.array(pool.run(plans[0].num_ranks, measured, plans, batch, by_head, **mesh_of(plans[0])))
    found = found.transpose(1, 0, 2)
    for plan, of_ranks in zip(plans, found, strict=True):
        told = f"{describe_exchange(plan)}, keep_kv {plan.keep_kv}, {plan.attention_shape}"
        rows = batch // plan.batch_size
        assert of_ranks[:, 0].tolist() == (rows * plan.resident_bytes()).tolist(), told
        assert of_ranks[:, 1].tolist() == (rows * plan.saved_bytes()).tolist(), told
    return found


WAYS = [
    {"exchange": "all_gather", "keep_kv": True}, {"exchange": "all_gather", "keep_kv": False},
    {"exchange": "needed", "stages": 1}, {"exchange": "needed", "stages": 3},
    {"exchange": "needed", "stages": 3, "keep_kv": False},
    {"exchange": "hierarchical", "hardware": HOSTS}, {"exchange": "hierarchical", "hardware": HOSTS, "keep_kv": False},
    {"exchange": "ring", "keep_kv": True}, {"exchange": "ring"},
]  # fmt: skip
MASKS = {
    "documents": (SpanMask.documents([0, 1, 2, 19, 19, 40, LENGTH]), "head_tail"),
    "causal": (SpanMask.causal(LENGTH), "contiguous"),
    "window": (SpanMask.sliding_window(LENGTH, 5), "head_tail"),
    "cross": (SpanMask.full(LENGTH, 41), "contiguous"),
}
SHAPE = dict(num_q_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=6, dtype=torch.float32)


@pytest.mark.parametrize(
    ("ranks", "mask"),
    [
        pytest.param(ranks, mask, marks=pytest.mark.slow if (ranks == 4) == (mask in ("causal", "window")) else [])
        for ranks in (4, (2, 2))
        for mask in MASKS
    ],
    ids=str,
)
def test_what_is_held_is_what_the_plan_says(gloo_pool: GlooPool, ranks: Any, mask: str) -> None:
    what, balancer = MASKS[mask]
    base = dict(balancer=balancer, block_size=4, **SHAPE)
    check(gloo_pool, [spanwise.make_plan(what, ranks, **base, **way) for way in WAYS])


# K/V heads: as many as ranks, shared by ranks, all read one, windows that overlap and heads that are repeated.
@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (4, 1), (12, 3), (8, 8)], ids=str)
def test_what_is_traded_is_what_the_plan_says(gloo_pool: GlooPool, heads: tuple[int, int]) -> None:
    shape = SHAPE | dict(num_q_heads=heads[0], num_kv_heads=heads[1])
    plans = [
        spanwise.make_plan(what, 4, balancer=balancer, exchange="ulysses", block_size=4, **shape)
        for what, balancer in MASKS.values()
    ]
    check(gloo_pool, plans)


@pytest.mark.parametrize("ranks", [4, pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_batch_rows_and_half_precision(gloo_pool: GlooPool, ranks: Any) -> None:
    """Rows alike, and rows that differ: these follow one another, which is no copy where heads of a token lie beside
    one another."""
    alike = SpanMask.documents([0, 5, 40, LENGTH])
    apart = SpanMask.stack([alike, SpanMask.causal(LENGTH)])
    for mask in (alike, apart):
        ways = [*WAYS, {"exchange": "ulysses"}] if ranks == 4 else WAYS
        base = dict(balancer="head_tail", block_size=4, **SHAPE | {"dtype": torch.bfloat16})
        check(gloo_pool, [spanwise.make_plan(mask, ranks, **base, **way) for way in ways], batch=2, by_head=False)


def test_padded_documents_of_another_length_of_keys(gloo_pool: GlooPool) -> None:
    packing = Packing(
        [0, 9, 30], cu_seqlens_q_padded=[0, 16, 48], cu_seqlens_kv=[0, 20, 25], cu_seqlens_kv_padded=[0, 24, 40]
    )
    base = dict(packing=packing, balancer="dual_chunk", block_size=4, **SHAPE)
    plans = [spanwise.make_plan(packing.mask(causal=False), 4, **base, **way) for way in WAYS]
    # Zeros in padding are a copy of q, K and V that the plan does not count.
    found = np.array(gloo_pool.run(4, measured, plans, 1, True)).transpose(1, 0, 2)
    q, k = (x.tokens_per_rank for x in (plans[0].layout, plans[0].kv_layout))
    zeroed = q * 8 * 8 * 4 + k * 4 * 14 * 4
    for plan, of_ranks in zip(plans, found, strict=True):
        assert (of_ranks[:, 0] - zeroed).tolist() == plan.resident_bytes().tolist(), describe_exchange(plan)
        assert (of_ranks[:, 1] - zeroed).tolist() == plan.saved_bytes().tolist(), describe_exchange(plan)


def test_a_ring_holds_two_shards(gloo_pool: GlooPool) -> None:
    """No copies but the shards themselves; in the backward one that all are sent from, and two that arrive."""
    for mask in (SpanMask.causal(64), SpanMask.full(64)):
        plan = spanwise.make_plan(mask, 4, balancer="contiguous", exchange="ring", block_size=8, **SHAPE)
        two = 2 * 16 * 4 * 14 * 4  # shards, tokens, heads, dims, bytes
        assert plan.resident_bytes().tolist() == [two] * 4 and not plan.saved_bytes().any()
        (found,) = check(gloo_pool, [plan])
        assert (found[:, 2] <= two * 3 // 2).all()

"""Shards round a ring: what arrives where, gradients on their way home, what is under way when, how much is alive."""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from spanwise import _torch
from spanwise.attention import failure
from spanwise.attention.executor import SHARD, Link, RankStep, bring
from spanwise.attention.failure import ExchangeError
from spanwise.attention.kv import kv_form
from tests.limits import HANG
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks
from tests.ranks.test_lost_peer import NEVER, World, lose


class Case(NamedTuple):
    """A ring whose ranks hold `tokens`; piece i comes from the rank `offsets[i]` before."""

    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    shape: tuple[int, int, int, int] = (2, 3, 4, 5)  # B, H, D, Dv

    def steps(self, rank: int) -> list[RankStep]:
        """Each hop brings the shard of the rank `offset` before, from a rank that has it by then."""
        size, found = len(self.tokens), []
        for i, offset in enumerate(self.offsets):
            stride = offset - (self.offsets[i - 1] if i else 0)
            peers, received = ((rank + stride) % size, (rank - stride) % size), self.tokens[(rank - offset) % size]
            passed = i + 1 < len(self.offsets)
            sizes = (torch.empty(received, 0),)
            found.append(RankStep(None, None, (), sizes, source=i - 1, kind=SHARD, passed=passed, peers=peers))
        return found

    def started(self, rank: int, k: torch.Tensor, v: torch.Tensor, name: str) -> Iterator[tuple[torch.Tensor, ...]]:
        steps = self.steps(rank)
        return bring((k, v), steps, Link(name, len(self.tokens), "K/V"), kv_form(k, v, steps))

    def shard(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a rank, laid out as a model's projections leave them."""
        generator = torch.Generator().manual_seed(rank)
        batch, heads, k_dim, v_dim = self.shape
        sizes = [(batch, self.tokens[rank], heads, dim) for dim in (k_dim, v_dim)]
        k, v = (torch.randn(size, generator=generator, dtype=torch.float64).to(self.dtype) for size in sizes)
        return k.transpose(1, 2), v.transpose(1, 2)

    def loss(self, rank: int, piece: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What rank `rank` computes of a piece (-1: its own): linear in neither, so that autograd keeps both."""
        generator = torch.Generator().manual_seed(1000 * rank + piece + 2)
        cubes = [
            (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) * x**3).sum() for x in (k, v)
        ]
        return cubes[0] + cubes[1]

    def gradients(self, owner: int) -> list[torch.Tensor]:
        """Of the sum of all ranks' losses, for the shard of one rank; dense."""
        k, v = (x.double().requires_grad_() for x in self.shard(owner))
        total = self.loss(owner, -1, k, v)
        for i, offset in enumerate(self.offsets):
            total = total + self.loss((owner + offset) % len(self.tokens), i, k, v)
        return list(torch.autograd.grad(total, (k, v)))


CASES = {
    "two ranks": Case((3, 5), (1,)),
    "every hop": Case((4, 2, 7), (1, 2)),
    "hops skipped": Case((3, 1, 5, 2, 6), (2, 3)),
    "last neighbour only": Case((3, 1, 5, 2), (3,)),
    "empty and single rows": Case((0, 1, 6, 0), (1, 2, 3)),
    "nothing at all": Case((0, 0), (1,)),
    "float32": Case((4, 3, 7, 1), (1, 3), torch.float32),
}
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5}


def quiet(_: str) -> None: ...


def step(rank: int, mesh: DeviceMesh, case: Case, *, watch: Callable[[str], None] = quiet) -> list[torch.Tensor]:
    """Gradients of this rank's shard; `watch` is called where attention to a piece would begin (own: -1)."""
    name, ranks = mesh.get_group().group_name, len(case.tokens)
    k, v = (x.requires_grad_() for x in case.shard(rank))
    started = case.started(rank, k, v, name)
    parts = []
    for i in range(-1, len(case.offsets)):
        pair = (k, v) if i == -1 else next(started)
        watch(f"attention {i}")
        owner = case.shard(rank if i == -1 else (rank - case.offsets[i]) % ranks)
        assert all(torch.equal(got.detach(), want) for got, want in zip(pair, owner, strict=True))
        assert i == -1 or all(x.is_contiguous() for x in pair)
        part = case.loss(rank, i, *pair)
        del pair
        part.register_hook(lambda _, i=i: watch(f"attention {i}'"))
        parts.append(part)
    assert next(started, None) is None
    watch("backward")
    torch.stack(parts).sum().backward()
    watch("done")
    assert k.grad is not None and v.grad is not None
    return [k.grad, v.grad]


FOUR = Case((3, 1, 4, 2), (1, 3), shape=(1, 2, 8, 8))
FORWARD = ["start 1", "attention -1", "wait 1", "start 2", "attention 0", "wait 2", "attention 1", "backward"]
KEPT = [
    "attention 1'", "start 2 gradients", "attention 0'", "wait 2 gradients", "start 1 gradients", "attention -1'",
    "wait 1 gradients", "done",
]  # fmt: skip


def test_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of starts, waits and attention on rank 0: each hop travels beside attention, forward and backward."""
    events: list[str] = []
    rank_0 = threading.local()
    for moment, at in (("start", 0), ("wait", 1)):
        original = getattr(failure, moment)

        def recorded(*args: Any, moment: str = moment, what_at: int = at, original: Any = original) -> Any:
            what = args[what_at]
            kind = " gradients" if "gradients" in what else ""
            if hasattr(rank_0, "events"):
                rank_0.events.append(f"{moment} {re.findall('chunk ([0-9]+)', what)[0]}{kind}")
            return original(*args)

        monkeypatch.setattr(failure, moment, recorded)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        if rank == 0:
            rank_0.events = events
        step(rank, mesh, FOUR, watch=events.append if rank == 0 else quiet)

    run_ranks(4, on_rank)
    assert events == FORWARD + KEPT


def slow_rank(rank: int, mesh: DeviceMesh, case: Case) -> list[torch.Tensor]:
    """Rank 0 stays in each attention until the others are in the one after it, which needs the hop between the two."""
    store = _torch.group_store(mesh.get_group())
    last = len(case.offsets) - 1
    after = {f"attention {i}": f"attention {i + 1}" for i in range(-1, last)}
    after |= {f"attention {i}'": f"attention {i - 1}'" for i in range(last)} | {"attention -1'": "done"}

    def watch(event: str) -> None:
        if rank == 0 and event in after:
            store.wait([f"{after[event]} on {peer}" for peer in range(1, mesh.size())], timedelta(seconds=HANG))
        store.set(f"{event} on {rank}", "")

    before = torch._C._distributed_c10d._get_work_registry_size()
    result = step(rank, mesh, case, watch=watch)
    assert torch._C._distributed_c10d._get_work_registry_size() == before
    return result


def test_hops_arrive_while_a_rank_computes(gloo_pool: GlooPool) -> None:
    # Shards that are larger than what a socket holds.
    for case in (Case((3000, 1, 0, 4000), (1, 2, 3), shape=(1, 2, 64, 48)), FOUR):
        for rank, got in enumerate(gloo_pool.run(4, slow_rank, case)):
            assert all(close(x, want, 1e-12) for x, want in zip(got, case.gradients(rank), strict=True))


def live_buffers(rank: int, mesh: DeviceMesh, case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Most buffers of K/V and of gradients that are alive at once, in the forward and in the backward."""
    begin = _torch.start_all_to_all
    buffers: dict[int, tuple[str, Any]] = {}
    peaks: list[dict[str, int]] = [{}]

    def recorded(x: torch.Tensor, *args: Any) -> torch.Tensor:
        received = begin(x, *args)
        for buffer in (x, received):
            kind = "gradients" if buffer.dtype == torch.float32 else "K/V"
            storage = buffer.untyped_storage()
            buffers[storage.data_ptr()] = (kind, weakref.ref(storage))
        alive = Counter(kind for kind, ref in buffers.values() if ref() is not None)
        peaks[-1] = {kind: max(alive[kind], peaks[-1].get(kind, 0)) for kind in ("K/V", "gradients")}
        return received

    with mock.patch.object(_torch, "start_all_to_all", recorded):
        step(rank, mesh, case, watch=lambda event: peaks.append({}) if event == "backward" else None)
    return peaks[0], peaks[1]


def test_two_shards_beside_the_own_are_alive(gloo_pool: GlooPool) -> None:
    case = Case((2, 3, 4, 5), (1, 2, 3), torch.bfloat16)
    for forward, backward in gloo_pool.run(4, live_buffers, case):
        # What is kept, the last attention's backward has let go of when the first gradient departs.
        assert forward == {"K/V": 3, "gradients": 0}
        assert backward == {"K/V": 2, "gradients": 2}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    case = CASES[name]
    for rank, got in enumerate(run_ranks(len(case.tokens), step, case)):
        for x, want in zip(got, case.gradients(rank), strict=True):
            assert x.dtype == case.dtype and x.shape == want.shape
            assert close(x, want, BOUNDS[case.dtype])


def close(x: torch.Tensor, want: torch.Tensor, bound: float) -> bool:
    return x.numel() == 0 or float((x.double() - want).abs().amax()) <= bound * float(want.abs().amax())


def test_gradients_are_summed_in_float32() -> None:
    """In bfloat16 256 + 1 is 256 again: a running sum would lose every 1."""
    case = Case((1, 1, 1, 1), (1, 2, 3), torch.bfloat16)

    def on_rank(rank: int, mesh: DeviceMesh) -> list[torch.Tensor]:
        k, v = (x.requires_grad_() for x in case.shard(rank))
        started = case.started(rank, k, v, mesh.get_group().group_name)
        (k_1, v_1), (k_2, v_2), (k_3, v_3) = started
        ((k_1 + k_2 + 256 * k_3).sum() + (256 * v_1 + v_2 + v_3).sum()).backward()
        return [k.grad, v.grad]

    for grads in run_ranks(4, on_rank):
        assert [x.unique().tolist() for x in grads] == [[258.0], [258.0]]


def compiled_steps(rank: int, mesh: DeviceMesh, cases: list[Case]) -> tuple[list[list[torch.Tensor]], list[list[str]]]:
    """Gradients of each case through one compiled function; collectives and kernels of each ATen graph in order."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs: list[list[str]] = []
    short = {"all_to_all_single": "start", "wait_tensor": "wait", "sin": "attention", "cos": "attention'"}

    def record(gm: torch.fx.GraphModule, _: Any) -> Any:
        names = [n.target.name().split("::")[1] for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        started = [n for n in gm.graph.nodes if n.target is torch.ops._c10d_functional.all_to_all_single.default]
        readers = {user.target for n in started for user in n.users}
        assert readers == {torch.ops._c10d_functional.wait_tensor.default}, readers  # nothing reads what is under way
        graphs.append([short[name] for name in names if name in short])
        return make_boxed_func(gm.forward)

    name, ranks = mesh.get_group().group_name, mesh.size()

    @torch.compile(backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)
    def attend(k: torch.Tensor, v: torch.Tensor, steps: list[RankStep]) -> torch.Tensor:
        started = bring((k, v), steps, Link(name, ranks, "K/V"), kv_form(k, v, steps))
        total = (k.sum() * v.sum()).sin()
        for k_piece, v_piece in started:
            total = total + (k_piece.sum() * v_piece.sum()).sin()
        return total

    results = []
    for case in cases:
        k, v = (_torch.mark_dynamic(x, 2).requires_grad_() for x in case.shard(rank))
        steps = case.steps(rank)
        for each in steps:
            _torch.mark_unbacked(each.recv_sizes[0], 0)
        attend(k, v, steps).backward()
        results.append([k.grad, v.grad])
    return results, graphs


def compiled_gradients(case: Case, owner: int) -> list[torch.Tensor]:
    """Of the sum over all ranks of what `compiled_steps` computes, for the shard of one rank."""
    k, v = (x.requires_grad_() for x in case.shard(owner))
    return list(torch.autograd.grad((1 + len(case.offsets)) * (k.sum() * v.sum()).sin(), (k, v)))


@pytest.mark.compiles
def test_one_graph_serves_shards_of_any_size(gloo_pool: GlooPool) -> None:
    cases = [Case(tokens, (1, 2)) for tokens in ((4, 3, 5), (6, 2, 1), (2, 7, 0))]
    for rank, (results, graphs) in enumerate(gloo_pool.run(3, compiled_steps, cases)):
        # Of its inputs' length torch makes 0 and 1 special, of what a rank receives nothing.
        own = {min(case.tokens[rank], 2) for case in cases}
        assert graphs == len(own) * [
            ["start", "attention", "wait", "start", "attention", "wait", "attention"],
            ["attention'", "start", "attention'", "wait", "start", "attention'", "wait"],
        ]
        for case, got in zip(cases, results, strict=True):
            for x, want in zip(got, compiled_gradients(case, rank), strict=True):
                assert close(x, want, 1e-10)
    assert all(min(case.tokens[:2]) > 1 for case in cases)  # these ranks have one graph, and receive 5, 1 and 0 rows


class Zeros(TorchDispatchMode):
    """How often tensors of zeros are made."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "zeros" in func.name()
        return func(*args, **(kwargs or {}))


def test_no_zeros_are_made_for_what_is_under_way() -> None:
    def on_rank(rank: int, mesh: DeviceMesh) -> int:
        zeros = Zeros()
        with contextlib.ExitStack() as stack:
            step(rank, mesh, FOUR, watch=lambda event: stack.enter_context(zeros) if event == "backward" else None)
        return zeros.calls

    assert run_ranks(4, on_rank) == [1] * 4  # into which the first gradients are added


def twice(rank: int, mesh: DeviceMesh, case: Case) -> list[torch.Tensor]:
    """Two backwards of one graph, and a second ring between its forward and its backward; halves of the sums."""
    name = mesh.get_group().group_name
    leaves = [[x.requires_grad_() for x in case.shard(rank)] for _ in range(2)]
    totals = []
    for k, v in leaves:
        total = case.loss(rank, -1, k, v)
        for i, pair in enumerate(case.started(rank, k, v, name)):
            total = total + case.loss(rank, i, *pair)
        totals.append(total)
    torch.autograd.backward(totals, retain_graph=True)
    torch.autograd.backward(totals)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*leaves, strict=True))
    return [x.grad / 2 for x in leaves[0]]


def test_backward_twice_and_two_rings_at_once(gloo_pool: GlooPool) -> None:
    for rank, got in enumerate(gloo_pool.run(4, twice, FOUR)):
        assert all(close(x, want, 1e-12) for x, want in zip(got, FOUR.gradients(rank), strict=True))


@pytest.mark.parametrize("which", ["k", "v", "none", "anomaly"])
def test_what_needs_no_gradient(which: str) -> None:
    def on_rank(rank: int, mesh: DeviceMesh) -> list[torch.Tensor | None]:
        k, v = FOUR.shard(rank)
        k.requires_grad_(which in ("k", "anomaly"))
        v.requires_grad_(which in ("v", "anomaly"))
        total = FOUR.loss(rank, -1, k, v)
        pieces = FOUR.started(rank, k, v, mesh.get_group().group_name)
        for i, (k_piece, v_piece) in enumerate(pieces):
            total = total + FOUR.loss(rank, i, k_piece, v_piece)
        if total.requires_grad:
            total.backward()
        return [k.grad, v.grad]

    # One switch for all threads: each of them resetting it would leave it as another one had found it.
    with torch.autograd.set_detect_anomaly(True) if which == "anomaly" else contextlib.nullcontext():
        found = run_ranks(4, on_rank)
    for rank, (k_grad, v_grad) in enumerate(found):
        for name, grad, want in zip("kv", (k_grad, v_grad), FOUR.gradients(rank), strict=True):
            assert (grad is not None) == (which in (name, "anomaly"))
            assert grad is None or close(grad, want, 1e-13)


def test_second_derivatives_are_refused() -> None:
    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        k, v = (x.requires_grad_() for x in FOUR.shard(rank))
        pieces = FOUR.started(rank, k, v, mesh.get_group().group_name)
        total = sum(FOUR.loss(rank, i, *pair) for i, pair in enumerate(pieces))
        with pytest.raises(NotImplementedError, match="without create_graph=True"):
            torch.autograd.grad(total, k, create_graph=True)

    run_ranks(4, on_rank)


def dies(rank: int, mesh: DeviceMesh, case: Case, moment: str) -> None:
    def watch(event: str) -> None:
        if rank == 2 and event == moment:
            lose("killed")

    step(rank, mesh, case, watch=watch)


@pytest.mark.slow  # test_lost_peer has rings, too
def test_a_lost_rank_is_named() -> None:
    """Also by rank 0, whose neighbours are others; none waits for the timeout, which is out of reach."""
    case = Case((3, 1, 4, 2), (1, 2, 3))
    # (when rank 2 dies, where others can notice)
    cases = [
        ("attention -1", "all-to-all of K/V, chunk [123] of 3"),
        ("attention 1'", "all-to-all of gradients, K/V, chunk [123] of 3"),
    ]
    worlds = [World(dies, case, each[0], timeout=NEVER) for each in cases]
    for (_, what), world in zip(cases, worlds, strict=True):
        outcomes = world.outcomes()
        for rank in (0, 1, 3):
            error = outcomes[rank].error
            assert isinstance(error, ExchangeError) and error.lost == (2,), outcomes[rank]
            assert re.match(f"{what} failed on rank {rank}, ", str(error)), error
            assert "lost: rank 2, no word within" in str(error)

"""K/V round a ring: what arrives where, gradients on their way home, what is under way when, and how much is alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _compat
from spanwise.exchange import ring
from spanwise.exchange.again import Again
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks


class Case(NamedTuple):
    """A ring whose ranks hold `tokens`; piece i comes from the rank `offsets[i]` before."""

    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    shape: tuple[int, int, int, int] = (2, 3, 4, 5)  # B, H, D, Dv

    def hops(self, rank: int) -> list[ring.Hop]:
        before = (0, *self.offsets)
        return [
            ring.Hop(torch.empty(self.tokens[(rank - offset) % len(self.tokens)], 0), offset - before[i])
            for i, offset in enumerate(self.offsets)
        ]

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


def step(
    rank: int, mesh: DeviceMesh, case: Case, *, keep: bool = True, watch: Callable[[str], None] = lambda _: None
) -> list[torch.Tensor]:
    """Gradients of this rank's shard."""
    name, ranks = mesh.get_group().group_name, len(case.tokens)
    k, v = (x.requires_grad_() for x in case.shard(rank))
    hops = case.hops(rank)
    again = None
    if not keep:
        fetches = ring.fetches(k.detach(), v.detach(), hops, rank, ranks, name, "K/V again")
        again = Again(fetches, chained=True)
    started = ring.start(k, v, hops, rank, ranks, name, "K/V")
    watch("attention -1")
    total = case.loss(rank, -1, k, v)
    if again is not None:
        (total,) = again.remind(-1, total)
    for i in range(len(hops)):
        k_piece, v_piece = next(started)
        watch(f"attention {i}")
        owner = case.shard((rank - case.offsets[i]) % ranks)
        for got, want in zip((k_piece, v_piece), owner, strict=True):
            assert got.is_contiguous() and torch.equal(got.detach(), want)
        if again is None:
            part = case.loss(rank, i, k_piece, v_piece)
        else:
            with again.forgetting(i, k_piece, v_piece):
                part = case.loss(rank, i, k_piece, v_piece)
            (part,) = again.remind(i, part)
        total = total + part
        del k_piece, v_piece, owner, got, want
    assert next(started, None) is None
    watch("backward")
    total.backward()
    return [k.grad, v.grad]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, keep: bool) -> None:
    case = CASES[name]
    for rank, got in enumerate(run_ranks(len(case.tokens), step, case, keep=keep)):
        for x, want in zip(got, case.gradients(rank), strict=True):
            assert x.dtype == case.dtype and x.shape == want.shape
            assert close(x, want, BOUNDS[case.dtype])


def close(x: torch.Tensor, want: torch.Tensor, bound: float) -> bool:
    return x.numel() == 0 or float((x.double() - want).abs().amax()) <= bound * float(want.abs().amax())


def compiled_steps(rank: int, mesh: DeviceMesh, cases: list[Case]) -> tuple[list[list[torch.Tensor]], list[list[str]]]:
    """Gradients of each case through one compiled function; collectives and kernels of each ATen graph in order."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs: list[list[str]] = []
    short = {"all_to_all_single": "start", "wait_tensor": "wait", "sin": "attention", "cos": "attention'"}

    def record(gm: torch.fx.GraphModule, _: Any) -> Any:
        names = [n.target.name().split("::")[1] for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        graphs.append([short[name] for name in names if name in short])
        return make_boxed_func(gm.forward)

    name, ranks = mesh.get_group().group_name, mesh.size()

    @torch.compile(backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)
    def attend(k: torch.Tensor, v: torch.Tensor, hops: list[ring.Hop]) -> torch.Tensor:
        started = ring.start(k, v, hops, rank, ranks, name, "K/V")
        total = (k.sum() * v.sum()).sin()
        for k_piece, v_piece in started:
            total = total + (k_piece.sum() * v_piece.sum()).sin()
        return total

    results = []
    for case in cases:
        k, v = (_compat.mark_dynamic(x, 2).requires_grad_() for x in case.shard(rank))
        hops = [ring.Hop(_compat.mark_unbacked(hop.received, 0), hop.stride) for hop in case.hops(rank)]
        attend(k, v, hops).backward()
        results.append([k.grad, v.grad])
    return results, graphs


def compiled_gradients(case: Case, owner: int) -> list[torch.Tensor]:
    """Of the sum over all ranks of what `compiled_steps` computes, for the shard of one rank."""
    k, v = (x.requires_grad_() for x in case.shard(owner))
    return list(torch.autograd.grad((1 + len(case.offsets)) * (k.sum() * v.sum()).sin(), (k, v)))


def test_one_graph_serves_shards_of_any_size(gloo_pool: GlooPool) -> None:
    cases = [Case(tokens, (1, 2)) for tokens in ((4, 3, 5), (6, 2, 1), (2, 7, 0))]
    for rank, (results, graphs) in enumerate(gloo_pool.run(3, compiled_steps, cases, timeout=100)):
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

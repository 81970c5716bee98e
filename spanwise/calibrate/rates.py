"""Rates of a rank's processor, memory and links, measured while all ranks do the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention import rank_plan
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel
from spanwise.calibrate.fit import AttentionCall, Sample, fit_link
from spanwise.hardware import COLLECTIVES, Link, attention_flops
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan

#: Bytes that a rank receives in the smallest collective. Sizes grow fourfold until one call takes `_LONG` seconds.
SMALLEST, _LONG = 1 << 12, 0.125
#: Timed sizes: the smallest, and so many of the largest. Sizes between them fit into buffers of sockets, network cards
#: and shapers, and would measure those.
_SIZES = 3


class Ranks:
    """The ranks that measure together, and the clock of this one."""

    def __init__(self, mesh: DeviceMesh | None, device: torch.device) -> None:
        if mesh is None or mesh.ndim != 1 or mesh.size() < 2:
            given = "no mesh" if mesh is None else f"one of shape {tuple(mesh.shape)}"
            raise ValueError(f"calibration measures links, and a link needs two ranks on a 1-D mesh; got {given}")
        self.group = mesh.get_group()
        self.members = dist.get_process_group_ranks(self.group)
        self.size = len(self.members)
        self.rank = mesh.get_local_rank()
        self.device = rank_plan.device_of(device, mesh)
        self._where = _torch.comparison_device(self.group)

    def over_ranks(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        x = torch.tensor(values, dtype=torch.float64, device=self._where)
        return _torch.wait(_torch.start_all_reduce(x, "max", _torch.group_name(self.group))).tolist()

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds until the device has finished `call`, and its result."""
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda _: None
        synchronize(self.device)
        begin = time.perf_counter()
        result = call()
        synchronize(self.device)
        return time.perf_counter() - begin, result

    def medians(self, calls: Sequence[Callable[[], Sequence[float]]], rounds: int) -> list[float]:
        """The median over `rounds`, after one that warms up, of the times that each call returns, on the slowest rank.

        All ranks begin a call together. All are timed round after round, so that a moment's disturbance does not hit a
        single one.
        """
        found = []
        for _ in range(rounds + 1):
            times: list[float] = []
            for call in calls:
                self.over_ranks([0.0])
                times += call()
            found.append(self.over_ranks(times))
        return [statistics.median(column) for column in zip(*found[1:], strict=True)]

    def host_size(self, given: int | None) -> int:
        """Ranks of a host: `given`, else by host names; all ranks if there is one host."""
        if given is not None:
            if given < 1 or self.size % given:
                raise ValueError(f"host_size must divide the {self.size} ranks, got {given}")
            return self.size if given == 1 else given
        names: list[Any] = [socket.gethostname()] * self.size
        dist.all_gather_object(names, socket.gethostname(), group=self.group)
        runs = [(host, len(list(same))) for host, same in itertools.groupby(names)]
        sizes = {size for _, size in runs}
        if len({host for host, _ in runs}) < len(runs) or len(sizes) > 1:
            raise ValueError(f"hosts must be of one size and their ranks consecutive, got {runs}; give host_size")
        size = sizes.pop()
        return self.size if size == 1 else size


def matmul_rate(ranks: Ranks, dtype: torch.dtype, repeats: int) -> float:
    """FLOP/s of a matrix product on the slowest rank."""
    n = 1024 if ranks.device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=ranks.device).to(dtype) for _ in range(2))
    return 2 * n**3 / ranks.medians([lambda: ranks.timed(lambda: torch.mm(a, b))[:1]], repeats)[0]


def copy_rate(ranks: Ranks, repeats: int) -> float:
    """Bytes/s read and written together on the slowest rank."""
    num_bytes = 1 << (26 if ranks.device.type == "cpu" else 29)  # larger than caches
    source = torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / ranks.medians([lambda: ranks.timed(lambda: target.copy_(source))[:1]], repeats)[0]


def time_attention(
    ranks: Ranks, kernel: Kernel, heads: tuple[int, int, int], dtype: torch.dtype,
    problems: Sequence[tuple[int, int]], repeats: int,
) -> tuple[list[AttentionCall], list[float]]:  # fmt: skip
    """Forward and backward of the chunks of every problem: the calls, and seconds on the slowest rank.

    Each problem, ``(tokens, median document)``, is the part of rank 0 of two: packed causal documents of log-normal
    lengths, cut head-tail, so that a rank reads its own keys and keys of the other. Every rank measures the same one.
    `heads`: of queries, of K and V, and their dim.
    """
    calls: list[AttentionCall] = []
    steps: list[Callable[[], tuple[float, float]]] = []
    for tokens, median in problems:
        ends = np.cumsum(np.random.default_rng(0).lognormal(math.log(median), 1.0, tokens).astype(np.int64).clip(min=1))
        mask = SpanMask.documents(np.concatenate([[0], ends[ends < tokens], [tokens]]))
        plan = make_plan(mask, 2, balancer="head_tail", exchange="needed", stages=1)
        local = rank_plan.build(plan, 0, ranks.device, kernel=kernel)
        for own, chunk in zip((True, False), local.chunks["default"], strict=False):
            area = int((chunk.end - chunk.start).clamp(min=0).sum())
            if not area:
                continue
            sizes = (heads[0], local.tokens.shape[1]), *[(heads[1], chunk.kv_pos.shape[1])] * 2
            q, k, v = (torch.randn(1, *n, heads[2], device=ranks.device).to(dtype).requires_grad_() for n in sizes)
            kernel.check(q, k, v, chunk, AttentionOptions())
            steps.append(functools.partial(_timed, ranks, kernel, (q, k, v), chunk, local.tokens))
            what = f"{tokens} tokens in documents of {median}, {'own' if own else 'remote'} keys"
            for backward in (False, True):
                pair = attention_flops(1, heads[0], heads[2], heads[2], backward=backward)
                calls.append(AttentionCall(what, backward, area * pair, pair, local.tokens.shape[1] if own else 0))
    return calls, ranks.medians(steps, repeats)


def _timed(
    ranks: Ranks, kernel: Kernel, inputs: tuple[torch.Tensor, ...], chunk: Chunk, q_pos: torch.Tensor
) -> tuple[float, float]:
    """Seconds of one forward and its backward."""
    q, k, v = inputs
    forward, results = ranks.timed(lambda: kernel.attend(q, k, v, chunk, q_pos, AttentionOptions()))
    cotangents = [torch.ones_like(x) for x in results]  # the merge of chunks also sends one to the lse
    return forward, ranks.timed(lambda: torch.autograd.grad(results, inputs, cotangents))[0]


def measure_links(
    ranks: Ranks, host_size: int, largest: int, repeats: int
) -> tuple[tuple[Link, ...], tuple[tuple[str, float], ...], tuple[Sample, ...]]:
    """Levels innermost first, wire factors above 1, and the samples behind both. A collective call.

    `host_size` is all ranks if there is one level; a rank receives `largest` bytes in the largest collective.
    """
    # Outermost first: this level sets the wire factors. All groups of a level measure at the same time.
    levels: list[tuple[str, int | None, list[int]]] = [("link", None, ranks.members)]
    if host_size < ranks.size:
        place = ranks.rank % host_size
        first = ranks.rank - place
        levels = [
            ("link between hosts", None, ranks.members[place::host_size]),
            ("link inside a host", host_size, ranks.members[first : first + host_size]),
        ]
    links: list[Link] = []
    wire: dict[str, float] | None = None
    samples: list[Sample] = []
    for figure, joined, members in levels:
        group = dist.new_group(members, use_local_synchronization=True)
        measured = _sweep(ranks, group, largest, repeats)
        dist.destroy_process_group(group)
        link, wire, fitted = fit_link(measured, wire)
        links.insert(0, dataclasses.replace(link, ranks=joined))
        samples += [
            Sample(figure, f"{collective} of {num_bytes:,.0f} bytes", seconds, f)
            for (collective, num_bytes, seconds), f in zip(measured, fitted, strict=True)
        ]
    assert wire is not None
    return tuple(links), tuple((c, factor) for c, factor in wire.items() if factor > 1), tuple(samples)


def _sweep(ranks: Ranks, group: dist.ProcessGroup, largest: int, repeats: int) -> list[tuple[str, float, float]]:
    """``(collective, bytes that each rank has to receive, seconds)``; the same on all ranks."""
    size, name = group.size(), _torch.group_name(group)
    starts = {
        "all_gather": lambda x: _torch.start_all_gather(x[: len(x) // size], size, name),
        "reduce_scatter": lambda x: _torch.start_reduce_scatter(x, size, name),
        "all_to_all": lambda x: _torch.start_all_to_all(x, [len(x) // size] * size, [len(x) // size] * size, name),
    }

    def timed(collective: str, x: torch.Tensor) -> tuple[float]:
        return ranks.timed(lambda: _torch.wait(starts[collective](x)))[:1]

    calls = []
    for collective in COLLECTIVES:
        grown = []
        num_bytes, slowest = SMALLEST, 0.0
        while num_bytes <= largest and slowest < _LONG:
            rows = -(-num_bytes // (4 * (size - 1)))  # float32 numbers between each pair of ranks
            call = functools.partial(timed, collective, torch.ones(rows * size, device=ranks.device))
            grown.append((collective, 4.0 * rows * (size - 1), call))
            # The better of two: the first call may have to connect the ranks.
            slowest = ranks.over_ranks([min(*call(), *call())])[0]
            num_bytes *= 4
        calls += [grown[0], *grown[1:][-_SIZES:]]
    medians = ranks.medians([call for _, _, call in calls], repeats)
    return [(collective, num_bytes, s) for (collective, num_bytes, _), s in zip(calls, medians, strict=True)]

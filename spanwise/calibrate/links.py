"""Links of a process group: the collectives of the exchanges, over a sweep of sizes."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.distributed as dist

from spanwise import _torch
from spanwise.calibrate.fit import Sample, fit_link
from spanwise.calibrate.ranks import Ranks
from spanwise.hardware import COLLECTIVES, Link

#: Bytes that a rank receives in the smallest collective. Sizes grow fourfold until one call takes `_LONG` seconds, so
#: that the longest takes about half a second on a slow link.
SMALLEST, _LONG = 1 << 12, 0.125
#: Timed sizes: the smallest, and so many of the largest. Sizes between them fit into buffers of sockets, network cards
#: and shapers, and would measure those.
_SIZES = 3


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

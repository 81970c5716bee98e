"""The cost model against times worked out by hand, and its files."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanwise.hardware import B200, CPU_HOST, H100, H200, Hardware, Link, attention_flops

FLAT = Hardware("flat", 1e6, 5e5, 4e6, 1e4, 1000, (Link(100.0, 0.5),), kernel_seconds=0.25)
# Hosts of two ranks: 100 bytes/s inside, 10 bytes/s a rank outside.
HOSTS = dataclasses.replace(FLAT, links=(Link(100.0, 0.5, ranks=2), Link(10.0, 2.0)))


TRAFFIC = np.array([[7, 10, 20], [0, 7, 40], [0, 0, 7]])  # [receiver, sender]; the diagonal stays at home
SLOW_SCATTER = dataclasses.replace(FLAT, wire=(("reduce_scatter", 2.0),))
SLOW_REST = dataclasses.replace(FLAT, wire=(("all_to_all", 2.0), ("all_gather", 3.0)))
FAST_OUTSIDE = dataclasses.replace(HOSTS, links=(HOSTS.links[0], Link(1000.0, 0.0)))


def between_hosts(*pairs: tuple[int, int, int]) -> np.ndarray:
    """400 bytes inside each of two hosts, and bytes of (receiver, sender) outside."""
    traffic = np.zeros((4, 4))
    traffic[0, 1] = traffic[3, 2] = 400
    for receiver, sender, size in pairs:
        traffic[receiver, sender] = size
    return traffic


BY_HAND: list[tuple[float, float]] = [
    # QKᵀ: 6 heads of 16; PV: 6 heads of 24; a multiply and an add for each of 10 pairs.
    (attention_flops(10, 6, 16, 24, backward=False), 10 * 6 * (2 * 16 + 2 * 24)),
    (attention_flops(10, 6, 16, 24, backward=True), 10 * 6 * (3 * 2 * 16 + 2 * 2 * 24)),
    (FLAT.attention_seconds(2e6, backward=False), 0.25 + 2.0),
    (FLAT.attention_seconds(2e6, backward=True), 0.25 + 4.0),
    (FLAT.attention_seconds(0, backward=True), 0),  # nothing to compute, no call
    (FLAT.copy_seconds(1e4), 2.0),  # read and written
    # All to all takes as long as the busiest rank: 0 and 1 receive 30 and 40, rank 2 sends 60.
    (FLAT.all_to_all_seconds(TRAFFIC), 0.5 + 60 / 100),
    (FLAT.all_to_all_seconds(TRAFFIC.T), 0.5 + 60 / 100),
    (FLAT.all_to_all_seconds(np.diag([5, 5])), 0),
    (FLAT.all_to_all_seconds(np.zeros((0, 0))), 0),
    (SLOW_REST.all_to_all_seconds(np.array([[0, 100], [0, 0]])), 0.5 + 2),
    # Of hosts it is as slow as the slower level.
    (HOSTS.all_to_all_seconds(between_hosts()), 0.5 + 4),
    (HOSTS.all_to_all_seconds(between_hosts((2, 1, 10))), 0.5 + 4),  # meanwhile outside: 2 + 10 / 10
    (HOSTS.all_to_all_seconds(between_hosts((2, 1, 10), (3, 1, 15))), 0.5 + 4),  # 25 out of rank 1, receivers 10 and 15
    (HOSTS.all_to_all_seconds(between_hosts((2, 1, 10), (3, 1, 15), (2, 0, 30))), 2 + 40 / 10),
    # Rings.
    *((ring(*of), seconds) for of, seconds, rings in (
        ((100, 4), 0.5 + 3 * 100 / 100, (FLAT.all_gather_seconds, FLAT.reduce_scatter_seconds)),
        ((100, 1), 0, (FLAT.all_gather_seconds, FLAT.reduce_scatter_seconds)),
        ((0, 4), 0, (FLAT.all_gather_seconds, FLAT.reduce_scatter_seconds)),
        ((100, 2), 0.5 + 1, (HOSTS.all_gather_seconds, HOSTS.reduce_scatter_seconds)),  # one host: nothing outside
        # Three hosts: each takes in 4 shards, 2 by each rank; the inner level brings a rank the other 3.
        ((100, 6), 2 + 2 * 100 / 10, (HOSTS.all_gather_seconds, HOSTS.reduce_scatter_seconds)),
        ((100, 6), 0.5 + 3 * 100 / 100, (FAST_OUTSIDE.all_gather_seconds, FAST_OUTSIDE.reduce_scatter_seconds)),
        # Three ranks: the second host is one rank that takes both other shards in alone.
        ((100, 3), 2 + 2 * 100 / 10, (HOSTS.all_gather_seconds, HOSTS.reduce_scatter_seconds)),
        ((100, 2), 0.5 + 2, (SLOW_SCATTER.reduce_scatter_seconds,)),
        ((100, 2), 0.5 + 1, (SLOW_SCATTER.all_gather_seconds,)),
        ((100, 2), 0.5 + 3, (SLOW_REST.all_gather_seconds,)),
    ) for ring in rings),
]  # fmt: skip


def test_times_worked_out_by_hand() -> None:
    assert [found for found, _ in BY_HAND] == [seconds for _, seconds in BY_HAND]


def test_three_levels_tile_what_a_rank_receives() -> None:
    # Groups of 2 and 4 of 8 ranks, one level at a time slow enough to decide: 4, 2 and 1 of the 7 shards.
    levels = (2, 4, None)
    for slow, shards in enumerate((4, 2, 1)):
        links = tuple(Link(1.0 if i == slow else 1e9, 0.0, ranks) for i, ranks in enumerate(levels))
        hardware = dataclasses.replace(FLAT, links=links)
        assert hardware.all_gather_seconds(10, 8) == shards * 10
        # All to all nothing is shared: 1 partner in the pair, 2 more in the four, 4 in the other half.
        assert hardware.all_to_all_seconds(np.full((8, 8), 10.0)) == (1, 2, 4)[slow] * 10


@pytest.mark.parametrize("hardware", [H100, H200, B200, CPU_HOST, HOSTS], ids=lambda hardware: hardware.name)
def test_files(tmp_path: Path, hardware: Hardware) -> None:
    path = tmp_path / "hardware.json"
    hardware.save(path)
    assert Hardware.load(path) == hardware
    assert Hardware.from_dict(json.loads(json.dumps(hardware.to_dict()))) == hardware
    assert pickle.loads(pickle.dumps(hardware)) == hardware and len({hardware, Hardware.load(path)}) == 1


def changed(**figures: Any) -> Hardware:
    return dataclasses.replace(FLAT, **figures)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Link(0, 0), "bandwidth .*0"),
    (lambda: Link(1, 0, ranks=1), "ranks .*1"),
    (lambda: changed(attention_flops=-1), "attention_flops .*-1"),
    (lambda: changed(links=()), r"\[\]"),
    (lambda: changed(links=(Link(1, 0, 4), Link(1, 0, 6), Link(1, 0))), r"\[4, 6, None\]"),
    (lambda: changed(wire=(("broadcast", 1.0),)), "'broadcast'"),
    (lambda: changed(wire=(("all_gather", 1.0), ("all_gather", 2.0))), "at most once"),
    (lambda: FLAT.all_to_all_seconds(np.zeros((2, 3))), r"\(2, 3\)"),
    (lambda: H100.with_host_size(1), "1;"),
    (lambda: dataclasses.replace(H100, links=H100.links[1:]).with_host_size(4), "one level"),
]


@pytest.mark.parametrize(("call", "names"), WRONG)
def test_bad_figures(call: Callable[[], Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        call()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        *((text, "hardware.json") for text in ("{", "[]", json.dumps(FLAT.to_dict() | {"wire": [["all_gather"]]}))),
        ('{"name": "x"}', "links"),
        (json.dumps(FLAT.to_dict() | {"speed": 1}), "speed"),
        (json.dumps(FLAT.to_dict() | {"matmul_flops": "fast"}), "matmul_flops .*'fast'"),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=names):
        Hardware.load(path)

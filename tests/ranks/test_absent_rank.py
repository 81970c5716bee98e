"""A rank that does not come to the first compared call of a group is an error on the others, in time, in every door."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise.attention import failure
from tests.ranks.gloo import GlooPool

LENGTH, TIMEOUT = 24, 1.0
LABELS = torch.arange(4)[None]


def plan_of(balancer: str = "contiguous", **options: Any) -> spanwise.Plan:
    return spanwise.make_plan(spanwise.SpanMask.causal(LENGTH), 2, balancer=balancer, block_size=4, **options)


def shard(*rest: int) -> torch.Tensor:
    return torch.ones(LENGTH // 2, *rest)


def attend(mesh: DeviceMesh) -> Any:
    q, k, v = (torch.ones(1, 2, LENGTH // 2, 4) for _ in range(3))
    return spanwise.context_parallel_attention(q, k, v, plan_of(), mesh)


def edges(mesh: DeviceMesh) -> Any:
    tree = spanwise.TokenTree([-1, 0, 0], [2, 1, 2])
    plan = spanwise.make_plan(tree.mask(), 2, block_size=1)
    own = spanwise.shard_edges(tree, plan, mesh)
    return spanwise.unshard_edges(own, mesh, torch.ones(len(own.targets)))


def conv(mesh: DeviceMesh) -> Any:
    return spanwise.recurrence.causal_conv(
        shard(3), torch.ones(3, 4), None, spanwise.recurrence.recurrence_route(plan_of(), mesh)
    )


def scan(mesh: DeviceMesh) -> Any:
    route = spanwise.recurrence.recurrence_route(plan_of(), mesh)
    return spanwise.recurrence.gated_linear(shard(1, 2), shard(1, 2), shard(1, 2), -shard(1), route)


def vocabulary(mesh: DeviceMesh) -> Any:
    return spanwise.token_logprobs(torch.ones(1, 4, 3), LABELS, vocab_mesh=mesh)


DOORS: dict[str, Callable[[DeviceMesh], Any]] = {
    "attention": attend,
    "loss": lambda mesh: spanwise.cross_entropy(torch.ones(1, 4, 5), LABELS, mesh),
    "fused loss": lambda mesh: spanwise.linear_cross_entropy(shard(3)[:4], torch.ones(5, 3), LABELS[0], loss_mesh=mesh),
    "token scores": vocabulary,
    "edges of a tree": edges,
    "unshard": lambda mesh: spanwise.unshard(plan_of(), mesh, shard(2), dim=0),
    "roll": lambda mesh: spanwise.roll(shard(2), 1, plan_of(), mesh, dim=0),
    "relayout": lambda mesh: spanwise.relayout(shard(2), plan_of(), plan_of("head_tail"), mesh, dim=0),
    "convolution": conv,
    "scan": scan,
}


def one_stays_away(rank: int, mesh: DeviceMesh, door: str) -> Any:
    """Rank 1 is alive and has made its groups, but does not call before rank 0 has given it up."""
    assert dist.group.WORLD is not None
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=TIMEOUT)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",), backend_override={"cp": ("gloo", options)})
    if rank == 1:
        store.wait(["given up"])
        return None
    try:
        with mock.patch.object(failure, "GRACE", 0.3):
            DOORS[door](mesh)
    except spanwise.ExchangeError as error:
        return error
    finally:
        store.set("given up", "")
    return None


@pytest.mark.parametrize("door", DOORS)
def test_is_named_after_the_timeout_of_the_group(gloo_pool: GlooPool, door: str) -> None:
    error, _ = gloo_pool.run(2, one_stays_away, door)
    assert isinstance(error, spanwise.ExchangeError) and error.lost == (1,), error
    assert "lost: rank 1, no word within" in str(error)
    found = re.search(r"failed on rank 0, .* of 2 ranks, after (\d+\.\d) s", str(error))
    assert found is not None and float(found[1]) >= TIMEOUT, str(error)  # rank 1 stays away until rank 0 has failed


def one_is_late(rank: int, mesh: DeviceMesh) -> list[float]:
    if rank == 1:
        time.sleep(2.5)  # the others have looked for ended processes by then, with messages that nobody receives
    said = [spanwise.cross_entropy(torch.zeros(1, 4, 5), LABELS, mesh).item()]
    for size in (1, 7, 100_000):  # also larger and smaller than the messages
        said.append(failure.all_reduce(torch.ones(size), "sum", mesh, "ones").sum().item() / size)
    return said


def test_a_late_rank_is_waited_for(gloo_pool: GlooPool) -> None:
    for said in gloo_pool.run(3, one_is_late):
        assert said == pytest.approx([math.log(5), 3.0, 3.0, 3.0])

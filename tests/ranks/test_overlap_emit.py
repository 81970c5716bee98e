"""Buckets on real gloo ranks: coalesced collectives of all kinds and dtypes give the bits of single ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.emit import bucket_keys, emit
from spanwise.overlap.fx.graph import to_dag
from tests.overlap.test_bucketing import merge
from tests.ranks.gloo import GlooPool

OPS = torch.ops._c10d_functional
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def merged_and_single(rank: int, _: Any) -> tuple[list[tuple[str, int]], list[tuple[str, bool]]]:
    """All collectives that may be one as one: kinds and sizes of buckets; of each result, its kind and whether it is
    the same as of single collectives."""
    name, size = _torch.group_name(dist.group.WORLD), dist.get_world_size()

    def collectives(*operands: torch.Tensor) -> Any:
        started = [OPS.all_gather_into_tensor(x, size, name) for x in operands]
        started += [OPS.reduce_scatter_tensor(x, "sum", size, name) for x in operands]
        started += [OPS.all_reduce(x.t(), how, name) for how in ("sum", "max") for x in operands]
        return [OPS.wait_tensor(x) for x in started]

    generator = torch.Generator().manual_seed(rank)
    shapes = [(4, 6), (2, 3), (8, 1)]
    operands = [(torch.randn(s, generator=generator) * 100).to(d) for d in DTYPES for s in shapes]
    operands += [torch.full((2, 2), 2**40 + 1 + rank)]  # no float32
    gm = make_fx(collectives, tracing_mode="fake")(*operands)
    expected = gm(*operands)
    captured = to_dag(gm, lambda node: 1.0)
    buckets: dict[Any, list[int]] = {}
    for i in captured.dag.starts:
        buckets.setdefault(bucket_keys(captured)[i], []).append(i)
    kinds = [captured.dag.nodes[i].name.rsplit("_", 1)[0] for i in captured.dag.starts]
    merged = merge(captured.dag, list(buckets.values()), [1.0] * len(buckets))
    emit(captured, range(len(merged.dag)), merged.members)
    gm.recompile()
    same = [torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(gm(*operands), expected, strict=True)]
    return [(key[0], len(bucket)) for key, bucket in buckets.items()], list(zip(kinds, same, strict=True))


@pytest.mark.parametrize("num_ranks", [2])
def test_buckets_give_the_bits_of_single_collectives(gloo_pool: GlooPool, num_ranks: int) -> None:
    for buckets, same in gloo_pool.run(num_ranks, merged_and_single):
        assert [kind for kind, equal in same if not equal] == []
        assert len(buckets) == 4 + 1 + 2 * 4  # gathers and reductions by dtype, reduce-scatters of all dtypes
        assert sum(count for _, count in buckets) == len(same) == 4 * 13

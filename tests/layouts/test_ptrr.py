"""ptrr_schedule: the on-device form of PTRR, its golden example, no host sync, one graph."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from spanwise.layouts.balancers import ptrr
from spanwise.layouts.ptrr import ptrr_schedule

# The example of PyTorch's own docstring (_PTRRLoadBalancer.ptrr_scheduling).
TIMES = [9, 14, 2, 20, 10, 15, 8, 14, 16, 19, 15, 3, 12, 1, 12, 10]


@given(
    st.integers(1, 3).flatmap(
        lambda batch: st.integers(1, 40).flatmap(
            lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=batch, max_size=batch)
        )
    ),
    st.integers(1, 9),
)
def test_is_the_schedule_of_the_host_balancer(times, num_ranks):
    num_blocks = len(times[0])
    problem = SimpleNamespace(
        num_blocks=num_blocks, seq_len=num_blocks, block_size=1, batch_size=len(times), block_counts=np.array(times)
    )
    owner = ptrr(problem, num_ranks)
    blocks = ptrr_schedule(torch.tensor(times), num_ranks)
    assert blocks.shape == (len(times), num_ranks, -(-num_blocks // num_ranks))
    for row in range(len(times)):
        for rank in range(num_ranks):
            mine = np.flatnonzero(owner[row] == rank)
            padded = np.append(mine, [-1] * (blocks.shape[2] - len(mine)))
            np.testing.assert_array_equal(blocks[row, rank].numpy(), padded)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_to_one_full_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(ptrr_schedule, fullgraph=True, backend=backend)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for seed in range(3):
        times = torch.randint(0, 9, (2, 37), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(compiled(times, 5), ptrr_schedule(times, 5))
    assert counters["stats"]["unique_graphs"] == 1


def test_never_reads_a_value_on_the_host():
    # Under a fake tensor mode any .item(), .tolist() or nonzero raises, because there are no values.
    with FakeTensorMode():
        blocks = ptrr_schedule(torch.empty(2, 37, device="cuda"), 5)
    assert blocks.shape == (2, 5, 8)
    assert blocks.device.type == "cuda"
    assert ptrr_schedule(torch.empty(16, device="meta"), 4).shape == (4, 4)


def test_refuses_bad_arguments():
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        ptrr_schedule(torch.tensor(TIMES), 0)
    with pytest.raises(ValueError, match=r"\[num_blocks\] or \[batch, num_blocks\], got \[1, 1, 16\]"):
        ptrr_schedule(torch.tensor([[TIMES]]), 4)

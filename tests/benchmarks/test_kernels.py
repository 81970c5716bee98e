"""What `kernels packed` compares: the same documents each way, and steps that compute what attention does."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks import kernels


def test_all_plans_hold_the_same_documents() -> None:
    cu_seqlens = kernels.corpora(2048)["median 64"]
    for num_ranks in (4, 8):
        plans = kernels.plans(cu_seqlens, num_ranks)
        for plan in plans.values():
            assert np.array_equal(plan.packing.q_lens, np.diff(cu_seqlens))
        assert len({int(plan.mask().area().sum()) for plan in plans.values()}) == 1
        assert (plans["padded"].packing.q_offsets % (2 * num_ranks) == 0).all()
        assert plans["unpadded"].seq_len == 2048 < plans["padded"].seq_len < 2048 + 2 * num_ranks * len(cu_seqlens)


def test_padding_gets_no_output_and_no_gradient() -> None:
    plan = kernels.plans(np.array([0, 3, 40, 64]), 4)["padded"]
    out, dq, *_ = kernels.rank_step(plan, 0)()
    hidden = ~torch.from_numpy(plan.packing.valid_q[plan.layout.indices(0)])
    assert hidden.any() and not out[:, :, hidden].any() and not dq[:, :, hidden].any() and out[:, :, ~hidden].any()

"""The layouts of head_tail, per_document_head_tail and ptrr against PyTorch's own `_context_parallel` balancers.

PyTorch's are private and may move: then these tests are what has to change, nothing in spanwise uses them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as peers
from torch.nn.attention.flex_attention import create_block_mask

from spanwise.layouts.balancers import assign_layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.span_mask import SpanMask


def assert_same_indices(layout, peer):
    for mine, theirs in (
        (layout.rearrange_indices(), peer._generate_indices(restore=False)),
        (layout.restore_indices(), peer._generate_indices(restore=True)),
    ):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs.to(torch.int64))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("chunk", [1, 2, 5, 128])
def test_head_tail(num_ranks, chunk):
    seq_len = 2 * num_ranks * chunk
    layout = assign_layout("head_tail", LayoutProblem({"m": SpanMask.causal(seq_len)}), num_ranks)
    assert_same_indices(layout, peers._HeadTailLoadBalancer(seq_len, num_ranks, "cpu"))


def torch_block_mask(mask, block_size):
    """PyTorch's own block mask of the dense mask, so that none of spanwise's tables is in between."""
    dense = torch.from_numpy(mask.dense())

    def mask_mod(b, h, q, kv):
        return dense[b, q, kv]

    size = mask.q_len
    return create_block_mask(mask_mod, mask.batch_size, None, size, size, device="cpu", BLOCK_SIZE=block_size)


CU_SEQLENS = np.array([0, 1, 90, 91, 400, 512])
MASKS = {
    "causal": SpanMask.causal(512),
    "full": SpanMask.full(512),
    "window": SpanMask.sliding_window(512, 70, 9),
    "documents": SpanMask.documents(CU_SEQLENS),
    "batched documents": SpanMask.stack(
        [SpanMask.documents(cu) for cu in (CU_SEQLENS, 512 - CU_SEQLENS[::-1], [0, 512])]
    ),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", MASKS)
def test_ptrr(name, num_ranks):
    mask, block_size = MASKS[name], 16
    layout = assign_layout("ptrr", LayoutProblem({"m": mask}, block_size=block_size), num_ranks)
    block_mask = torch_block_mask(mask, block_size)
    assert_same_indices(layout, peers._PTRRLoadBalancer(block_mask, num_ranks))


@pytest.mark.parametrize(("lengths", "num_ranks"), [([4, 8, 4], 2), ([16, 48, 8, 8], 4), ([12], 3), ([6, 6], 1)])
def test_per_document_head_tail(lengths, num_ranks):
    """spanwise follows the documented order, rank-major; release 2.13 computes the document-major one.

    There the indices list, for each document, rank 0's chunks, then rank 1's, …: cut into equal shards, a rank gets
    whole documents and no balance. Regrouped by rank they are the documented ones.
    """
    cu_seqlens = np.append(0, np.cumsum(lengths))
    problem = LayoutProblem({"m": SpanMask.documents(cu_seqlens)}, cu_seqlens=cu_seqlens)
    layout = assign_layout("per_document_head_tail", problem, num_ranks)
    theirs = peers._PerDocumentHeadTailLoadBalancer([lengths], num_ranks, "cpu")._generate_indices()[0]
    by_document = [document.view(num_ranks, -1) for document in theirs.split(lengths)]
    regrouped = torch.cat(by_document, dim=1)
    mine = layout.rearrange_indices()[0]
    if len(lengths) > 1 and num_ranks > 1 and torch.__version__.startswith("2.13."):
        assert not torch.equal(mine, theirs)
    if not torch.equal(mine, theirs):
        assert torch.equal(mine, regrouped.flatten())

"""The operator that compares calls in compiled code; what it does on ranks is tested under tests/ranks."""

from __future__ import annotations

import torch
from torch._inductor import utils

import spanwise.attention.compare  # noqa: F401


def test_no_cuda_graph_captures_a_comparison() -> None:
    """It would then compare once, and not in the steps that replay the graph."""
    graph = torch.fx.Graph()
    call = graph.call_function(torch.ops.spanwise.compare_call.default, ())
    assert utils.is_cudagraph_unsafe_fx_node(call)
    assert not utils.is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.aten.add.Tensor, ()))

"""Operators that compare calls in compiled code; what they do on ranks is tested under tests/ranks."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import utils

import spanwise.attention.compare  # noqa: F401

NAMES = ["compare_call", "compare_backward", "compared"]


@pytest.mark.parametrize("name", NAMES)
def test_no_cuda_graph_captures_a_comparison(name: str) -> None:
    """It would then compare once, and not in the steps that replay the graph."""
    op = getattr(torch.ops.spanwise, name).default
    graph = torch.fx.Graph()
    assert utils.is_cudagraph_unsafe_fx_node(graph.call_function(op, ()))
    assert not utils.is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.aten.add.Tensor, ()))

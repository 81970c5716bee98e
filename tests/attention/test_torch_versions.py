"""Where a version of torch would compute wrong gradients, compiled code is refused and eager code works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spanwise import _torch


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        _torch.check_compiling()
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch, on its way to the error
def test_refused_or_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the entry point, or else by the start of a collective inside an autograd function."""
    monkeypatch.setattr(_torch, "COMPILES", False)
    for guard in (_torch.eager_with_torch_2_11, lambda function: function):

        def function(x: torch.Tensor, entry: Any = guard(lambda x: _Double.apply(x))) -> torch.Tensor:  # noqa: B008
            return entry(x) + 1

        torch.compiler.reset()
        x = torch.ones(3, requires_grad=True)
        assert function(x).tolist() == [3, 3, 3]
        with pytest.raises(RuntimeError, match="cannot compile context parallelism; use torch 2.12 or newer"):
            torch.compile(function, backend="eager", fullgraph=True)(x)
        torch.compiler.reset()
        out = torch.compile(function, backend="eager")(x)
        out.sum().backward()
        assert out.tolist() == [3, 3, 3] and x.grad is not None and x.grad.tolist() == [2, 2, 2]
    torch.compiler.reset()

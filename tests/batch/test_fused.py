"""Kernels of other libraries: which one is taken, what it is called with, what is refused. Stand-ins, no GPU."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spanwise
from spanwise.batch import loss
from tests.batch.test_token_scores import problem

Calls = list[dict[str, Any]]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., Any]) -> None:
    parts = name.split(".")
    for i in range(len(parts)):
        path = ".".join(parts[: i + 1])
        module = types.ModuleType(path)
        module.__spec__ = importlib.machinery.ModuleSpec(path, None)
        monkeypatch.setitem(sys.modules, path, module)
    vars(module).update(functions)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """``liger_kernel`` with the arguments of its version 0.6 and later."""
    calls: Calls = []

    def liger_fused_linear_cross_entropy(
        input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
        ce_weight: None = None, ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
        reduction: str = "mean", softcap: float | None = None, return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        calls.append({"input": input, "reduction": reduction, "softcap": softcap, "accum_dtype": accum_dtype})
        assert input.dim() == 2 and target.dim() == 1 and not torch.is_autocast_enabled("cpu")
        return F.cross_entropy(F.linear(input, weight, bias), target, ignore_index=ignore_index, reduction=reduction)

    stand_in(
        monkeypatch, "liger_kernel.transformers.functional",
        liger_fused_linear_cross_entropy=liger_fused_linear_cross_entropy,
    )  # fmt: skip
    return calls


@pytest.fixture
def cce(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """``cut_cross_entropy`` with the arguments of version 25."""
    calls: Calls = []

    def linear_cross_entropy(
        e: torch.Tensor, c: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None,
        ignore_index: int = -100, softcap: float | None = None, reduction: str = "mean", shift: int = 0,
        impl: str = "cce",
    ) -> torch.Tensor:  # fmt: skip
        calls.append({"e": e, "reduction": reduction, "softcap": softcap, "impl": impl})
        logits = F.linear(e, c, bias).float().flatten(0, -2)
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction=reduction)
        return losses.view(targets.shape) if reduction == "none" else losses

    stand_in(monkeypatch, "cut_cross_entropy", linear_cross_entropy=linear_cross_entropy)
    return calls


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a device that runs the kernels."""
    monkeypatch.setattr(loss, "FUSED_DEVICE", "cpu")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_liger(liger: Calls, on_any_device: None, reduction: Any) -> None:
    hidden, weight, bias, labels = problem(dtype=torch.float32)
    given: dict[str, Any] = {"bias": bias, "loss_mesh": None, "reduction": reduction}
    expected = spanwise.linear_cross_entropy(hidden, weight, labels, kernel="chunked", **given)
    assert liger == []
    found = spanwise.linear_cross_entropy(hidden[None], weight, labels[None], kernel="liger", **given)
    torch.testing.assert_close(found, expected)
    assert len(liger) == 1 and liger[0]["reduction"] == "sum" and liger[0]["accum_dtype"] == torch.float32
    inputs = (hidden, weight, bias)
    for one, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cce(cce: Calls, on_any_device: None, reduction: Any) -> None:
    hidden, weight, bias, labels = problem(dtype=torch.bfloat16)
    given: dict[str, Any] = {"bias": bias, "loss_mesh": None, "reduction": reduction}
    found = spanwise.linear_cross_entropy(hidden[None], weight, labels[None], kernel="cce", **given)
    expected = spanwise.linear_cross_entropy(hidden[None], weight, labels[None], kernel="chunked", **given)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert [call["impl"] for call in cce] == ["cce_exact"]
    assert cce[0]["reduction"] == ("none" if reduction == "none" else "sum")


def test_autocast_casts_for_the_kernel(cce: Calls, liger: Calls, on_any_device: None) -> None:
    hidden, weight, _, labels = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for kernel in ("liger", "cce"):
            spanwise.linear_cross_entropy(hidden, weight, labels, loss_mesh=None, kernel=kernel)  # type: ignore[arg-type]
    assert cce[0]["e"].dtype == liger[0]["input"].dtype == torch.bfloat16


def test_auto_takes_what_is_installed_and_can(on_any_device: None, request: pytest.FixtureRequest) -> None:
    calls: dict[str, Calls] = {}

    def chosen(dtype: torch.dtype, kernel: str = "auto", each: bool = False, ranks: int = 1, tokens: int = 13) -> str:
        hidden, weight, _, labels = problem(dtype=dtype)
        before = {name: len(made) for name, made in calls.items()}
        found = loss._fused(kernel, hidden[:tokens], labels[:tokens], weight, None, None, each, ranks)
        made = [name for name in calls if len(calls[name]) > before[name]]
        assert (found is not None) == len(made) and (found is None or found.shape == (labels.shape if each else ()))
        return "".join(made)

    narrow, wide = torch.bfloat16, torch.float32
    assert chosen(narrow) == ""  # nothing is installed
    calls["liger"] = request.getfixturevalue("liger")
    assert chosen(narrow) == chosen(wide) == "liger" and chosen(wide, each=True) == ""
    calls["cce"] = request.getfixturevalue("cce")
    assert chosen(narrow) == chosen(narrow, each=True) == "cce" and chosen(wide) == "liger"
    assert chosen(wide, tokens=0) == chosen(narrow, "chunked") == chosen(torch.float64) == chosen(narrow, ranks=2) == ""


def test_a_named_kernel_never_falls_back(request: pytest.FixtureRequest) -> None:
    def refused(
        kernel: Any,
        error: type[Exception],
        match: str,
        dtype: torch.dtype = torch.float32,
        *,
        each: bool = False,
        ranks: int = 1,
    ) -> None:
        hidden, weight, _, labels = problem(dtype=dtype)
        with pytest.raises(error, match=f'kernel "{kernel}" {match}'):
            loss._fused(kernel, hidden, labels, weight, None, None, each, ranks)

    refused("liger", ValueError, "needs a cuda device, got hidden on cpu; use kernel=")
    request.getfixturevalue("on_any_device")
    refused("liger", ImportError, "needs the package liger_kernel, which is not installed")
    request.getfixturevalue("liger")
    refused("liger", ValueError, 'has no gradients for reduction "none"', each=True)
    refused("liger", ValueError, "takes no torch.float64", torch.float64)
    refused("cce", ValueError, "takes no torch.float32")
    refused("cce", ValueError, "needs the whole vocabulary, got one shared by 2 ranks", torch.bfloat16, ranks=2)
    hidden, weight, _, labels = problem(dtype=torch.float32)
    assert spanwise.linear_cross_entropy(hidden[:0], weight, labels[:0], loss_mesh=None, kernel="liger") == 0

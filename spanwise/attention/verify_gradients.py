"""Gradients that `verify` compares, of inputs, plain parameters and sharded ones, and their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spanwise.attention import failure


def parameters_of(fn: Callable[..., Any]) -> list[torch.Tensor]:
    """The parameters that require gradients; none of a function that is no module."""
    if not isinstance(fn, nn.Module):
        return []
    for module in fn.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root keeps whole parameters after a forward
    return [p for p in fn.parameters() if p.requires_grad]


def gradients(
    fn: Callable[..., Any], out: torch.Tensor, cotangent: torch.Tensor, of: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of `out` along `cotangent`, zero where it does not depend; nothing is accumulated into ``.grad``."""
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in of]
    grads: Sequence[torch.Tensor | None]
    if isinstance(fn, nn.Module) and any(isinstance(module, FSDPModule) for module in fn.modules()):
        held = [x.grad for x in of]  # FSDP2 reduces in hooks that write to .grad
        for x in of:
            x.grad = None
        out.backward(cotangent.to(out.dtype))
        grads = [x.grad for x in of]
        for x, before in zip(of, held, strict=True):
            x.grad = before
    else:
        grads = torch.autograd.grad(out, of, cotangent.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(of, grads, strict=True)]


def summed(grad: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """A parameter's gradient in float64, whole, and summed over the cp ranks."""
    if not isinstance(grad, DTensor):
        total = grad.double()
        return total if mesh is None else failure.all_reduce(total, "sum", mesh, "a parameter's gradient")
    if mesh is not None and set(mesh.mesh.flatten().tolist()) <= set(grad.device_mesh.mesh.flatten().tolist()):
        return whole(grad) * mesh.size()  # FSDP2 averaged over these ranks
    return summed(whole(grad), mesh)


def whole(grad: torch.Tensor) -> torch.Tensor:
    """All of a gradient in float64."""
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).double()


def error_of(x: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh | None) -> float:
    """Largest error of a rank's `x` on all ranks, over the largest entry of the `whole` tensor."""
    scale = whole.detach().double().abs().amax().clamp(min=1e-30) if whole.numel() else torch.tensor(1.0)
    worst = (x.double() - reference.double()).abs().amax() if x.numel() else torch.zeros((), device=x.device).double()
    # A maximum over ranks may drop nan; inf stays.
    worst = torch.where(worst.isnan(), torch.full_like(worst, math.inf), worst)
    if mesh is not None:
        worst = failure.all_reduce(worst, "max", mesh, "an error")
    return float(worst / scale)

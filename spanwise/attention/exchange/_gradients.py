"""What the exchanges share: the way a gradient takes from the wait of a collective back to its start.

A collective is two autograd functions, a start and a wait, so that callers compute between them in both directions. The
wait's backward starts the collective that brings gradients home; the start's backward waits for it. What joins the two
is an *anchor*: an output of the start and an input of the wait that occupies no memory and is never read.
"""

from __future__ import annotations

import torch

from spanwise import _torch


def anchor(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """A tensor without memory whose gradient is the collective under way, of float32 at least.

    Gradients are summed in that dtype: autograd would cast (so read) one of another dtype before it has arrived.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros((), dtype=dtype, device=like.device).expand(shape)


def check_first_order() -> None:
    """``NotImplementedError`` in a backward that is to be differentiated itself; called before its collective."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "second derivatives through an exchange of K/V do not exist; call backward without create_graph=True"
        )


def returned(pending: torch.Tensor) -> torch.Tensor:
    """A started collective as the gradient that a backward returns."""
    if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
        _torch.wait(pending)  # anomaly mode looks for nan in what a backward returns, so reads it
    return pending

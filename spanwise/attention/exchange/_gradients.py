"""Helpers of all exchanges: the path of a gradient from the wait of a collective back to its start.

A collective is two autograd functions, a start and a wait, so that callers compute between them in both directions. The
wait's backward starts the collective that brings gradients home; the start's backward waits for it. An *anchor* joins
the two: an output of the start and an input of the wait, without memory and never read.
"""

from __future__ import annotations

import torch

from spanwise import _torch


def anchor(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, in float32 at least; its gradient is the collective under way.

    Gradients travel in the anchor's dtype: autograd would cast (so read) another dtype before arrival.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros((), dtype=dtype, device=like.device).expand(shape)


def check_first_order() -> None:
    """``NotImplementedError`` in a backward under ``create_graph=True``; call it before the collective."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "second derivatives through an exchange of K/V are not supported; call backward without create_graph=True"
        )


def returned(pending: torch.Tensor) -> torch.Tensor:
    """`pending`, a started collective, as the gradient that a backward returns."""
    if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
        _torch.wait(pending)  # anomaly mode reads the gradient to look for nan
    return pending

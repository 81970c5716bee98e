"""Layers with a state as loops over the tokens of each document: what the sharded ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

Documents = Sequence[tuple[int, int]]  # (start, stop) of each; tokens outside are padding


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor | None,
    documents: Documents, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Outputs ``[T, H, V]`` of ``q, k [T, h, K]``, ``v [T, H, V]``, …"""
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    if log_decay.dim() == 1:
        log_decay = log_decay.expand(v.shape[:2])
    if log_decay.dim() == 2:
        log_decay = log_decay.unsqueeze(-1)
    outputs: list[torch.Tensor] = [torch.zeros_like(v[0])] * len(v)
    for start, stop in documents:
        state = v.new_zeros(heads, k.shape[-1], v.shape[-1])
        for t in range(start, stop):
            state = log_decay[t].exp().unsqueeze(-1) * state
            new = v[t]
            if beta is not None:
                new = beta[t].unsqueeze(-1) * (new - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t].unsqueeze(-1) * new.unsqueeze(-2)
            outputs[t] = scale * torch.einsum("hk,hkv->hv", q[t], state)
    return torch.stack(outputs)


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, documents: Documents, activation: str | None
) -> torch.Tensor:
    """Outputs ``[T, C]`` of ``x [T, C]``, ``weight [C, width]``."""
    out = torch.zeros_like(x)
    for start, stop in (document for document in documents if document[0] < document[1]):
        padded = F.pad(x[start:stop].T, (weight.shape[1] - 1, 0))
        windows = padded.unfold(1, weight.shape[1], 1)  # [C, tokens, width]
        each = (windows * weight.unsqueeze(1)).sum(-1).T + (0 if bias is None else bias)
        out = torch.cat([out[:start], F.silu(each) if activation else each, out[stop:]])
    return out

"""The functions that mixers of transformers call, on shards.

Each has the arguments of its namesake in the modeling files, behind the route of the batch, and returns this rank's
part of what its namesake returns for each document alone.
"""

# T tokens of this rank, C channels, H heads, K key dim, V value dim, N state size

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from spanwise import recurrence


def causal_conv1d(
    route: recurrence.RecurrenceRoute,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``[1, C, T]``: a convolution of each channel ``[C, width]`` over the tokens before in the document."""
    x = hidden_states[0].t().to(weight.dtype)
    out = recurrence.causal_conv(x, weight, bias, route).reshape(x.shape)  # compiled code sees then that T is the same
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.t()[None].to(hidden_states.dtype)


def delta_rule(
    route: recurrence.RecurrenceRoute,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    initial_state: None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``[1, T, H, V]`` of the gated delta rule; with decays ``[1, T, H]`` a head, or ``[1, T, H, K]`` a channel."""
    assert initial_state is None and not output_final_state  # there is no cache
    q, k, v, decay, b = (x[0].float() for x in (query, key, value, g, beta))
    out: Any = recurrence.gated_delta(q, k, v, decay, b, route, normalize=use_qk_l2norm_in_kernel)
    return out[None].to(query.dtype), None


def mamba2_chunk_scan(
    route: recurrence.RecurrenceRoute,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``[1, T, H, V]`` in float32 of Mamba-2's scan, which is linear attention with one decay a head."""
    assert initial_states is None and not return_final_states and z is None
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = dt.clamp(*dt_limit)[0].float()
    x = hidden_states[0].float()
    out: Any = recurrence.gated_linear(C[0].float(), B[0].float(), x * dt[..., None], A.float() * dt, route, scale=1.0)
    if D is not None:
        out = out + D[..., None] * x
    return out[None]


def mamba_selective_scan(
    route: recurrence.RecurrenceRoute,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """``[1, C, T]`` of Mamba's scan: linear attention with a head for each channel and a decay for each of N states."""
    assert not return_last_state
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    x, step = hidden_states[0].t(), dt[0].t()  # [T, C]
    decay = A * step[..., None]  # [T, C, N]
    q, k = (y[0].t()[:, None].float() for y in (C, B))  # [T, 1, N]
    out: Any = recurrence.gated_linear(q, k, (step * x.float())[..., None], decay, route, scale=1.0)
    out = out[..., 0].to(x.dtype)
    if D is not None:
        out = out + x * D
    out = out.t()[None]
    return out if z is None else out * functional.silu(z)


def none(route: recurrence.RecurrenceRoute, *args: Any, **kwargs: Any) -> None:
    """What fused kernels' namesakes return where there is no kernel: the mixer then takes its other path."""

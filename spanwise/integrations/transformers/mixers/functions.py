"""The functions that mixers of transformers call, on shards; and forwards of mixers that call none.

Each has the arguments of its namesake in the modeling files, behind the route of the batch, and returns this rank's
part of what its namesake returns for each document alone.
"""

# T tokens of this rank, C channels, H heads, K key dim, V value dim, N state size

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from spanwise import recurrence
from spanwise.recurrence import RecurrenceRoute


def causal_conv1d(
    route: RecurrenceRoute,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """``[1, C, T]``: a convolution of each channel ``[C, width]`` over the tokens before in the document."""
    x = hidden_states[0].t().to(weight.dtype)
    out = recurrence.causal_conv(x, weight, bias, route).reshape(x.shape)  # compiled code sees then that T is the same
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.t()[None].to(hidden_states.dtype)


def delta_rule(
    route: RecurrenceRoute, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """``[1, T, H, V]`` of the gated delta rule; with decays ``[1, T, H]`` a head, or ``[1, T, H, K]`` a channel."""
    assert kwargs.get("initial_state") is None and not kwargs.get("output_final_state")  # there is no cache
    q, k, v, decay, b = (x[0].float() for x in (query, key, value, g, beta))
    normalize = kwargs.get("use_qk_l2norm_in_kernel", False)
    out: Any = recurrence.gated_delta(q, k, v, decay, b, route, normalize=normalize)
    return out[None].to(query.dtype), None


def mamba2_chunk_scan(
    route: RecurrenceRoute,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: None = None,
    **kwargs: Any,
) -> Tensor:
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
    route: RecurrenceRoute,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor:
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


def none(route: RecurrenceRoute, *args: Any, **kwargs: Any) -> None:
    """What fused kernels' namesakes return where there is no kernel: the mixer then takes its other path."""


def lightning_attention(
    route: RecurrenceRoute, module: Any, hidden_states: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """MiniMax: ``[1, T, hidden]``, linear attention with a constant decay a head."""
    qkv = module.act_fn(module.qkv_proj(hidden_states))[0]
    q, k, v = qkv.unflatten(-1, (module.num_attention_heads, 3 * module.head_dim)).chunk(3, dim=-1)
    decay = -module.slope_rate.flatten().to(torch.promote_types(v.dtype, torch.float32))
    out: Any = recurrence.gated_linear(q, k, v, decay, route, scale=1.0)
    out = module.norm(out.flatten(1)[None])
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), None


def griffin(
    route: RecurrenceRoute, module: Any, input_states: Tensor, position_ids: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """RecurrentGemma: ``[1, T, hidden]``, a convolution and a linear recurrence of each channel."""
    y = module.act_fn(module.linear_y(input_states))
    x = module.linear_x(input_states)
    x = recurrence.causal_conv(x[0], module.conv_1d.weight, module.conv_1d.bias, route)[None]
    x = type(module.rg_lru).forward(_WithScan(module.rg_lru, route), x, position_ids)
    return module.linear_out(x * y), None


class _WithScan:
    """A `RecurrentGemmaRglru` whose scan passes states between ranks, and that keeps no state."""

    def __init__(self, module: nn.Module, route: RecurrenceRoute) -> None:
        self._module, self._route = module, route

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _rnn_scan(self, hidden_states: Tensor, recurrent_gate: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """``[1, T, C]``. A document starts from zeros, so that nothing needs to be reset."""
        one = torch.ones(hidden_states.shape[1], 1, 1, device=hidden_states.device)
        # A gate may underflow to 0, whose logarithm has no gradient.
        gate = recurrent_gate[0].float().clamp(min=torch.finfo(torch.float32).tiny)
        x, decay = hidden_states[0].float()[..., None], gate.log()
        out: Any = recurrence.gated_linear(one, one, x, decay, self._route, scale=1.0)
        return out[..., 0][None].to(hidden_states.dtype), None

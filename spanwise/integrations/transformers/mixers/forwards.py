"""Forwards of mixers that compute along the sequence in their own code, and not in functions of their file."""

# T tokens of this rank, H heads, D head dim, C channels

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spanwise import recurrence


def lightning_attention(
    route: recurrence.RecurrenceRoute, module: Any, hidden_states: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """MiniMax: ``[1, T, hidden]``, linear attention with a constant decay a head."""
    qkv = module.act_fn(module.qkv_proj(hidden_states))[0]
    q, k, v = qkv.unflatten(-1, (module.num_attention_heads, 3 * module.head_dim)).chunk(3, dim=-1)
    decay = -module.slope_rate.flatten().to(torch.promote_types(v.dtype, torch.float32))
    out: Any = recurrence.gated_linear(q, k, v, decay, route, scale=1.0)
    out = module.norm(out.flatten(1)[None])
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), None


def griffin(
    route: recurrence.RecurrenceRoute,
    module: Any,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """RecurrentGemma: ``[1, T, hidden]``, a convolution and a linear recurrence of each channel."""
    y = module.act_fn(module.linear_y(input_states))
    x = module.linear_x(input_states)
    x = recurrence.causal_conv(x[0], module.conv_1d.weight, module.conv_1d.bias, route)[None]
    x = type(module.rg_lru).forward(_WithScan(module.rg_lru, route), x, position_ids)
    return module.linear_out(x * y), None


class _WithScan:
    """A `RecurrentGemmaRglru` whose scan passes states between ranks, and that keeps no state."""

    def __init__(self, module: nn.Module, route: recurrence.RecurrenceRoute) -> None:
        self._module, self._route = module, route

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _rnn_scan(
        self, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """``[1, T, C]``. A document starts from zeros, so that nothing needs to be reset."""
        one = torch.ones(hidden_states.shape[1], 1, 1, device=hidden_states.device)
        # A gate may underflow to 0, whose logarithm has no gradient.
        gate = recurrent_gate[0].float().clamp(min=torch.finfo(torch.float32).tiny)
        x, decay = hidden_states[0].float()[..., None], gate.log()
        out: Any = recurrence.gated_linear(one, one, x, decay, self._route, scale=1.0)
        return out[..., 0][None].to(hidden_states.dtype), None

"""What models compute from the length of their input, corrected for input that is one rank's shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import spanwise
from spanwise.integrations.transformers.batches import ARGUMENT, PlannedBatch

_ROTARY = "_spanwise_rotary"  # attribute of a decoder: its rotary embeddings that depend on the largest position
_LAST = "_spanwise_last"  # attribute of each of these: the largest position of all ranks, or None
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def with_global_temperature(module: Any, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Queries of Llama 4's layers without rotary embedding, scaled by their position in the document.

    The module has scaled `query` ``[B, H, T, D]`` by a token's index in its input, which here is a shard.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    indices = positions, torch.arange(query.shape[2], device=query.device)
    own, given = (torch.log1p(((x.float() + 1) / module.floor_scale).floor()) * module.attn_scale + 1 for x in indices)
    return (query * (own / given)[:, None, :, None]).to(query.dtype)


def follow_length(decoder: nn.Module) -> None:
    """Let rotary embeddings of `decoder` whose frequencies depend on the largest position see that of all ranks."""
    types = {module: getattr(module, "rope_type", None) for module in decoder.modules()}
    found = [m for m, x in types.items() if _LENGTH_DEPENDENT & set(x.values() if isinstance(x, dict) else [x])]
    for module in found:
        module.register_forward_pre_hook(_append_last, with_kwargs=True)
        module.register_forward_hook(_drop_last)
    setattr(decoder, _ROTARY, found)
    set_last_position(decoder, None)


def set_last_position(decoder: nn.Module, planned: PlannedBatch | None) -> None:
    """Before each forward of the decoder; None for a batch without a plan."""
    for rotary in getattr(decoder, _ROTARY):
        setattr(rotary, _LAST, None if planned is None else planned.last)


def _append_last(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One more token, which `_drop_last` drops again."""
    last = getattr(rotary, _LAST)
    if last is None:
        return None
    named = "position_ids" in kwargs
    positions = kwargs["position_ids"] if named else args[1]
    longer = torch.cat([positions, last.to(positions).expand(*positions.shape[:-1], 1)], dim=-1)
    return (args, kwargs | {"position_ids": longer}) if named else ((args[0], longer, *args[2:]), kwargs)


def _drop_last(rotary: nn.Module, args: Any, output: Any) -> Any:
    if getattr(rotary, _LAST) is None:
        return None
    return tuple(x[..., :-1, :] for x in output) if isinstance(output, tuple) else output[..., :-1, :]


def gather_router_logits(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook of the decoder: router logits ``[N, experts]`` of all ranks in place of this rank's.

    The auxiliary loss of experts is a product of two means over all tokens, not a sum over tokens.
    """
    planned, logits = kwargs.get(ARGUMENT), getattr(output, "router_logits", None)
    if planned is None or logits is None:
        return None
    if planned.documents.tree is not None:
        raise ValueError("auxiliary losses of experts would count shared prefixes once; set output_router_logits=False")
    output.router_logits = tuple(
        x if x is None else spanwise.unshard(planned.plan, x=x.flatten(0, -2)[None])[0] for x in logits
    )
    return output

"""The attention and mask functions that transformers calls under a name of `AttentionInterface`.

With a planned batch attention is `spanwise.context_parallel_attention`. Without one it is what it was before.
"""

# B rows, H heads, T tokens of this rank, D head dim

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import spanwise
from spanwise.integrations.transformers.batches import OTHER, UNKNOWN, PlannedBatch, empty_mask, kind_of, planned_of
from spanwise.integrations.transformers.indexed import Selection, reading
from spanwise.integrations.transformers.masks import CHUNKED, FULL, SLIDING

PREFIX = "spanwise_"
_EXPAND = "expand_kv"  # method of multi-head latent attention: K and V from latents and rotary keys
KIND = "_spanwise_kind"  # attribute of an attention module: its kind of mask, by its layer in the config

# Arguments of attention calls: those that count, and those that say nothing which the plan does not know.
_KNOWN = frozenset([
    "scaling", "softcap", "s_aux", "dropout", "sliding_window",
    "position_ids", "position_embeddings", "position_embeddings_global", "position_embeddings_local",
    "cache_position", "past_key_values", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "num_items_in_batch", "return_dict", "is_causal", "is_training", "layer_idx", "labels",
    "shift_labels", "logits_to_keep", "input_ids", "token_type_ids", "mm_token_type_ids", "attention_mask",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic", "indices",
])  # fmt: skip


def register(before: str) -> str:
    """The name under which attention is spanwise's for planned batches, and `before` for others."""
    name = PREFIX + before
    AttentionInterface.register(name, functools.partial(attention, before))
    AttentionMaskInterface.register(name, functools.partial(mask, before))
    return name


def attention(
    before: str, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any, *args: Any, spanwise_plan: PlannedBatch | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """One attention call of a model: ``[B, H, T, D]`` in, ``[B, T, H, D]`` out.

    Raises:
        ValueError: a call that a plan cannot serve.
    """
    planned, name = spanwise_plan or planned_of(attention_mask), type(module).__name__
    latents = module.__dict__.get(_EXPAND) is _unexpanded
    expand = functools.partial(getattr(type(module), _EXPAND), module) if latents else None
    if planned is None:
        if kind_of(attention_mask) is not None:
            raise ValueError(f"{name} was called without the plan of its batch; its model must pass keywords on")
        if expand is not None:
            key, value = expand(key, value)
        if isinstance(selection := kwargs.get("indices"), Selection):
            attention_mask = selection.masked(attention_mask, key.shape[2], query.dtype)
            kwargs["indices"] = None
        return _function(before, module)(module, query, key, value, attention_mask, *args, **kwargs)
    # Models may pass them by position, in the order of eager attention.
    kwargs |= dict(zip(("scaling", "dropout")[: len(args)], args, strict=True))
    mask_name = _checked_kind(module, query, key, attention_mask, kwargs, planned.blocks)
    query = _with_global_temperature(module, query, planned.positions)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary embeddings leave q and k in float32
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    sinks = kwargs.get("s_aux")
    if isinstance(sinks, DTensor) and not isinstance(query, DTensor):  # tensor parallelism has sharded heads
        sinks = sinks.to_local(grad_placements=sinks.placements)
    score_mod = None
    if isinstance(selection := kwargs.get("indices"), Selection):
        score_mod = reading(selection.picked(planned), planned.plan.tokens[0])
    options: Any = {"softcap": kwargs.get("softcap"), "sinks": sinks, "expand": expand, "score_mod": score_mod}
    out = spanwise.context_parallel_attention(
        query, key, value, planned.plan, mask_name=mask_name, scale=kwargs.get("scaling"), **options
    )
    return out.transpose(1, 2).contiguous(), None


def _with_global_temperature(module: Any, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Queries of Llama 4's layers without rotary embedding, scaled by their position in the document.

    The module has scaled `query` ``[B, H, T, D]`` by a token's index in its input, which here is a shard.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    indices = positions, torch.arange(query.shape[2], device=query.device)
    own, given = (torch.log1p(((x.float() + 1) / module.floor_scale).floor()) * module.attn_scale + 1 for x in indices)
    return (query * (own / given)[:, None, :, None]).to(query.dtype)


def keep_latents(module: torch.nn.Module) -> None:
    """Let multi-head latent attention pass `attention` latents and rotary keys, which travel in place of K and V."""
    if callable(getattr(type(module), _EXPAND, None)):
        setattr(module, _EXPAND, _unexpanded)  # also in deep copies


def _unexpanded(latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotary


def mask(before: str, *args: Any, **kwargs: Any) -> Any:
    """The mask of an attention call: made as before, or for planned batches an `empty_mask` that names its kind."""
    given = kwargs.get("attention_mask")
    if given is None or kind_of(given) is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[before](*args, **kwargs)
    return empty_mask(given.device, planned_of(given), _kind_of_call(kwargs["config"], kwargs))


def _function(before: str, module: torch.nn.Module) -> Callable[..., Any]:
    """The attention function called `before`."""
    if before != "eager":
        return ALL_ATTENTION_FUNCTIONS[before]
    # Each modeling file has its own; FSDP2 derives classes in other files.
    files = [sys.modules.get(cls.__module__) for cls in type(module).__mro__]
    found = [x for file in files if (x := getattr(file, "eager_attention_forward", None))]
    if not found:
        raise ValueError(f"{type(module).__name__} has no eager attention; load the model with 'sdpa'")
    return found[0]


def _checked_kind(
    module: Any, query: torch.Tensor, key: torch.Tensor, mask: Any, options: dict[str, Any], blocks: bool
) -> str:
    """The kind of mask of a call with a plan, after its arguments were checked."""
    name = type(module).__name__
    if options.get("dropout"):
        raise ValueError(f"there is no attention dropout; set {options['dropout']} to 0 in the config of {name}")
    if options.get("is_causal") is False or not (blocks or getattr(module, "is_causal", True)):
        raise ValueError(f"{name} is not causal, as plans are; set is_decoder=True, or train with data parallelism")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{name} has {query.shape[2]} queries and {key.shape[2]} keys; pass use_cache=False")
    strange = sorted(n for n, x in options.items() if n not in _KNOWN and x is not None and x is not False)
    if strange:
        raise ValueError(f"{name} passes {strange} to its attention; leave out of the batch what is not needed")
    kind, window = getattr(module, KIND, None), options.get("sliding_window")
    asked = kind_of(mask) or "a mask or a bias of its own"
    allowed = (kind, UNKNOWN, OTHER) if blocks else (kind, UNKNOWN)
    if kind is None or asked not in allowed or (window is not None and kind != SLIDING):
        raise ValueError(f"{name} asks for attention of {asked}, {window=}, its config of {kind}; use data parallelism")
    return kind


def _kind_of_call(config: Any, arguments: Mapping[str, Any]) -> str:
    """The kind of mask that transformers' `create_…_mask` asks for."""
    config, size = config.get_text_config(), arguments.get("local_size")
    if not arguments.get("allow_is_causal_skip") and arguments["mask_function"] is not causal_mask_function:
        return OTHER  # with blocks of images, or without causality
    sizes = {SLIDING: getattr(config, "sliding_window", None), CHUNKED: getattr(config, "attention_chunk_size", None)}
    kinds = [FULL] if size is None else [kind for kind, tokens in sizes.items() if tokens == size] or [OTHER]
    return kinds[0] if len(kinds) == 1 else UNKNOWN

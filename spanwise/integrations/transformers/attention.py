"""The attention and mask functions that transformers calls under a name of `AttentionInterface`.

With a planned batch attention is `spanwise.context_parallel_attention`. Without one it is what it was before.
"""

# B rows, H heads, T tokens of this rank, D head dim

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import spanwise
from spanwise.integrations.transformers import corrections
from spanwise.integrations.transformers.masks import CHUNKED, FULL, KINDS, SLIDING
from spanwise.integrations.transformers.planned import (
    OTHER,
    UNKNOWN,
    PlannedBatch,
    is_request,
    kind_of,
    no_mask,
    planned_of,
)

PREFIX = "spanwise_"
KIND = "_spanwise_kind"  # attribute of an attention module: its kind of mask, by its layer in the config

# Arguments of attention calls that say nothing which the plan does not know.
_IGNORED = frozenset([
    "position_ids", "position_embeddings", "position_embeddings_global", "position_embeddings_local",
    "cache_position", "past_key_values", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "num_items_in_batch", "return_dict", "is_causal", "is_training", "layer_idx", "labels",
    "shift_labels", "logits_to_keep", "input_ids", "token_type_ids", "mm_token_type_ids", "attention_mask",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic",
])  # fmt: skip


def register(before: str) -> str:
    """The name under which attention is spanwise's for planned batches, and `before` for others."""
    name = PREFIX + before
    AttentionInterface.register(name, functools.partial(attention, before))
    AttentionMaskInterface.register(name, functools.partial(mask, before))
    return name


def attention(
    before: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    spanwise_plan: PlannedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """One attention call of a model: ``[B, H, T, D]`` in, ``[B, T, H, D]`` out.

    Raises:
        ValueError: a call that a plan cannot serve.
    """
    spanwise_plan = spanwise_plan or planned_of(attention_mask)
    if spanwise_plan is None:
        if kind_of(attention_mask) is not None:
            raise ValueError(
                f"{type(module).__name__} was called without the plan of its batch: the model does not pass keyword "
                f"arguments on to its attention; such models cannot be compiled under context parallelism"
            )
        return _function(before, module)(module, query, key, value, attention_mask, *args, **kwargs)
    names = ("scaling", "dropout")[: len(args)]  # some models pass them by position, in the order of eager attention
    kwargs |= dict(zip(names, args, strict=True))
    kind = _checked_kind(module, query, key, attention_mask, kwargs, spanwise_plan.blocks)
    query = corrections.with_global_temperature(module, query, spanwise_plan.positions)
    query, key, value = (_as_autocast(x) for x in (query, key, value))
    out = spanwise.context_parallel_attention(
        query,
        key,
        value,
        spanwise_plan.plan,
        mask_name=spanwise_plan.names[kind],
        scale=kwargs.get("scaling"),
        softcap=kwargs.get("softcap"),
        sinks=_sinks(kwargs.get("s_aux"), query),
    )
    return out.transpose(1, 2).contiguous(), None


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that autocast gives to attention; rotary embeddings leave q and k in float32."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def mask(before: str, *args: Any, **kwargs: Any) -> Any:
    """The mask of an attention call: made as before, or for planned batches a `no_mask` that names its kind."""
    given = kwargs.get("attention_mask")
    if given is None or not is_request(given):
        function = ALL_MASK_ATTENTION_FUNCTIONS[before]
        return function(*args, **kwargs)
    kind = _kind_of_function(kwargs["mask_function"], kwargs["config"], given.device)
    return no_mask(kind, given.device, planned_of(given))


def _function(before: str, module: torch.nn.Module) -> Callable[..., Any]:
    """The attention function called `before`."""
    if before != "eager":
        return ALL_ATTENTION_FUNCTIONS[before]
    for cls in type(module).__mro__:  # each modeling file has its own; FSDP2 derives classes in other files
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise ValueError(f"{type(module).__name__} has no eager attention; load the model with attn_implementation='sdpa'")


def _checked_kind(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: Any,
    options: dict[str, Any],
    blocks: bool,
) -> str:
    """The kind of mask of a call with a plan, after its arguments were checked."""
    name = type(module).__name__
    if options.get("dropout"):
        raise ValueError(
            f"context parallelism has no attention dropout, got dropout={options['dropout']} in {name}; set the "
            f"config's attention_dropout (attn_pdrop in some models) to 0"
        )
    if options.get("is_causal") is False or not (blocks or getattr(module, "is_causal", True)):
        raise ValueError(
            f"{name} is not causal, and plans of a model's config hold causal masks; set is_decoder=True in the config "
            f"of a model that has it, or train it with data parallelism"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{name} has {query.shape[2]} queries and {key.shape[2]} keys: context parallelism goes without a KV cache "
            f"and without cross attention; pass use_cache=False"
        )
    known = {"scaling", "softcap", "s_aux", "dropout", "sliding_window"} | _IGNORED
    strange = sorted(n for n, x in options.items() if n not in known and x is not None and x is not False)
    if strange:
        raise ValueError(
            f"{name} passes {strange} to its attention, which context parallelism does not know; leave out of the "
            f"batch what the model does not need"
        )
    kind, asked = getattr(module, KIND, None), kind_of(attention_mask)
    if asked is None:
        raise ValueError(
            f"{name} makes a mask or a bias of its own, so that its attention is not given by a plan of full, sliding "
            f"and chunked masks"
        )
    window = options.get("sliding_window")
    allowed = (kind, UNKNOWN, OTHER) if blocks else (kind, UNKNOWN)
    if kind is None or asked not in allowed or (window is not None and kind != SLIDING):
        raise ValueError(
            f"{name} asks for attention of {asked} with sliding_window={window}, and its config says {kind}. No plan "
            f"has masks that a config does not tell, as of tokens that read each other in models that are not known to "
            f"have them; train the model with data parallelism"
        )
    return kind


def _sinks(sinks: Any, query: torch.Tensor) -> torch.Tensor | None:
    """Logits of sinks beside `query`; of this rank's heads, where tensor parallelism has sharded them."""
    if isinstance(sinks, DTensor) and not isinstance(query, DTensor):
        return sinks.to_local(grad_placements=sinks.placements)
    return sinks


def _kind_of_function(function: Callable[..., Any], config: Any, device: torch.device) -> str:
    """The kind of mask that `function` computes, by its values where the kinds differ."""
    read = list(_token_tables(function))
    if any(bool((table >= 0).any()) for table in read):  # -1: no block
        return OTHER
    config = config.get_text_config()
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    edges = sorted({abs(n + d) for n in (0, window or 0, chunk or 0, 2 * (chunk or 0)) for d in (-2, -1, 0, 1, 2)})
    length = min((table.shape[-1] for table in read), default=edges[-1] + 1)
    kv = torch.tensor([edge for edge in edges if edge < length], device=device)
    q = kv[:, None]
    expected = {FULL: kv <= q}
    if window:
        expected[SLIDING] = (kv <= q) & (kv > q - window)
    if chunk:
        expected[CHUNKED] = (kv <= q) & (kv // chunk == q // chunk)
    got = torch.as_tensor(function(0, 0, q, kv), device=device).expand(len(kv), len(kv))
    kinds = [kind for kind in KINDS if kind in expected and torch.equal(got, expected[kind])]
    return UNKNOWN if len(kinds) > 1 else kinds[0] if kinds else OTHER  # short batches do not tell windows apart


def _token_tables(function: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """What a mask function looks up for each token, such as the image that it belongs to."""
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for one in held if isinstance(held, (tuple, list)) else [held]:
            if isinstance(one, torch.Tensor) and one.dim() >= 2:
                yield one
            elif callable(one):
                yield from _token_tables(one)

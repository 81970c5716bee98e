"""Plans from a model's config: masks of full, sliding and chunked attention, inside of documents, and states.

The rules of masks are those of `transformers.masking_utils`. Layers that carry a state along the sequence need none;
what they exchange has a price for the choice of a layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

import spanwise
from spanwise.integrations.transformers.blocks import BIDIRECTIONAL, OF_IMAGES, find_blocks, rule_of
from spanwise.integrations.transformers.documents import Batch, Documents, find_documents

FULL, SLIDING, CHUNKED = KINDS = ("full_attention", "sliding_attention", "chunked_attention")
# Types of layers that have a mixer of `mixers.table`, and the kind of attention that they have beside it.
MIXED: dict[str, str | None] = {"linear_attention": None, "conv": None, "hybrid": FULL}
_WITHIN_TOKENS = ("mlp", "moe")
NO_ATTENTION = "linear_attention"  # name of the mask of models without attention: each token reads itself
# Attributes of configs: heads, key dim and value dim of a state (1: no such dim), width of the convolution (1: none),
# and whether it is a delta rule. The first row of which a config has all attributes is its own.
_STATES: tuple[tuple[Any, Any, Any, Any, bool], ...] = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", True),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim", "linear_conv_kernel_dim", True),
    ("mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv", False),
    ("mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel", False),
    ("n_mamba_heads", "mamba_d_state", "mamba_headdim", "mamba_d_conv", False),
    ("num_heads", "state_size", "head_dim", "conv_kernel", False),
    ("intermediate_size", "state_size", 1, "conv_kernel", False),
    ("mamba_intermediate_size", "mamba_d_state", 1, "mamba_d_conv", False),
    ("lru_width", 1, 1, "conv1d_width", False),
    ("hidden_size", 1, 1, "conv_L_cache", False),
)


def layer_types(config: Any) -> tuple[str, ...]:
    """The type of each layer of a model's config, as transformers calls them.

    Raises:
        ValueError: layers that neither are attention over spans of keys nor may carry a state.
    """
    rule, config = rule_of(config), config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        number, windowed = (_of_all_layers(config, name) for name in ("num_hidden_layers", "sliding_window"))
        if number is None:
            raise ValueError(f"{type(config).__name__} tells neither layer_types nor num_hidden_layers, so no masks")
        chunked = _of_all_layers(config, "attention_chunk_size")
        kinds = [SLIDING if windowed is not None else CHUNKED if chunked is not None else FULL] * number
    known, name = [*KINDS, *MIXED, *_WITHIN_TOKENS], type(config).__name__
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ValueError(f"{name} has layers of type {unknown}; context parallelism takes those among {known}")
    bidirectional = None if rule is not None else getattr(config, BIDIRECTIONAL, None)
    if not getattr(config, "is_causal", True) or (bidirectional and bidirectional != OF_IMAGES):
        raise ValueError(f"{name} says that attention is not causal; set is_decoder=True, or use data parallelism")
    kinds = tuple(kinds[: config.num_hidden_layers])
    for kind, length in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        if kind in kinds and not ((tokens := _of_all_layers(config, length)) or 0) > 0:
            raise ValueError(f"{name} has layers of type {kind!r} and {length}={tokens}; set {length} or layer_types")
    return kinds


def _of_all_layers(config: Any, name: str) -> Any:
    """A value of a config; None without it. ValueError where layers have values of their own."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:
        raise ValueError(f"layers of {type(config).__name__} differ in {name}; give all of a kind one value") from error


def layer_kinds(config: Any) -> tuple[str | None, ...]:
    """The kind of attention of each layer of a model's config, as `layer_types` tells; None for those without."""
    return tuple(kind if kind in KINDS else MIXED.get(kind) for kind in layer_types(config))


def mask_weights(config: Any) -> dict[str, int]:
    """Names of the masks of a model's plans, and how many layers have each."""
    kinds = [kind for kind in layer_kinds(config) if kind is not None]
    return dict(Counter(kinds)) if kinds else {NO_ATTENTION: 1}


def _span_masks(config: Any, kinds: Iterable[str], documents: Documents, batch: Batch) -> dict[str, spanwise.SpanMask]:
    """The masks of a model's layers, of the `kinds` of `mask_weights`."""
    text, blocks, masks = config.get_text_config(), find_blocks(batch, config, documents), {}
    window = getattr(text, "sliding_window", None)
    for kind in kinds:
        left = {SLIDING: (window or 0) - 1, NO_ATTENTION: 0}.get(kind)
        if documents.tree is None:
            chunk = text.attention_chunk_size if kind == CHUNKED else None
            limits = None if left is None else (left, 0)
            masks[kind] = spanwise.SpanMask.documents(documents.cu_seqlens, window=limits, chunk=chunk)
        elif kind == CHUNKED:
            raise ValueError(f"{type(config).__name__} has layers of chunked attention, which a tree has no mask for")
        else:
            masks[kind] = documents.tree.mask(window=left)
        if blocks is not None:
            masks[kind] = blocks.added_to(masks[kind], window if kind == SLIDING else None)
    return masks


def recurrences(config: Any, layers: int) -> dict[str, spanwise.Recurrence] | None:
    """The argument of `spanwise.make_plan` for a model's config, with so many layers that carry a state; or None.

    >>> from transformers import Qwen3NextConfig
    >>> recurrences(Qwen3NextConfig(), 36)["linear_attention"].map_bytes
    4194304
    """
    config = config.get_text_config()
    numbers = _numbers(config)
    if layers == 0 or numbers is None:
        return None
    heads, _, value_dim, delta_rule, _ = numbers
    channels = None if delta_rule else heads * value_dim
    return {"linear_attention": spanwise.Recurrence(layers, *numbers, channels, config.hidden_size)}


def _numbers(config: Any) -> tuple[int, int, int, bool, int] | None:
    """Heads, key dim, value dim, whether it is a delta rule, and width of the convolution."""
    given = vars(config)
    if "mamba_expand" in given:  # Jamba and Zamba have a state for each channel
        given = given | {"mamba_intermediate_size": int(given["mamba_expand"] * config.hidden_size)}
    if "linear_attn_alpha_factor" in given:  # MiniMax, whose linear attention has the heads of its attention
        head_dim = given.get("head_dim") or config.hidden_size // config.num_attention_heads
        return config.num_attention_heads, head_dim, head_dim, False, 1
    for *names, delta_rule in _STATES:
        heads, key_dim, value_dim, width = (given.get(name) if isinstance(name, str) else name for name in names)
        if all(isinstance(x, int) for x in (heads, key_dim, value_dim, width)):
            return heads, key_dim, value_dim, delta_rule, width
    return None


def make_plan(batch: Batch, config: Any, num_ranks: int, **options: Any) -> spanwise.Plan:
    """One plan for a batch: a mask for each kind of layer, weighted by how many layers have it; pure.

    Runs where the batch is made, for example in a collator of a data loader's worker.

    Args:
        batch: as `find_documents` takes it.
        config: the model's `PreTrainedConfig`; or a list of them, for models that share one layout.
        num_ranks: ranks of the cp mesh.
        options: further arguments of `spanwise.make_plan`, such as ``balancer`` and ``exchange``; ``recurrences``, of
            layers that carry a state, are by default those of the config.

    Raises:
        ValueError: layers that are not attention over spans, or a batch that `find_documents` refuses.
    """
    configs = list(config) if isinstance(config, (list, tuple)) else [config]
    return plan_documents(find_documents(batch, num_ranks), batch, configs, num_ranks, **options)[0]


def plan_documents(
    documents: Documents, batch: Batch, configs: list[Any], num_ranks: int, **options: Any
) -> tuple[spanwise.Plan, list[dict[str, str]]]:
    """`make_plan` for documents that were found before, and `mask_names` for each config."""
    masks: dict[str, spanwise.SpanMask] = {}
    weights: Counter[str] = Counter()
    carried: dict[str, Any] = {}
    names: list[dict[str, str]] = [{} for _ in configs]
    for number, config in enumerate(configs):
        layers = mask_weights(config)
        for kind, mask in _span_masks(config, layers, documents, batch).items():
            name = kind if masks.setdefault(kind, mask) == mask else f"{kind} of model {number}"
            masks[name], names[number][kind] = mask, name
            weights[name] += layers[kind]
        states = recurrences(config, sum(kind in MIXED for kind in layer_types(config))) or {}
        carried |= {f"{name} of model {number}" if number else name: x for name, x in states.items()}
    if carried and documents.tree is not None:
        raise ValueError("layers that carry a state cannot follow the branches of a tree; give each path as a document")
    own = {"recurrences": carried or None, "cu_seqlens": documents.cu_seqlens if documents.tree is None else None}
    return spanwise.make_plan(masks, num_ranks, weights=dict(weights), **own | options), names


def mask_names(plan: spanwise.Plan, documents: Documents, batch: Batch, config: Any) -> dict[str, str]:
    """The name in `plan` of the mask of each kind of the layers of a model with this `config`.

    Raises:
        ValueError: a plan without a mask for one of them, or with one for a config of another window.
    """
    names, expected = {}, _span_masks(config, mask_weights(config), documents, batch)
    for kind, mask in expected.items():
        given = plan.masks.get(kind)
        if given is None:
            raise ValueError(f"the model's layers need masks {sorted(expected)}, the plan has {sorted(plan.masks)}")
        equal = [name for name in plan.masks if name.startswith(kind) and plan.masks[name] == mask]
        names[kind] = equal[0] if equal else kind
        if equal:
            continue
        most = int(np.where(given.end > given.start, np.arange(given.q_len) + 1 - given.start, 0).max())
        limits: dict[str, Any] = {SLIDING: {"window": (most - 1, 0)}, CHUNKED: {"chunk": most}}
        other = kind in limits and given == spanwise.SpanMask.documents(documents.cu_seqlens, **limits[kind])
        if documents.tree is not None or other:
            raise ValueError(f"{kind!r} read up to {most} tokens in the plan, unlike in the config; use hf.make_plan")
    return names

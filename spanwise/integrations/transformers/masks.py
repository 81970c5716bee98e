"""Plans from a model's config and batch: masks of attention inside of documents, and prices of carried states.

The rules of masks are those of `transformers.masking_utils` 5.23, and of the models' own code where tokens of images
and prefixes read each other in both directions.
"""

# N tokens that are kept

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

import spanwise
from spanwise.integrations.transformers.batches import Batch, Documents, find_documents, of_tokens

FULL, SLIDING, CHUNKED = KINDS = ("full_attention", "sliding_attention", "chunked_attention")
# Types of layers that have a mixer of `mixers.table`, and the kind of attention that they have beside it.
MIXED: dict[str, str | None] = {"linear_attention": None, "conv": None, "hybrid": FULL}
INDEXED = "indexed_attention"  # an indexer picks the keys of each query; see `indexed`
_KINDS_OF = MIXED | {INDEXED: FULL}
_WITHIN_TOKENS = ("mlp", "moe")
NO_ATTENTION = "linear_attention"  # name of the mask of models without attention: each token reads itself
# Attributes of configs: heads, key dim and value dim of a state (1: no such dim), width of the convolution (1: none),
# and whether it is a delta rule. The first row of which a config has all attributes is its own.
_STATES: tuple[tuple[Any, Any, Any, Any, bool], ...] = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", True),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim", "linear_conv_kernel_dim", True),
    ("mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv", False),
    ("mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel", False),
    ("num_heads", "state_size", "head_dim", "conv_kernel", False),
    ("intermediate_size", "state_size", 1, "conv_kernel", False),
    ("mamba_intermediate_size", "mamba_d_state", 1, "mamba_d_conv", False),
    ("hidden_size", 1, 1, "conv_L_cache", False),
)
_BIDIRECTIONAL, _OF_IMAGES = "use_bidirectional_attention", "vision"  # of text configs; a value: inside of images


class _Rule(NamedTuple):
    """Which tokens of a model read each other."""

    argument: str  # of the model's forward; marks tokens
    marks: tuple[int, ...]  # its values for tokens that read each other
    runs: bool  # inside of each run of marked tokens, or all of a document
    windowed: bool = False  # windows of sliding layers end such reading on the left
    sliding_alone: bool = False  # full layers stay causal
    needed: bool = False  # a batch without the argument is an error
    when: tuple[str, tuple[Any, ...]] = (_BIDIRECTIONAL, (None, False))  # attribute of the text config, its values


_VISION = (_BIDIRECTIONAL, (_OF_IMAGES,))
_GEMMA3 = _Rule("token_type_ids", (1,), runs=True, windowed=True)
_RULES = {
    "gemma3": _GEMMA3,
    "shieldgemma2": _GEMMA3,
    "gemma4": _Rule("mm_token_type_ids", (1, 2), runs=True, windowed=True, sliding_alone=True, when=_VISION),
    "gemma4_unified": _Rule("mm_token_type_ids", (1, 2), runs=True, when=_VISION),
    # Without marks its SDPA attention is not causal at all, and its eager attention is.
    "paligemma": _Rule("token_type_ids", (0,), runs=False, needed=True, when=(_BIDIRECTIONAL, (None, False, True))),
    "molmo2": _Rule("mm_token_type_ids", (1,), runs=False),
    "hrm_text": _Rule("token_type_ids", (1,), runs=False, when=("prefix_lm", (True,))),
}


def _rule_of(config: Any) -> _Rule | None:
    """The rule of a model's config; None where no tokens read each other in both directions."""
    rule = _RULES.get(getattr(config, "model_type", ""))
    return rule if rule and getattr(config.get_text_config(), rule.when[0], None) in rule.when[1] else None


def layer_types(config: Any) -> tuple[str, ...]:
    """The type of each layer of a model's config, as transformers calls them.

    Raises:
        ValueError: layers that neither are attention over spans of keys nor may carry a state.
    """
    rule, config = _rule_of(config), config.get_text_config()
    name, kinds = type(config).__name__, getattr(config, "layer_types", None)
    if kinds is None:
        number, windowed = (_of_all_layers(config, name) for name in ("num_hidden_layers", "sliding_window"))
        if number is None:
            raise ValueError(f"{name} tells neither layer_types nor num_hidden_layers, so no masks")
        chunked = _of_all_layers(config, "attention_chunk_size")
        kinds = [SLIDING if windowed is not None else CHUNKED if chunked is not None else FULL] * number
    known = [*KINDS, INDEXED, *MIXED, *_WITHIN_TOKENS]
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ValueError(f"{name} has layers of type {unknown}, and known are {known}; use data parallelism")
    bidirectional = None if rule is not None else getattr(config, _BIDIRECTIONAL, None)
    if not getattr(config, "is_causal", True) or (bidirectional and bidirectional != _OF_IMAGES):
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
    return tuple(kind if kind in KINDS else _KINDS_OF.get(kind) for kind in layer_types(config))


def mask_weights(config: Any) -> dict[str, int]:
    """Names of the masks of a model's plans, and how many layers have each."""
    return dict(Counter(filter(None, layer_kinds(config)))) or {NO_ATTENTION: 1}


def span_masks(config: Any, documents: Documents, batch: Batch) -> dict[str, spanwise.SpanMask]:
    """The masks of a model's layers, by the names of `mask_weights`."""
    kinds, text, rule, masks = mask_weights(config), config.get_text_config(), _rule_of(config), {}
    if documents.tree is not None and any(kind in MIXED for kind in layer_types(config)):
        raise ValueError("layers that carry a state cannot follow the branches of a tree; give each path as a document")
    blocks, window = _blocks(batch, config, documents), getattr(text, "sliding_window", None) or 0
    for kind in kinds:
        left = {SLIDING: window - 1, NO_ATTENTION: 0}.get(kind)
        if documents.tree is None:
            chunk = text.attention_chunk_size if kind == CHUNKED else None
            limits = None if left is None else (left, 0)
            masks[kind] = spanwise.SpanMask.documents(documents.cu_seqlens, window=limits, chunk=chunk)
        elif kind == CHUNKED:
            raise ValueError(f"{type(config).__name__} has layers of chunked attention, which a tree has no mask for")
        else:
            masks[kind] = documents.tree.mask(window=left)
        if rule is not None and blocks is not None and (kind == SLIDING or not rule.sliding_alone):
            limited = rule.windowed and kind == SLIDING
            reach = spanwise.SpanMask.sliding_window(blocks.q_len, window - 1, blocks.q_len) if limited else blocks
            masks[kind] |= blocks & reach
    return masks


def is_marked(batch: Batch, config: Any) -> bool:
    """Whether a batch marks tokens of a model that may read each other in both directions."""
    rule, reads = _rule_of(config), getattr(config.get_text_config(), _BIDIRECTIONAL, None)
    argument = "mm_token_type_ids" if rule is None and reads == _OF_IMAGES else getattr(rule, "argument", "")
    return batch.get(argument) is not None


def _blocks(batch: Batch, config: Any, documents: Documents) -> spanwise.SpanMask | None:
    """Which of the N tokens read each other in both directions; None where the model has no rule, or nothing is marked.

    Raises:
        ValueError: a batch without marks that the model needs, or with images of a model that has no rule here.
    """
    rule, name = _rule_of(config), type(config).__name__
    if rule is None:  # a text model alone may have the config of one that reads images
        marks, reads = batch.get("mm_token_type_ids"), getattr(config.get_text_config(), _BIDIRECTIONAL, None)
        if marks is not None and reads == _OF_IMAGES and bool(((marks == 1) | (marks == 2)).any()):
            raise ValueError(f"tokens of an image or video read each other by {name}; known are {', '.join(_RULES)}")
        return None
    given = batch.get(rule.argument)
    if documents.tree is not None:
        raise ValueError(f"tokens of a model with {name} may read each other, which no tree has a mask for")
    if given is None:
        if rule.needed:
            raise ValueError(f"{name} trains on batches with {rule.argument} [B, S], as its processor makes them")
        return None
    of_tokens(rule.argument, given, (documents.rows, documents.length))
    marked = torch.isin(documents.flat(given)[0].cpu(), torch.tensor(rule.marks)).numpy()
    blocks = []  # runs of tokens, and the runs that they read
    for first, last in pairwise(documents.cu_seqlens):
        runs = np.flatnonzero(np.diff(marked[first:last], prepend=False, append=False)).reshape(-1, 2) + first
        blocks += [(run, run[None] if rule.runs else runs) for run in runs]
    start, end = np.zeros((2, max((len(runs) for _, runs in blocks), default=1), len(marked)), np.int64)
    for (first, last), runs in blocks:
        start[: len(runs), first:last], end[: len(runs), first:last] = runs[:, :1], runs[:, 1:]
    return spanwise.SpanMask(start, end, len(marked))


def recurrences(config: Any, layers: int) -> dict[str, spanwise.Recurrence]:
    """The argument of `spanwise.make_plan` for a model's config, with so many layers that carry a state.

    >>> from transformers import Qwen3NextConfig
    >>> recurrences(Qwen3NextConfig(), 36)["linear_attention"].map_bytes
    4194304
    """
    config = config.get_text_config()
    given = dict(vars(config))
    if "mamba_expand" in given:  # Jamba and Zamba have a state for each channel
        given["mamba_intermediate_size"] = int(given["mamba_expand"] * config.hidden_size)
    for *names, delta_rule in _STATES:
        sizes: list[Any] = [given.get(name) if isinstance(name, str) else name for name in names]
        if layers and all(isinstance(x, int) for x in sizes):
            sizes = [*sizes[:3], delta_rule, config.hidden_size]
            return {"linear_attention": spanwise.Recurrence(layers, *sizes)}
    return {}


def row_dim(config: Any) -> int | None:
    """Numbers of a token that multi-head latent attention sends in place of K and V; None for models without it."""
    config = config.get_text_config()
    try:
        latents = getattr(config, "kv_lora_rank", None)
        return latents + config.qk_rope_head_dim if latents else None
    except RuntimeError:  # layers differ
        return None


def make_plan(batch: Batch, config: Any, num_ranks: int, **options: Any) -> spanwise.Plan:
    """One plan for a batch: a mask for each kind of layer, weighted by how many layers have it; pure.

    Runs where the batch is made, for example in a collator of a data loader's worker.

    Args:
        batch: as `find_documents` takes it.
        config: the model's `PreTrainedConfig`.
        num_ranks: ranks of the cp mesh.
        options: further arguments of `spanwise.make_plan`, such as ``balancer`` and ``exchange``; ``recurrences``, of
            layers that carry a state, and ``kv_row_dim``, of latents, are by default those of the config.

    Raises:
        ValueError: layers that are not attention over spans, or a batch that `find_documents` refuses.
    """
    documents = find_documents(batch)
    return plan_documents(documents, span_masks(config, documents, batch), config, num_ranks, **options)


def plan_documents(
    documents: Documents, masks: Mapping[str, spanwise.SpanMask], config: Any, num_ranks: int, **options: Any
) -> spanwise.Plan:
    """`make_plan` for documents and `span_masks` that were found before."""
    states = recurrences(config, sum(kind in MIXED for kind in layer_types(config)))
    offsets = documents.cu_seqlens if documents.tree is None else None
    priced = {"recurrences": states or None, "kv_row_dim": row_dim(config), "cu_seqlens": offsets}
    return spanwise.make_plan(masks, num_ranks, weights=mask_weights(config), **priced | options)


def check_masks(plan: spanwise.Plan, expected: Mapping[str, spanwise.SpanMask], documents: Documents) -> None:
    """``ValueError`` for a plan without one of the `span_masks` of a model, or with one for a config of another window.

    Other masks are the user's.
    """
    for kind, mask in expected.items():
        given = plan.masks.get(kind)
        if given is None:
            raise ValueError(f"the model's layers need masks {sorted(expected)}, the plan has {sorted(plan.masks)}")
        if given is mask or given == mask:
            continue
        most = int(np.where(given.end > given.start, np.arange(given.q_len) + 1 - given.start, 0).max())
        limits: dict[str, Any] = {SLIDING: {"window": (most - 1, 0)}, CHUNKED: {"chunk": most}}
        other = kind in limits and given == spanwise.SpanMask.documents(documents.cu_seqlens, **limits[kind])
        if documents.tree is not None or other:
            raise ValueError(f"{kind!r} read up to {most} tokens in the plan, unlike in the config; use hf.make_plan")

"""Masks of a model's layers, from its config: full, sliding and chunked attention, inside of documents.

The rules are those of `transformers.masking_utils`. Layers that carry a state along the sequence need no mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

import spanwise
from spanwise.integrations.transformers.blocks import BIDIRECTIONAL, OF_IMAGES, Blocks, find_blocks, rule_of
from spanwise.integrations.transformers.documents import Documents, find_documents
from spanwise.integrations.transformers.prices import recurrences

FULL, SLIDING, CHUNKED = KINDS = ("full_attention", "sliding_attention", "chunked_attention")
# Types of layers that have a mixer of `mixers.table`, and the kind of attention that they have beside it.
MIXED: dict[str, str | None] = {"linear_attention": None, "conv": None, "hybrid": FULL}
_WITHIN_TOKENS = ("mlp", "moe")
NO_ATTENTION = "linear_attention"  # name of the mask of models without attention: each token reads itself


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
    known = [*KINDS, *MIXED, *_WITHIN_TOKENS]
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ValueError(
            f"{type(config).__name__} has layers of type {unknown}; context parallelism takes models whose layers are "
            f"all among {known}"
        )
    bidirectional = None if rule is not None else getattr(config, BIDIRECTIONAL, None)
    if not getattr(config, "is_causal", True) or (bidirectional and bidirectional != OF_IMAGES):
        raise ValueError(
            f"{type(config).__name__} says that attention is not causal, and plans hold causal masks; set "
            f"is_decoder=True where the model has that, or train it with data parallelism"
        )
    kinds = tuple(kinds[: config.num_hidden_layers])
    for kind, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        if kind in kinds and not (_of_all_layers(config, name) or 0) > 0:
            raise ValueError(
                f"{type(config).__name__} has layers of type {kind!r} and {name}={getattr(config, name, None)}; set "
                f"{name} to a number of tokens, or other layer_types"
            )
    return kinds


def _of_all_layers(config: Any, name: str) -> Any:
    """A value of a config; None without it. ValueError where layers have values of their own."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:
        raise ValueError(
            f"layers of {type(config).__name__} differ in {name}; context parallelism takes one value for all of a kind"
        ) from error


def layer_kinds(config: Any) -> tuple[str | None, ...]:
    """The kind of attention of each layer of a model's config; None for layers without attention.

    Raises:
        ValueError: layers that neither are attention over spans of keys nor may carry a state.

    >>> class Config:
    ...     num_hidden_layers, sliding_window = 2, 4096
    ...     def get_text_config(self): return self
    >>> layer_kinds(Config())
    ('sliding_attention', 'sliding_attention')
    """
    return tuple(kind if kind in KINDS else MIXED.get(kind) for kind in layer_types(config))


def mask_weights(config: Any) -> dict[str, int]:
    """Names of the masks of a model's plans, and how many layers have each."""
    kinds = [kind for kind in layer_kinds(config) if kind is not None]
    return dict(Counter(kinds)) if kinds else {NO_ATTENTION: 1}


def span_masks(config: Any, documents: Documents, blocks: Blocks | None) -> dict[str, spanwise.SpanMask]:
    """The mask of each kind of a model's layers, for the documents of a batch."""
    kinds, text = mask_weights(config), config.get_text_config()
    window = getattr(text, "sliding_window", None)
    masks = {}
    for kind in kinds:
        left = {SLIDING: (window or 0) - 1, NO_ATTENTION: 0}.get(kind)
        if kind == CHUNKED and documents.tree is not None:
            raise ValueError(f"{type(config).__name__} has layers of chunked attention, which a tree has no mask for")
        if documents.tree is not None:
            masks[kind] = documents.tree.mask(window=left)
        elif kind == CHUNKED:
            masks[kind] = spanwise.SpanMask.documents(documents.cu_seqlens, chunk=text.attention_chunk_size)
        else:
            masks[kind] = spanwise.SpanMask.documents(documents.cu_seqlens, window=None if left is None else (left, 0))
        if blocks is not None:
            masks[kind] = blocks.added_to(masks[kind], window if kind == SLIDING else None)
    return masks


def make_plan(batch: Mapping[str, Any], config: Any, num_ranks: int, **options: Any) -> spanwise.Plan:
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
    return plan_documents(find_documents(batch, num_ranks), batch, configs, num_ranks, **options)


def plan_documents(
    documents: Documents, batch: Mapping[str, Any], configs: list[Any], num_ranks: int, **options: Any
) -> spanwise.Plan:
    """`make_plan` for documents that were found before."""
    masks: dict[str, spanwise.SpanMask] = {}
    weights: Counter[str] = Counter()
    carried: dict[str, Any] = {}
    for number, config in enumerate(configs):
        for kind, mask in span_masks(config, documents, find_blocks(batch, config, documents)).items():
            name = kind if masks.setdefault(kind, mask) == mask else f"{kind} of model {number}"
            masks[name] = mask
            weights[name] += mask_weights(config)[kind]
        states = recurrences(config, sum(kind in MIXED for kind in layer_types(config))) or {}
        carried |= {f"{name} of model {number}" if number else name: x for name, x in states.items()}
    if carried and documents.tree is not None:
        raise ValueError(
            "layers that carry a state along the sequence cannot follow the branches of a tree; give each path as a "
            "document"
        )
    offsets = None if documents.tree is not None else documents.cu_seqlens
    given = {"recurrences": carried or None, "cu_seqlens": offsets} | options
    return spanwise.make_plan(masks, num_ranks, weights=dict(weights), **given)


def mask_names(plan: spanwise.Plan, documents: Documents, expected: Mapping[str, spanwise.SpanMask]) -> dict[str, str]:
    """The name in `plan` of the mask of each kind of a model's layers, which `expected` has by its config.

    Raises:
        ValueError: a plan without a mask for one of them, or with one for a config of another window.
    """
    names = {}
    for kind, mask in expected.items():
        if kind not in plan.masks:
            raise ValueError(
                f"the model's layers need masks named {sorted(expected)}, the plan has {sorted(plan.masks)}"
            )
        equal = [name for name in plan.masks if name.startswith(kind) and plan.masks[name] == mask]
        names[kind] = equal[0] if equal else kind
        given = plan.masks[kind]
        reach = np.where(given.end > given.start, np.arange(given.q_len) + 1 - given.start, 0)
        most = int(reach.max())  # tokens back, with the row's own
        others = {
            SLIDING: lambda n=most: spanwise.SpanMask.documents(documents.cu_seqlens, window=(n - 1, 0)),
            CHUNKED: lambda n=most: spanwise.SpanMask.documents(documents.cu_seqlens, chunk=n),
        }
        if not equal and (documents.tree is not None or (kind in others and given == others[kind]())):
            raise ValueError(
                f"layers of type {kind!r} read up to {most} tokens in the plan, and others by the model's config; make "
                f"the plan with hf.make_plan from the batch and the config of the model"
            )
    return names

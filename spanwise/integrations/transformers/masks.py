"""Masks of a model's layers, from its config: full, sliding and chunked attention, inside of documents.

The rules are those of `transformers.masking_utils`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

import spanwise
from spanwise.integrations.transformers.documents import find_documents

FULL, SLIDING, CHUNKED = KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kind of attention of each layer of a model's config.

    Raises:
        ValueError: layers of a kind that is not attention over spans of keys.

    >>> class Config:
    ...     num_hidden_layers, sliding_window = 2, 4096
    ...     def get_text_config(self): return self
    >>> layer_kinds(Config())
    ('sliding_attention', 'sliding_attention')
    """
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        kinds = [SLIDING if window is not None else CHUNKED if chunk is not None else FULL] * config.num_hidden_layers
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ValueError(
            f"{type(config).__name__} has layers of type {unknown}; context parallelism takes models whose layers are "
            f"all among {list(KINDS)}"
        )
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        raise ValueError(f"{type(config).__name__} says that attention is not causal; its masks are not among {list(KINDS)}")
    return tuple(kinds[: config.num_hidden_layers])


def span_mask(config: Any, kind: str, cu_seqlens: np.ndarray) -> spanwise.SpanMask:
    """The mask of layers of `kind` for documents at `cu_seqlens`."""
    config = config.get_text_config()
    if kind == SLIDING:
        return spanwise.SpanMask.documents(cu_seqlens, window=(config.sliding_window - 1, 0))
    if kind == CHUNKED:  # chunks count from the start of each document
        size = config.attention_chunk_size
        starts = [np.arange(start, end, size) for start, end in itertools.pairwise(cu_seqlens.tolist())]
        cu_seqlens = np.concatenate([*starts, cu_seqlens[-1:]])
    return spanwise.SpanMask.documents(cu_seqlens)


def make_plan(batch: Mapping[str, Any], config: Any, num_ranks: int, **options: Any) -> spanwise.Plan:
    """One plan for a batch: a mask for each kind of layer, weighted by how many layers have it; pure.

    Runs where the batch is made, for example in a collator of a data loader's worker.

    Args:
        batch: as `find_documents` takes it.
        config: the model's `PreTrainedConfig`.
        num_ranks: ranks of the cp mesh.
        options: further arguments of `spanwise.make_plan`, such as ``balancer`` and ``exchange``.

    Raises:
        ValueError: layers that are not attention over spans, or a batch that `find_documents` refuses.
    """
    offsets = find_documents(batch).cu_seqlens
    weights = Counter(layer_kinds(config))
    masks = {kind: span_mask(config, kind, offsets) for kind in weights}
    return spanwise.make_plan(masks, num_ranks, weights=dict(weights), cu_seqlens=offsets, **options)

"""Layers whose indexer picks the keys of each query (DeepSeek sparse attention), with a cut batch.

The indexer is the model's own code. Each rank runs it on its queries, document by document, against the index keys of
the whole document: its scores and the way it breaks ties are those of one device. Index keys are few numbers a token,
so all ranks gather them. Attention then reads the picked keys among those that its plan brings; see `attention`.
"""

# N tokens of the batch that are kept, T of them this rank's, L tokens of a document

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import torch
from torch import nn

import spanwise
from spanwise.integrations.transformers.batches import PlannedBatch

_SCORES = 2**20  # (query, key) pairs that are scored at a time: 256 MiB for 64 heads


def defer(module: nn.Module) -> None:
    """Let an attention module with an indexer pass on a `Selection`; ``ValueError`` for an unknown indexer."""
    indexer = getattr(module, "indexer", None)
    if indexer is None:  # it takes the selection of a layer before
        return
    constants = inspect.unwrap(type(module).forward).__code__.co_consts
    if not any("indices" in names for names in constants if isinstance(names, tuple)):  # of keyword arguments
        raise ValueError(f"{type(indexer).__name__} picks keys in a way that is not known; use data parallelism")
    indexer.forward = types.MethodType(Selection, indexer)


class Selection:
    """The keys that an indexer picks for one call of attention; computed by attention, which knows the plan."""

    def __init__(self, indexer: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._function = type(indexer).forward
        self._arguments = inspect.signature(self._function).bind(indexer, *args, **kwargs).arguments
        self._picked: torch.Tensor | None = None  # kept, because later layers may share the selection

    def masked(self, mask: torch.Tensor, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask ``[B, 1, S, K]`` of a whole batch without the keys that are not picked, as the model makes it."""
        if self._picked is None:
            indices = self._function(**self._arguments)
            none = torch.zeros(*indices.shape[:2], num_keys, dtype=torch.bool, device=indices.device)
            self._picked, self._arguments = none.scatter_(-1, indices.long(), True).unsqueeze(1), {}
        if mask.dtype is torch.bool:
            return mask & self._picked
        return mask.masked_fill(~self._picked, torch.finfo(dtype).min)

    def picked(self, planned: PlannedBatch) -> torch.Tensor:
        """Whether each query of this rank reads each key, causality aside: bool ``[T, N]``. A collective call.

        Under Ulysses, where a rank computes all queries for its heads: ``[N, N]``.
        """
        if planned.documents.tree is not None:
            raise ValueError("indexers rank the keys of a document; a tree of prefixes has paths: pack them instead")
        if self._picked is None:
            self._picked, self._arguments = self._of_rank(planned), {}
        return self._picked

    @torch.no_grad()
    def _of_rank(self, planned: PlannedBatch) -> torch.Tensor:
        tokens, cu_seqlens = planned.plan.tokens[0], planned.documents.cu_seqlens
        keys = _Keys()
        self._run(slice(None), len(tokens), tokens.new_ones(1, len(tokens), 1, dtype=torch.bool), keys)
        assert keys.own is not None
        whole = spanwise.unshard(planned.plan, x=keys.own, dim=1)
        picked = torch.zeros(len(tokens), whole.shape[1], dtype=torch.bool, device=whole.device)
        host = tokens.cpu().numpy()  # ascending
        edges = np.searchsorted(host, cu_seqlens)
        for first, stop, begin, end in zip(edges[:-1], edges[1:], cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            rows = max(1, _SCORES // max(1, end - begin))
            for i in range(first, stop, rows):
                queries = slice(i, min(i + rows, stop))
                at = tokens[queries]
                causal = at[:, None] >= torch.arange(begin, end, device=at.device)
                found = self._run(queries, len(tokens), causal[None], _Keys(whole[:, begin:end]))
                picked[queries, begin:end].scatter_(1, found[0].long(), True)
        if planned.plan.inner > 1:
            picked = spanwise.unshard(planned.plan, x=picked[None].to(torch.uint8))[0].bool()
        return picked

    def _run(self, queries: slice, num_tokens: int, mask: torch.Tensor, keys: _Keys) -> torch.Tensor:
        """Indices of the picked keys ``[1, n, k]``, for some of the rank's tokens."""

        def taken(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(taken, x))
            of_tokens = isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[1] == num_tokens
            return x[:, queries] if of_tokens else x

        own = {"attention_mask": mask, "past_key_values": keys}
        return self._function(**{name: taken(x) for name, x in self._arguments.items()} | own)


class _Keys:
    """Stands for a cache of index keys: takes those of the indexer's tokens, gives those that it scores.

    Args:
        given: ``[1, L, D]``; None gives a single one.
    """

    def __init__(self, given: torch.Tensor | None = None) -> None:
        self.own: torch.Tensor | None = None
        self._given = given

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        self.own = keys
        return keys.new_zeros(keys.shape[0], 1, keys.shape[2]) if self._given is None else self._given


def reading(picked: torch.Tensor, tokens: torch.Tensor) -> Any:
    """A score_mod under which the queries at `tokens` ``[T]`` read what they `picked` ``[T, N]``; all ``[N, N]``."""
    place = torch.arange(picked.shape[1], device=tokens.device)
    if len(picked) < len(place):
        place[tokens.long()] = torch.arange(len(tokens), device=tokens.device)

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(picked[place[q], kv], score, -torch.inf)

    return score_mod

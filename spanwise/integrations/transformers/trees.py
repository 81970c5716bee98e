"""share_prefixes: a batch whose sequences share prefixes, such as completions of one prompt, as a tree."""

# N tokens of the tree

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

import spanwise
from spanwise.integrations.transformers.documents import find_documents


def share_prefixes(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The sequences of a batch as a tree, in which each common prefix is stored and computed once; pure.

    ``model(**hf.share_prefixes(batch)).loss`` is the loss of the sequences of the batch, each as often as it occurs.
    `spanwise.tree_from_sequences` makes the same tree and knows the path of each sequence in it.

    Args:
        batch: ``input_ids`` ``[B, S]``, padded or packed as `find_documents` takes it, and ``labels`` ``[B, S]``, which
            are token ids or -100. Not ``position_ids`` of one's own, nor other tensors.

    Returns:
        ``input_ids`` ``[1, N]``, the ``tree``, and with labels ``labels`` ``[1, N]`` and ``label_weights`` ``[1, N]``,
        float32: the number of sequences that have a label at a token.

    Raises:
        ValueError: tensors that are not of these, or labels that are not the tokens themselves.

    >>> ids = torch.tensor([[5, 6, 7], [5, 6, 8]])
    >>> batch = share_prefixes({"input_ids": ids, "labels": ids})
    >>> batch["input_ids"].tolist(), batch["label_weights"].tolist()
    ([[5, 6, 7, 8]], [[0.0, 2.0, 1.0, 1.0]])
    """
    documents = find_documents(batch)
    described = {"input_ids", "labels", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}
    strange = [name for name, x in batch.items() if isinstance(x, torch.Tensor) and name not in described]
    if documents.tree is not None or strange or "input_ids" not in batch:
        raise ValueError(f"share_prefixes takes input_ids and labels of sequences, got {sorted(batch)}")
    given = documents.flat(batch["input_ids"])[0]
    runs = [slice(*run) for run in pairwise(documents.cu_seqlens.tolist())]
    found = spanwise.tree_from_sequences([given[run] for run in runs])
    ids = torch.from_numpy(found.ids).to(given)[None]
    rest = {name: x for name, x in batch.items() if name not in described and not name.startswith("max_length_")}
    if batch.get("labels") is None:
        return {**rest, "input_ids": ids, "tree": found.tree}
    labels = documents.flat(batch["labels"])[0]
    valid = labels != -100
    if not torch.equal(labels[valid], given[valid].to(labels)):
        raise ValueError("labels must be the tokens of input_ids or -100: sequences that share a token share its label")
    valid[documents.cu_seqlens[:-1]] = False  # nothing predicts a first token
    weights = torch.from_numpy(found.weights([valid[run] for run in runs])).to(ids.device, torch.float32)[None]
    labels = ids.masked_fill(weights == 0, -100)
    return {**rest, "input_ids": ids, "labels": labels, "label_weights": weights, "tree": found.tree}

"""Plans of a run: of each packed sequence, or of each global batch, which a loader makes ahead of its step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import spanwise
from spanwise.train.config import TrainConfig
from spanwise.train.data import DocumentStream


def plan_options(config: TrainConfig) -> dict[str, Any]:
    """Arguments of `make_plan` that are the same for all sequences of a run."""
    sizes = config.model
    return {
        "balancer": config.balancer,
        "exchange": config.exchange,
        "num_q_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "dtype": getattr(torch, config.dtype),
        "hardware": spanwise.CPU_HOST if config.device == "cpu" else spanwise.H100,
    }


def plan_sequence(config: TrainConfig, cu_seqlens: np.ndarray) -> spanwise.Plan:
    """The plan by which the ranks of one dp coordinate share a packed sequence; the same on each of them."""
    mask = spanwise.SpanMask.documents(cu_seqlens)
    return spanwise.make_plan(mask, num_ranks=config.cp_axes, cu_seqlens=cu_seqlens, **plan_options(config))


def load_global_batches(
    config: TrainConfig, stream: DocumentStream, position: int, rank: int
) -> Iterator[dict[str, Any]]:
    """This rank's part of each global batch from `position` on, without end; workers make the next ones meanwhile."""
    batches = spanwise.GlobalBatches(
        [document.num_tokens for document in stream.documents],
        config.cp_axes,
        config.plan_tokens // config.ranks,
        seed=config.seed,
        max_document=config.max_document,
        cut=True,
        epochs=None,
        **plan_options(config),
    )
    dataset = spanwise.GlobalBatchDataset(batches, stream.documents, rank)
    dataset.load_state_dict({"position": position, "config": batches.config})
    context = "spawn" if config.workers else None
    return iter(DataLoader(dataset, batch_size=None, num_workers=config.workers, multiprocessing_context=context))

"""The same steps on one device: what ``--prove`` compares the ranks with.

Rank 0 holds an unsharded copy of the model and steps it on the same sequences with its own optimizer. Attention there
is torch's own over a dense boolean mask, labels and positions are made here from ``cu_seqlens``, the loss is torch's:
nothing of spanwise is on this path but the decoder's layers and the packed tokens.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from spanwise.train.data import PackedSequence
from spanwise.train.model import Decoder

IGNORE = -100

#: Makes an unsharded model and its optimizer.
Build = Callable[[], tuple[Decoder, torch.optim.Optimizer]]


def dense_document_mask(cu_seqlens: np.ndarray) -> torch.Tensor:
    """Boolean ``[1, 1, S, S]``: a token reads the tokens of its document up to itself."""
    lengths = torch.as_tensor(np.diff(cu_seqlens), dtype=torch.int64)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(document))
    return ((document[:, None] == document[None]) & (position[:, None] >= position[None]))[None, None]


def labels_and_positions(tokens: np.ndarray, cu_seqlens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ``[1, S]`` each: the next token of the same document, ``IGNORE`` at its end; positions from its start."""
    labels, positions = [], []
    for start, stop in itertools.pairwise(cu_seqlens):
        labels.append(np.append(tokens[start + 1 : stop], IGNORE))
        positions.append(np.arange(stop - start))
    return torch.as_tensor(np.concatenate(labels))[None], torch.as_tensor(np.concatenate(positions))[None]


def reference_loss(model: Decoder, sequences: Sequence[PackedSequence], device: torch.device) -> torch.Tensor:
    """Mean loss over the targets of all ``sequences``; backward leaves the gradient of it on ``model``.

    Sequences run one after the other, so that one activation set and one dense mask (S² bytes) live at a time.
    """
    targets = max(sum(sequence.num_targets for sequence in sequences), 1)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        labels, positions = labels_and_positions(sequence.tokens, sequence.cu_seqlens)
        tokens = torch.as_tensor(sequence.tokens)[None].to(device)
        mask = dense_document_mask(sequence.cu_seqlens).to(device)
        logits = model(tokens, positions.to(device), mask)
        wide = logits.flatten(0, 1) if logits.dtype == torch.float64 else logits.flatten(0, 1).float()
        loss = F.cross_entropy(wide, labels.flatten().to(device), ignore_index=IGNORE, reduction="sum")
        (loss / targets).backward()
        total += loss.detach().cpu().double() / targets
    return total


@contextlib.contextmanager
def all_threads(count: int) -> Iterator[None]:
    """Give this process ``count`` threads: the other ranks wait meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Reference:
    """One device's run beside the ranks'.

    Every rank makes one, because copying the weights is collective; only rank 0 holds the copy and computes.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, build: Build, threads: int):
        """What ``build`` makes is overwritten with the state of ``model`` and ``optimizer``."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        # A fresh optimizer has no state, and asking it for one would make it count a step.
        moments = get_optimizer_state_dict(model, optimizer, options=options) if optimizer.state else None
        self.threads = threads
        self.model: Decoder | None = None
        if dist.get_rank() == 0:
            self.model, self.optimizer = build()
            # Copies: what is gathered may share memory with the ranks' own state (step counters do).
            self.model.load_state_dict(copy.deepcopy(weights))
            if moments is not None:
                set_optimizer_state_dict(self.model, self.optimizer, copy.deepcopy(moments))

    def compare(
        self, sequences: Sequence[PackedSequence], model: torch.nn.Module, learning_rate: float, max_norm: float
    ) -> tuple[float, float]:
        """Repeat a step whose gradients lie on ``model``, before they are clipped. Collective.

        Returns:
            On rank 0 the loss and the gradient error: the largest over all parameters of
            ``max |g - g_ref| / max |g_ref|``. Zeros elsewhere.
        """
        loss, error = 0.0, 0.0
        expected: dict[str, torch.Tensor] = {}
        if self.model is not None:
            with all_threads(self.threads):
                self.optimizer.zero_grad()
                device = next(self.model.parameters()).device
                loss = reference_loss(self.model, sequences, device).item()
            expected = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), f"{name} has no sharded gradient"
            gradient = parameter.grad.full_tensor()
            if self.model is not None:
                error = max(error, relative_error(gradient, expected[name]))
        if self.model is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        return loss, error


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """``max |value - reference| / max |reference|``; absolute where the reference is zero everywhere."""
    difference = (value - reference).abs().max().item()
    scale = reference.abs().max().item()
    return difference / scale if scale > 0 else difference

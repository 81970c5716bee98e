"""The same steps on one device, which ``--prove`` compares with the ranks.

Rank 0 holds an unsharded copy of the model and steps it on the same sequences with a second optimizer. It uses torch's
attention over a dense boolean mask and torch's loss; labels and positions are made here from ``cu_seqlens``. This path
shares only the decoder's layers and the packed tokens with the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from spanwise.train.data import PackedSequence
from spanwise.train.model import Decoder

IGNORE = -100


class Tolerance(NamedTuple):
    """Differences that rounding explains.

    Attributes:
        loss: nats.
        gradient: as `gradient_error` defines it.
        floor: least scale of a tensor, as a share of the model's largest gradient. Where gradients are zero in exact
            arithmetic (a softmax over one key), both sides hold only rounding errors.
    """

    loss: float
    gradient: float
    floor: float


#: By dtype. Twelve steps in float32 differ by 6e-7 and 5e-5, in float64 by less than 1e-10; the margin allows for the
#: optimizer, which magnifies rounding. Defects (merge weights of one, zeroed keys of other ranks) differ by 0.6.
TOLERANCES = {"float32": Tolerance(1e-4, 1e-3, 1e-4), "float64": Tolerance(1e-9, 1e-9, 1e-6)}

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
    """Mean loss over the targets of all `sequences`; leaves its gradient on `model`.

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
    """Give this process `count` threads while the other ranks wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Reference:
    """A copy of the run on one device.

    Every rank makes one, because gathering the weights is collective; only rank 0 holds the copy and computes.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, build: Build, threads: int):
        """Copy the state of `model` and `optimizer` into a new pair made by `build`."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        # Asking a fresh optimizer for its state would make it count a step.
        moments = get_optimizer_state_dict(model, optimizer, options=options) if optimizer.state else None
        self.threads = threads
        self.model: Decoder | None = None
        if dist.get_rank() == 0:
            self.model, self.optimizer = build()
            # Copy, because gathered state may share memory with that of the ranks (step counters do).
            self.model.load_state_dict(copy.deepcopy(weights))
            if moments is not None:
                set_optimizer_state_dict(self.model, self.optimizer, copy.deepcopy(moments))

    def compare(
        self,
        sequences: Sequence[PackedSequence],
        model: torch.nn.Module,
        learning_rate: float,
        max_norm: float,
        floor: float,
    ) -> tuple[float, float] | None:
        """Repeat a step whose gradients lie on `model`, not yet clipped. A collective call.

        Returns:
            On rank 0 the loss and the `gradient_error` with this `floor`; None elsewhere.
        """
        loss = 0.0
        gradients: dict[str, torch.Tensor] = {}
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
                gradients[name] = gradient
        if self.model is None:
            return None
        error = gradient_error(gradients, expected, floor)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return loss, error


def gradient_error(gradients: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], floor: float) -> float:
    """The largest over all tensors of ``max |g - g_ref| / max(max |g_ref|, floor * G)``; NaN if any difference is NaN.

    ``G`` is the largest ``|g_ref|`` of the whole model. Both have the same names, or it raises ``ValueError``.
    """
    if gradients.keys() != reference.keys():
        raise ValueError(f"gradients of one side only: {sorted(gradients.keys() ^ reference.keys())}")
    scales = {name: expected.abs().max().item() for name, expected in reference.items()}
    least = floor * largest(scales.values())
    errors = []
    for name, expected in reference.items():
        difference = (gradients[name] - expected).abs().max().item()
        scale = largest((scales[name], least))
        errors.append(difference / scale if scale != 0 else difference)
    return largest(errors)


def largest(values: Iterable[float]) -> float:
    """The maximum; NaN if any value is NaN (`max` would depend on their order); 0 without values.

    >>> largest([1.0, float("nan"), 2.0])
    nan
    """
    values = list(values)
    return next((value for value in values if value != value), max(values, default=0.0))

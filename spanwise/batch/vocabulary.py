"""A vocabulary's weight as callers have it: whole, or this rank's rows under tensor parallelism, plain or a DTensor."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from spanwise.attention.compare import Compare, compare_sums, compared, plain
from spanwise.attention.exchange import failure
from spanwise.batch.loss import check_labels
from spanwise.batch.token_scores import Scoring, Tokens


def local_rows(x: torch.Tensor, what: str, mesh: DeviceMesh | None) -> torch.Tensor:
    """This rank's rows of a weight or bias, differentiably; ``ValueError`` for a DTensor cut otherwise than `mesh`."""
    if not isinstance(x, DTensor):
        return x
    if mesh is None or x.device_mesh != mesh or tuple(x.placements) != (Shard(0),):
        cut = f"{tuple(x.placements)} on the mesh axes {x.device_mesh.mesh_dim_names}"
        given = "None" if mesh is None else f"a mesh with the axes {mesh.mesh_dim_names}"
        raise ValueError(
            f"{what} is a DTensor {cut}, and vocab_mesh is {given}; a DTensor must be Shard(0) on vocab_mesh alone. "
            f"Under FSDP, call this inside the forward of the module that owns the weight, where it is whole; pass a "
            f"replicated DTensor as {what}.to_local()"
        )
    return x.to_local()


def check_plain(**tensors: torch.Tensor) -> None:
    """``ValueError`` for a DTensor among tensors that must be plain."""
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise ValueError(f"{name} must be a plain tensor, got a DTensor {tuple(x.placements)}; use to_local()")


def offset_of(
    tokens: Tokens,
    mesh: DeviceMesh | None,
    scoring: Scoring,
    caller: str,
    amount: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, Compare | None]:
    """Number of this rank's first row in the whole vocabulary, a scalar on the tokens' device; checks the labels.

    The second result is for `compare_backward`, if the backward has a collective: the gradient of hidden states is a
    sum over ranks.

    Args:
        mesh: None if one rank has the whole vocabulary.
        scoring: must be equal on the ranks of `mesh`, except for the chunk.
        caller: in words, equal as well: what it does with the scores decides on their gradients.
        amount: a number of the caller that changes from call to call, also equal; in a tensor it is not compared.

    Raises:
        ValueError: labels outside the vocabulary, on the CPU.
        spanwise.MismatchError: ranks of `mesh` make different calls.
        spanwise.ExchangeError: a rank of `mesh` is gone or too late.
    """
    x, labels, weight, bias = tokens
    rows = x.shape[-1] if weight is None else weight.shape[0]
    if mesh is None:
        check_labels(labels, rows)
        return labels.new_zeros(()), None
    given = "logits" if weight is None else "hidden states"
    sizes = (labels.numel(), *([] if weight is None else x.shape[-1:]))
    grads = torch.is_grad_enabled() and x.requires_grad
    facts = {
        "for": caller, "given": given, "dtype": x.dtype, "requires grad": grads,
        "temperature": plain(scoring.temperature), "softcap": plain(scoring.softcap), "entropy": scoring.entropy,
        "bias": bias is not None,
    }  # fmt: skip
    name = "token scores of a sharded vocabulary"
    compare = compare_sums(name, facts, mesh, of=x, sizes=("[tokens, hidden size]", sizes), amount=amount)
    # A rank does not know the others' rows. `full` and `cumsum` keep the answer on the device.
    rank, size = mesh.get_local_rank(), mesh.size()
    counts = labels.new_zeros(size)
    counts[rank : rank + 1] = rows
    (counts,) = compared((counts,), compare)
    counts = failure.all_reduce(counts, "sum", mesh, "rows of the vocabulary")
    check_labels(labels, counts.sum())
    return counts[:rank].sum(), compare if grads and weight is not None else None

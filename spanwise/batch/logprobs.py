"""Log-probabilities and entropies of a shard's tokens: what policy gradients, DPO and evaluation compute with."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention._limits import check_transforms
from spanwise.attention.compare import compare_backward, tells_refusals
from spanwise.batch import vocabulary
from spanwise.batch.loss import check_labels
from spanwise.batch.token_scores import Scoring, Tokens, score


@overload
def token_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = ...,
    entropy: Literal[False] = ...,
    vocab_weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    vocab_mesh: DeviceMesh | None = ...,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> torch.Tensor: ...
@overload
def token_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = ...,
    entropy: Literal[True],
    vocab_weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    vocab_mesh: DeviceMesh | None = ...,
    softcap: float | None = ...,
    chunk: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@tells_refusals("vocab_mesh")
def token_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    vocab_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    vocab_mesh: DeviceMesh | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label, on this rank's tokens; differentiable.

    A token's result depends on that token alone, so `unshard` puts the shards of all ranks into the global order.
    Nothing is communicated, except over `vocab_mesh`. Nothing is scaled: if reducers average parameter gradients over
    ``n`` ranks, multiply a rank's loss by ``n`` and divide it by a global count.

    Args:
        logits: ``[…, V]``, any floating dtype; with a `vocab_weight`, hidden states ``[…, D]``. Computed in float32 at
            least.
        labels: int64 ``[…]``, shifted as `shard_batch` does. −100 is ignored: result 0 and gradient 0, whatever the
            logits hold.
        temperature: logits are divided by it, after the `softcap`.
        entropy: also return the entropy of each token's distribution.
        vocab_weight: ``[V, D]``, the weight of the last linear layer. The logits of one chunk of tokens exist at a
            time, in the forward and in the backward, which computes them again.
        bias: ``[V]``, of that layer.
        vocab_mesh: 1-D mesh of the ranks that share the vocabulary (tensor parallelism) and hold the same tokens. Each
            gives its rows of `vocab_weight` (or columns of `logits`) and `bias`, in the order of ranks, any number of
            them; or a DTensor ``Shard(0)`` on that mesh. All ranks get the same result, and the whole gradient of
            hidden states.
        softcap: logits are ``softcap * tanh(logits / softcap)``; with `vocab_weight` only.
        chunk: tokens of a chunk; default: about 2^24 logits, 64 MiB.

    Returns:
        Log-probabilities ``[…]``, float32 at least; with `entropy` a pair, log-probabilities and entropies (in nats; 0
        for ignored labels).

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit; labels outside the vocabulary, on the CPU (elsewhere
            their log-probability is −inf).
        NotImplementedError: second or forward-mode derivatives, and transforms of `torch.func`.
        spanwise.MismatchError: ranks of `vocab_mesh` make different calls.
        spanwise.ExchangeError: a rank of `vocab_mesh` is gone or too late.

    >>> import torch, spanwise
    >>> spanwise.token_logprobs(torch.zeros(1, 3, 8), torch.tensor([[2, -100, 5]]))
    tensor([[-2.0794,  0.0000, -2.0794]])
    """
    if softcap is not None and vocab_weight is None:
        raise ValueError(f"softcap {softcap} needs vocab_weight: a model's logits are capped already")
    scoring = Scoring(temperature, softcap, entropy, chunk, vocab_mesh)
    logprobs, entropies = scored(checked(logits, labels, vocab_weight, bias, scoring), scoring, "token_logprobs")
    return (logprobs, entropies) if entropy else logprobs


def scored(
    tokens: Tokens, scoring: Scoring, caller: str, amount: float | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, of the tokens that `checked` gives, in the shape of the labels.

    `caller` and `amount` as in `vocabulary.offset_of`.
    """
    mesh = None if scoring.mesh is None or scoring.mesh.size() == 1 else scoring.mesh
    offset, compare = vocabulary.offset_of(tokens, mesh, scoring, caller, amount)
    logprobs, entropies = score(tokens, offset, scoring._replace(mesh=mesh))
    # Entropies that nobody asked for get no gradient.
    logprobs, *rest = compare_backward((logprobs, entropies) if scoring.entropy else (logprobs,), compare)
    return logprobs, rest[0] if rest else entropies


def checked(
    x: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scoring: Scoring,
) -> Tokens:
    """The tokens, with this rank's rows of `weight` and `bias`.

    Raises:
        ValueError: they do not fit together, or to `labels`; a number that is not usable.
        NotImplementedError: a transform of `torch.func`.
    """
    scoring.check()
    check_transforms(*(t for t in (x, weight, bias) if t is not None))
    vocabulary.check_plain(labels=labels, **{"logits" if weight is None else "hidden": x})
    if weight is not None:
        weight = vocabulary.local_rows(weight, "vocab_weight", scoring.mesh)
    if bias is not None:
        bias = vocabulary.local_rows(bias, "bias", scoring.mesh)
        if weight is None:
            raise ValueError("bias needs vocab_weight: a model's logits contain it already")
    name, size = ("logits", "vocab") if weight is None else ("hidden", "D")
    if x.shape[:-1] != labels.shape or x.dim() == 0:
        raise ValueError(
            f"{name} must be [*labels.shape, {size}], got {name} {tuple(x.shape)} and labels {tuple(labels.shape)}"
        )
    check_labels(labels)
    if weight is not None and (weight.dim() != 2 or weight.shape[1] != x.shape[-1]):
        raise ValueError(f"vocab_weight must be [vocab, {x.shape[-1]}] for hidden {tuple(x.shape)}, got "
                         f"{tuple(weight.shape)}")  # fmt: skip
    if bias is not None and weight is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}] for vocab_weight {tuple(weight.shape)}, got "
                         f"{tuple(bias.shape)}")  # fmt: skip
    for what, t in ((name, x), ("vocab_weight", weight), ("bias", bias)):
        if t is not None and not t.is_floating_point():
            raise ValueError(f"{what} must be floating point, got {t.dtype}")
        if t is not None and t.device != labels.device:
            raise ValueError(f"{what} and labels must be on one device, got {t.device} and {labels.device}")
    return Tokens(x, labels, weight, bias)

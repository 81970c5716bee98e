"""verify: one short batch through a user's model, document by document and cut; outputs and gradients compared."""

# N tokens that are kept, T of them this rank's, V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import spanwise
from spanwise.attention.verify import gradients, parameters_of, summed, whole
from spanwise.integrations.transformers.batches import ARGUMENT, DESCRIPTIONS, Batch, Documents, find_documents
from spanwise.integrations.transformers.inputs import prepare, site_of

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "mm_token_type_ids")
_TEXT = {*_TOKENS, "attention_mask", "tree", "label_weights", "labels", "shift_labels", *DESCRIPTIONS}


def verify(
    model: Any, batch: Batch, *, plan: spanwise.Plan | None = None, tolerance: float | None = None, seed: int = 0
) -> spanwise.VerifyReport:
    """Compare a model under context parallelism with itself on one device, on one short batch.

    Every rank of the loss mesh calls it with the same batch. The model runs in evaluation mode, each document alone
    and then the batch cut. Logits and the gradients of all parameters along a random direction are compared: a document
    that reads another one differs. A batch with images is compared with the whole batch, padded as it is, because its
    images cannot be told apart by document.

    Args:
        model: after `context_parallel`; also under FSDP2. Gradients that it holds are put back.
        batch: as `prepare` takes it; a few hundred tokens are enough.
        plan: as in `prepare`.
        tolerance: largest error, relative to the largest value; default: 1e-4 in float32, 8e-2 in bfloat16.
        seed: of the random direction.

    Returns:
        A `spanwise.VerifyReport`: errors of "logits" and "parameters".

    Raises:
        ValueError: a batch that `prepare` refuses.
    """
    site = site_of(model)
    documents = find_documents(batch)
    given = {n: x for n, x in batch.items() if n not in ("labels", "shift_labels", "label_weights")}
    arguments = prepare(given, model, plan)
    local = arguments[ARGUMENT].plan
    parameters = parameters_of(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.enable_grad():
            logits = _alone(model, given, documents)
            direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)).to(logits)
            wanted = gradients(model, logits, direction, parameters)
            cut = _logits(model, arguments)
            got = gradients(model, cut, spanwise.shard(local, x=direction), parameters)
            joined, logits = spanwise.unshard(local, x=cut.detach()), logits.detach()
            wrong = (joined - logits).abs().max() / logits.abs().max().clamp(min=1e-30)
            errors = {"logits": wrong.item(), "parameters": _gradient_error(got, wanted, site.mesh)}
    finally:
        for module, training in modes.items():
            module.training = training
    limit = _TOLERANCES[logits.dtype] if tolerance is None else tolerance
    return spanwise.VerifyReport(errors, limit, (), (), ())


def _logits(model: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    logits = model(**{ARGUMENT: None, **arguments}).logits
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _alone(model: Any, batch: Batch, documents: Documents) -> torch.Tensor:
    """Logits ``[1, N, V]`` of the kept tokens, from one forward a document."""
    if not set(batch) <= _TEXT:
        whole = {n: x for n, x in batch.items() if n not in DESCRIPTIONS} | {"use_cache": False}
        return documents.flat(_logits(model, whole))
    tokens = {n: batch[n] for n in _TOKENS if batch.get(n) is not None}
    flat = {n: documents.flat(x, x.dim() - 2 if n == "position_ids" else 0) for n, x in tokens.items()}
    done, parts, order = np.zeros(documents.cu_seqlens[-1], bool), [], []
    tree, offsets = documents.tree, documents.cu_seqlens
    paths = np.split(np.arange(offsets[-1]), offsets[1:-1]) if tree is None else tree.paths(tree.leaves)
    for path in paths:
        one = {n: x[..., path] if n != "inputs_embeds" else x[:, path] for n, x in flat.items()}
        fresh = ~done[path]  # paths of a tree share prefixes
        parts.append(_logits(model, one | {"use_cache": False})[:, torch.from_numpy(fresh)])
        order.append(path[fresh])
        done[path] = True
    return torch.cat(parts, dim=1)[:, torch.from_numpy(np.argsort(np.concatenate(order)))]


def _gradient_error(got: list[torch.Tensor], want: list[torch.Tensor], mesh: DeviceMesh) -> float:
    """The largest relative error of a parameter's gradient by norm, with vanishing ones on the scale of the largest."""
    norms = [whole(x).norm().item() for x in want]
    floor = max(1e-3 * max(norms, default=0.0), 1e-30)
    wrong = [(summed(x, mesh) - whole(y)).norm().item() for x, y in zip(got, want, strict=True)]
    return max((error / max(norm, floor) for error, norm in zip(wrong, norms, strict=True)), default=0.0)

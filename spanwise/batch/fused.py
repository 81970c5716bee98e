"""Fused kernels of other libraries for `linear_cross_entropy` on CUDA devices, imported when first used.

They have not run here on a GPU: tests replace the libraries by stand-ins with the same signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.batch.loss import IGNORE_INDEX
from spanwise.batch.token_scores import Tokens

#: Type of the devices that the kernels run on.
DEVICE = "cuda"

#: ``(tokens, softcap, reduction) -> losses``
Fused = Callable[..., torch.Tensor]


def resolve(kernel: str, tokens: Tokens, reduction: str, vocab_mesh: DeviceMesh | None) -> Fused | None:
    """The library's kernel to call, or None for spanwise's own code.

    Raises:
        ValueError: no kernel of that name, or it cannot do what is asked.
        ImportError: the named kernel's library is not installed.
    """
    if kernel not in ("auto", "chunked", *_LIBRARIES):
        raise ValueError(f'kernel must be "auto", "chunked", {", ".join(map(repr, _LIBRARIES))}, got {kernel!r}')
    if kernel == "chunked":
        return None
    if kernel == "auto":
        fits = (name for name in _LIBRARIES if why_not(name, tokens, reduction, vocab_mesh) is None and installed(name))
        kernel = next(fits, "chunked")
        if kernel == "chunked":
            return None
    elif reason := why_not(kernel, tokens, reduction, vocab_mesh):
        raise ValueError(f'kernel "{kernel}" {reason}; use kernel="chunked"')
    elif not installed(kernel):
        raise ImportError(f'kernel "{kernel}" needs the package {_LIBRARIES[kernel][0]}, which is not installed')
    return _LIBRARIES[kernel][1] if tokens.x.numel() else None  # a grid of no blocks cannot be launched


def installed(name: str) -> bool:
    """Whether the library of a kernel can be imported; imports only its outermost package's spec."""
    return importlib.util.find_spec(_LIBRARIES[name][0]) is not None


def why_not(name: str, tokens: Tokens, reduction: str, vocab_mesh: DeviceMesh | None) -> str | None:
    """Why a kernel cannot do what is asked, or None."""
    hidden, _, weight, _ = tokens
    assert weight is not None
    if hidden.device.type != DEVICE:
        return f"needs a {DEVICE} device, got hidden on {hidden.device}"
    if vocab_mesh is not None and vocab_mesh.size() > 1:
        return f"needs the whole vocabulary, got one shared by {vocab_mesh.size()} ranks"
    dtype = _dtype(hidden, weight)
    if dtype == torch.float64:
        return "has no float64"
    if name == "cce" and dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got hidden {hidden.dtype} and vocab_weight {weight.dtype}"
    if name == "liger" and reduction == "none":
        return 'has no gradients for reduction "none" in all its versions'
    return None


def _dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Dtype that the kernel gets: autocast's, or that of both inputs."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return torch.promote_types(hidden.dtype, weight.dtype)


def _liger(tokens: Tokens, softcap: float | None, reduction: str) -> torch.Tensor:
    """Sum of losses by ``liger_fused_linear_cross_entropy``, with the weight's gradient summed in float32."""
    library = importlib.import_module("liger_kernel.transformers.functional")
    x, w, b = _cast(tokens)
    with torch.autocast(x.device.type, enabled=False):
        loss = library.liger_fused_linear_cross_entropy(
            x.flatten(0, -2), w, tokens.labels.flatten(), bias=b, ignore_index=IGNORE_INDEX, reduction="sum",
            softcap=softcap, accum_dtype=torch.float32,
        )  # fmt: skip
    return loss.float()


def _cce(tokens: Tokens, softcap: float | None, reduction: str) -> torch.Tensor:
    """Losses by ``linear_cross_entropy`` of cut-cross-entropy, whose "cce_exact" leaves no small gradient out."""
    library = importlib.import_module("cut_cross_entropy")
    x, w, b = _cast(tokens)
    with torch.autocast(x.device.type, enabled=False):
        losses = library.linear_cross_entropy(
            x, w, tokens.labels, bias=b, ignore_index=IGNORE_INDEX, softcap=softcap,
            reduction="none" if reduction == "none" else "sum", impl="cce_exact",
        )  # fmt: skip
    return losses.float()


def _cast(tokens: Tokens) -> list[Any]:
    """Hidden states, weight and bias as the kernels take them."""
    hidden, _, weight, bias = tokens
    assert weight is not None
    dtype = _dtype(hidden, weight)
    return [None if t is None else t.to(dtype).contiguous() for t in (hidden, weight, bias)]


#: Package and function of each kernel, in the order in which "auto" tries them.
_LIBRARIES: dict[str, tuple[str, Fused]] = {"cce": ("cut_cross_entropy", _cce), "liger": ("liger_kernel", _liger)}

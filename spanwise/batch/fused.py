"""Fused kernels of other libraries for `linear_cross_entropy` on CUDA devices, imported when first used.

They have not run here on a GPU: tests replace the libraries by stand-ins with the same signatures.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.batch.loss import IGNORE_INDEX
from spanwise.batch.token_scores import Tokens

#: Type of the devices that the kernels run on.
DEVICE = "cuda"

#: Package of each kernel, in the order in which "auto" tries them.
_PACKAGES = {"cce": "cut_cross_entropy", "liger": "liger_kernel"}


def resolve(kernel: str, tokens: Tokens, reduction: str, vocab_mesh: DeviceMesh | None) -> str | None:
    """Name of the library's kernel to call, or None for spanwise's own code.

    Raises:
        ValueError: no kernel of that name, or it cannot do what is asked.
        ImportError: the named kernel's library is not installed.
    """
    if kernel not in ("auto", "chunked", *_PACKAGES):
        raise ValueError(f'kernel must be "auto", "chunked", {", ".join(map(repr, _PACKAGES))}, got {kernel!r}')
    for name, package in _PACKAGES.items():
        if kernel not in ("auto", name):
            continue
        reason = _why_not(name, tokens, reduction, vocab_mesh)
        installed = importlib.util.find_spec(package) is not None
        if kernel == name and reason:
            raise ValueError(f'kernel "{kernel}" {reason}; use kernel="chunked"')
        if kernel == name and not installed:
            raise ImportError(f'kernel "{kernel}" needs the package {package}, which is not installed')
        if installed and not reason:
            return name if tokens.x.numel() else None  # a grid of no blocks cannot be launched
    return None


def losses(kernel: str, tokens: Tokens, softcap: float | None, reduction: str) -> torch.Tensor:
    """Losses in float32: each token's for ``"none"`` (cce only), else their sum.

    Liger sums the weight's gradient in float32; "cce_exact" leaves no small gradient out.
    """
    dtype, labels = _dtype(tokens), tokens.labels
    x, w, b = (None if t is None else t.to(dtype).contiguous() for t in (tokens.x, tokens.weight, tokens.bias))
    assert x is not None
    options = {"bias": b, "ignore_index": IGNORE_INDEX, "softcap": softcap}
    with torch.autocast(x.device.type, enabled=False):
        if kernel == "cce":
            library = importlib.import_module("cut_cross_entropy")
            reduction = "none" if reduction == "none" else "sum"
            return library.linear_cross_entropy(x, w, labels, reduction=reduction, impl="cce_exact", **options).float()
        library = importlib.import_module("liger_kernel.transformers.functional")
        return library.liger_fused_linear_cross_entropy(
            x.flatten(0, -2), w, labels.flatten(), reduction="sum", accum_dtype=torch.float32, **options
        ).float()


def _why_not(name: str, tokens: Tokens, reduction: str, vocab_mesh: DeviceMesh | None) -> str | None:
    """Why a kernel cannot do what is asked, or None."""
    hidden, weight, dtype = tokens.x, tokens.weight, _dtype(tokens)
    assert weight is not None
    if hidden.device.type != DEVICE:
        return f"needs a {DEVICE} device, got hidden on {hidden.device}"
    if vocab_mesh is not None and vocab_mesh.size() > 1:
        return f"needs the whole vocabulary, got one shared by {vocab_mesh.size()} ranks"
    if dtype == torch.float64:
        return "has no float64"
    if name == "cce" and dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got hidden {hidden.dtype} and vocab_weight {weight.dtype}"
    if name == "liger" and reduction == "none":
        return 'has no gradients for reduction "none" in all its versions'
    return None


def _dtype(tokens: Tokens) -> torch.dtype:
    """Dtype that the kernel gets: autocast's, or that of both inputs."""
    hidden, weight = tokens.x, tokens.weight
    assert weight is not None
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return torch.promote_types(hidden.dtype, weight.dtype)

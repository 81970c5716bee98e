"""Fused kernels of other libraries for `linear_cross_entropy` on CUDA devices, imported when first used.

They have not run here on a GPU: tests replace the libraries by stand-ins with the same signatures.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from spanwise.batch.token_scores import IGNORE_INDEX

#: Type of the devices that the kernels run on.
DEVICE = "cuda"

#: Package of each kernel, in the order in which "auto" tries them.
_PACKAGES = {"cce": "cut_cross_entropy", "liger": "liger_kernel"}


def losses(
    kernel: str, x: torch.Tensor, labels: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, *,
    softcap: float | None, each: bool, ranks: int,
) -> torch.Tensor | None:  # fmt: skip
    """Losses in float32 by a library's kernel, their sum or `each`; None where spanwise's own code computes them.

    Liger sums the weight's gradient in float32; "cce_exact" leaves no small gradient out.

    Args:
        x, labels, w, b: as `linear_cross_entropy` takes them.
        ranks: that share the vocabulary.

    Raises:
        ValueError: no kernel of that name, or it cannot do what is asked.
        ImportError: the named kernel's library is not installed.
    """
    if kernel not in ("auto", "chunked", *_PACKAGES):
        raise ValueError(f'kernel must be "auto", "chunked", {", ".join(map(repr, _PACKAGES))}, got {kernel!r}')
    device = x.device.type
    dtype = torch.promote_types(x.dtype, w.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    for name, package in _PACKAGES.items():
        if kernel not in ("auto", name):
            continue
        why_not = {
            f"needs a {DEVICE} device, got hidden on {x.device}": device != DEVICE,
            f"needs the whole vocabulary, got one shared by {ranks} ranks": ranks > 1,
            f"takes no {dtype}": dtype not in (torch.bfloat16, torch.float16, *[torch.float32] * (name == "liger")),
            'has no gradients for reduction "none" in all its versions': name == "liger" and each,
        }
        reasons = [reason for reason, holds in why_not.items() if holds]
        if reasons and kernel == name:
            raise ValueError(f'kernel "{kernel}" {reasons[0]}; use kernel="chunked"')
        if not reasons and importlib.util.find_spec(package) is not None:
            break
        if kernel == name:
            raise ImportError(f'kernel "{kernel}" needs the package {package}, which is not installed')
    else:
        return None
    if not x.numel():
        return None  # a grid of no blocks cannot be launched
    x, w = x.to(dtype).contiguous(), w.to(dtype).contiguous()
    options = {"bias": None if b is None else b.to(dtype), "ignore_index": IGNORE_INDEX, "softcap": softcap}
    with torch.autocast(device, enabled=False):
        if name == "cce":
            library = importlib.import_module("cut_cross_entropy")
            reduction = "none" if each else "sum"
            return library.linear_cross_entropy(x, w, labels, reduction=reduction, impl="cce_exact", **options).float()
        library = importlib.import_module("liger_kernel.transformers.functional")
        return library.liger_fused_linear_cross_entropy(
            x.flatten(0, -2), w, labels.flatten(), reduction="sum", accum_dtype=torch.float32, **options
        ).float()

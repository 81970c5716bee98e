"""The table of kernels, and how an argument `kernel` becomes a `Kernel`."""

from __future__ import annotations

import torch

from spanwise.attention.kernels.base import Kernel, ScoreMod
from spanwise.attention.kernels.flex import Flex
from spanwise.attention.kernels.reference import Reference
from spanwise.attention.kernels.sdpa import Sdpa
from spanwise.attention.kernels.varlen import Varlen

KERNELS: dict[str, Kernel] = {"reference": Reference(), "sdpa": Sdpa(), "flex": Flex(), "varlen": Varlen()}


def resolve(kernel: str | Kernel, device: torch.device, score_mod: ScoreMod | None = None) -> Kernel:
    """The kernel to run on ``device``.

    "auto" is "flex" on CUDA. On the CPU it is "sdpa", or "reference" (dense) with a `score_mod`, which "sdpa" cannot
    apply.

    Args:
        kernel: "auto", a name in `KERNELS`, or a `Kernel` of the user.

    Raises:
        ValueError: unknown name, or a kernel that does not run on the device or cannot apply a `score_mod`.

    >>> resolve("auto", torch.device("cpu")).name
    'sdpa'
    """
    if kernel == "auto" and device.type not in ("cuda", "cpu"):
        raise ValueError(f"no kernel was tested on device {device}; name one: kernel='reference' runs anywhere")
    if kernel == "auto" and device.type == "cpu" and score_mod is not None:
        return KERNELS["reference"]
    chosen = find(kernel, device)
    chosen.check_device(device, score_mod)
    return chosen


def find(kernel: str | Kernel, device: torch.device) -> Kernel:
    """The kernel for whose tables a rank plan is built: `resolve` without its checks and without a score_mod."""
    if isinstance(kernel, Kernel):
        return kernel
    if kernel == "auto":
        return KERNELS["flex" if device.type == "cuda" else "sdpa"]
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; choose one of {['auto', *KERNELS]}, or give a Kernel")
    return KERNELS[kernel]

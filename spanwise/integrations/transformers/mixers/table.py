"""Which modules of transformers carry something along the sequence, and what their forward calls for that."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from spanwise.integrations.transformers.masks import MIXED, layer_types
from spanwise.integrations.transformers.mixers import forwards, functions
from spanwise.integrations.transformers.mixers.forward import WHOLE, PlannedForward, pass_as_mask

# Class names of mixers whose forward calls functions of its file for all that crosses tokens.
_CALLERS = frozenset([
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet",
    "KimiLinearDeltaAttention", "BailingHybridDeltaAttention", "Mamba2Mixer", "BambaMixer", "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "Zamba2MambaMixer", "MambaMixer", "FalconMambaMixer",
    "JambaMambaMixer", "ZambaMambaMixer", "Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv",
])  # fmt: skip
# What replaces these functions: convolutions, scans, and fused kernels, which are left out.
_CONVOLUTION: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": functions.causal_conv1d}
_SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": functions.delta_rule,
    "chunk_kimi_delta_attention": functions.delta_rule,
    "mamba2_chunk_scan": functions.mamba2_chunk_scan,
    "mamba_selective_scan": functions.mamba_selective_scan,
}
_FUSED = dict.fromkeys(("mamba2_split_conv1d_scan_combined", "mamba_inner_fn"), functions.none)
# Class names of mixers that compute in their own code, and what replaces their forward.
_WHOLE: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": forwards.lightning_attention,
    "RecurrentGemmaRecurrentBlock": forwards.griffin,
}
# Class names of other modules that carry something along the sequence.
_UNKNOWN = ("RwkvSelfAttention", "xLSTMBlock", "ZayaCCAProjection", "FNetFourierTransform")
_BEHIND = ("JambaMambaMixer",)  # layers of these do not pass keyword arguments on


def attach(decoder: nn.Module, config: Any) -> list[PlannedForward]:
    """Let the mixers of `decoder` take plans; their forwards, in the order of its modules.

    Raises:
        ValueError: layers that carry a state in a way that is not known.
    """
    found = {name: module for name, module in decoder.named_modules() if _functions(module) is not None}
    _check(decoder, config, found)
    forwards = []
    for name, module in found.items():
        forward = PlannedForward(module, _functions(module) or {})
        module.forward = forward  # of this instance
        if type(module).__name__ in _BEHIND:
            pass_as_mask(decoder.get_submodule(name.rpartition(".")[0]))
        forwards.append(forward)
    return forwards


def check_known(decoder: nn.Module) -> None:
    """Raise ValueError for modules of which is known that nothing here replaces them."""
    names = {cls.__name__ for module in decoder.modules() for cls in type(module).__mro__}
    unknown = [name for name in _UNKNOWN if name in names]
    if unknown:
        raise ValueError(
            f"{type(decoder).__name__} carries a state along the sequence in {unknown[0]}, which context parallelism "
            f"does not take; train it with data parallelism, or take a model with one of {', '.join(sorted(_CALLERS))}"
        )


def conv_width(mixers: list[PlannedForward]) -> int | None:
    """The largest width of a convolution in `mixers`; None without any of them."""
    widths = [c.kernel_size[0] for mixer in mixers for c in mixer.module.modules() if isinstance(c, nn.Conv1d)]
    return max(widths, default=1) if mixers else None


def _functions(module: nn.Module) -> Mapping[str, Callable[..., Any]] | None:
    """What replaces functions that the forward of `module` calls; None where it is not a mixer as it is known here."""
    names = [cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _CALLERS or cls.__name__ in _WHOLE]
    forward = inspect.unwrap(type(module).forward)
    if not names or not forward.__module__.startswith("transformers.models."):
        return None
    if names[0] in _WHOLE:
        return {WHOLE: _WHOLE[names[0]]}
    called = _CONVOLUTION.keys() | ({} if names[0].endswith("ShortConv") else _SCANS.keys() & forward.__code__.co_names)
    known = called <= set(forward.__code__.co_names) and (len(called) > 1 or names[0].endswith("ShortConv"))
    return _CONVOLUTION | _SCANS | _FUSED if known else None


def _check(decoder: nn.Module, config: Any, found: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for layers and convolutions that are not among `found`."""
    for module in found.values():
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of a {type(module).__name__} was replaced, as accelerate does for device_map; call "
                f"hf.context_parallel on a model whose modules are as they were loaded"
            )
    types, layers = layer_types(config), {int(n) for name in found for n in re.findall(r"^layers\.(\d+)\.", name)}
    unknown = {kind for index, kind in enumerate(types) if kind in MIXED and index not in layers}
    convolutions = [  # beside the layers are encoders of images and sound
        name
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Conv1d)
        and name.startswith("layers.")
        and not name.startswith(tuple(f"{one}." for one in found))
    ]
    if unknown or convolutions:
        what = f"layers of type {sorted(unknown)}" if unknown else f"a convolution, {convolutions[0]}"
        raise ValueError(
            f"{type(decoder).__name__} has {what}, in a module that context parallelism does not know to carry a state "
            f"along the sequence; it knows those of transformers 5.23: {', '.join(sorted(_CALLERS))}"
        )

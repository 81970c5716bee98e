"""Which modules of transformers carry something along the sequence, and what their forward calls for that."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from spanwise.integrations.transformers.masks import MIXED, layer_types
from spanwise.integrations.transformers.mixers import functions
from spanwise.integrations.transformers.mixers.forward import WHOLE, PlannedForward, plan_for_mask

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
    "MiniMaxLightningAttention": functions.lightning_attention,
    "RecurrentGemmaRecurrentBlock": functions.griffin,
}
# Class names of other modules that carry something along the sequence.
_UNKNOWN = ("RwkvSelfAttention", "xLSTMBlock", "ZayaCCAProjection", "FNetFourierTransform")
_BEHIND = ("JambaMambaMixer",)  # layers of these do not pass keyword arguments on


def attach(decoder: nn.Module, config: Any) -> list[PlannedForward]:
    """Let the mixers of `decoder` take plans; their forwards, in the order of its modules.

    Raises:
        ValueError: layers that carry a state in a way that is not known.
    """
    mixers = {name: PlannedForward(x, found) for name, x in decoder.named_modules() if (found := _functions(x))}
    _check(decoder, config, mixers)
    for name, mixer in mixers.items():
        mixer.module.forward = mixer  # of this instance
        if type(mixer.module).__name__ in _BEHIND:
            layer = decoder.get_submodule(name.rpartition(".")[0])
            layer.register_forward_pre_hook(plan_for_mask, with_kwargs=True)
    return list(mixers.values())


def check_known(decoder: nn.Module) -> None:
    """Raise ValueError for modules of which is known that nothing here replaces them."""
    names = {cls.__name__ for module in decoder.modules() for cls in type(module).__mro__}
    unknown = [name for name in _UNKNOWN if name in names]
    if unknown:
        raise ValueError(f"{unknown[0]} carries a state along the sequence; known are {sorted(_CALLERS)}")


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


def _check(decoder: nn.Module, config: Any, mixers: Mapping[str, PlannedForward]) -> None:
    """Raise ValueError for layers and convolutions that are not among `mixers`."""
    replaced = [type(mixer.module).__name__ for mixer in mixers.values() if "forward" in vars(mixer.module)]
    if replaced:
        raise ValueError(
            f"the forward of a {replaced[0]} was replaced, as by device_map; call hf.context_parallel before"
        )
    layers = {int(n) for name in mixers for n in re.findall(r"^layers\.(\d+)\.", name)}
    unknown = {kind for n, kind in enumerate(layer_types(config)) if kind in MIXED and n not in layers}
    convolutions = [name for name, module in decoder.named_modules() if isinstance(module, nn.Conv1d)]
    known = tuple(f"{name}." for name in mixers)  # beside the layers are encoders of images and sound
    strange = [name for name in convolutions if name.startswith("layers.") and not name.startswith(known)]
    if unknown or strange:
        what = f"layers of type {sorted(unknown)}" if unknown else f"a convolution, {strange[0]}"
        raise ValueError(
            f"{type(decoder).__name__} has {what}, in a module that is not known to carry a state; known are those of "
            f"transformers 5.23: {sorted(_CALLERS)}"
        )

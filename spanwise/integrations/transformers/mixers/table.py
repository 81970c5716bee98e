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

_CONV: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": functions.causal_conv1d}
_DELTA = _CONV | {"torch_chunk_gated_delta_rule": functions.delta_rule}
_KIMI_DELTA = _CONV | {"chunk_kimi_delta_attention": functions.delta_rule}
_MAMBA2 = _CONV | {
    "mamba2_chunk_scan": functions.mamba2_chunk_scan,
    "mamba2_split_conv1d_scan_combined": functions.none,
}
_MAMBA = _CONV | {"mamba_selective_scan": functions.mamba_selective_scan, "mamba_inner_fn": functions.none}

# Class names of mixers, and the functions of their files that are replaced in them.
_MIXERS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "KimiLinearDeltaAttention": _KIMI_DELTA,
    "BailingHybridDeltaAttention": _KIMI_DELTA,
    "Mamba2Mixer": _MAMBA2,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
    "MambaMixer": _MAMBA,
    "FalconMambaMixer": _MAMBA,
    "JambaMambaMixer": _MAMBA,
    "ZambaMambaMixer": _MAMBA,
    "Lfm2ShortConv": _CONV,
    "Lfm2MoeShortConv": _CONV,
    "Lfm3ShortConv": _CONV,
    "MiniMaxLightningAttention": {WHOLE: forwards.lightning_attention},
    "RecurrentGemmaRecurrentBlock": {WHOLE: forwards.griffin},
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
            f"does not take; train it with data parallelism, or take a model with one of {', '.join(_MIXERS)}"
        )


def conv_width(mixers: list[PlannedForward]) -> int | None:
    """The largest width of a convolution in `mixers`; None without any of them."""
    widths = [c.kernel_size[0] for mixer in mixers for c in mixer.module.modules() if isinstance(c, nn.Conv1d)]
    return max(widths, default=1) if mixers else None


def _functions(module: nn.Module) -> Mapping[str, Callable[..., Any]] | None:
    """What replaces functions that the forward of `module` calls; None where it is not a mixer as it is known here."""
    names = [cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _MIXERS]
    forward = inspect.unwrap(type(module).forward)
    if not names or not forward.__module__.startswith("transformers.models."):
        return None
    replaced = _MIXERS[names[0]]
    called = {WHOLE, *forward.__code__.co_names}
    return replaced if all(name in called or f is functions.none for name, f in replaced.items()) else None


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
            f"along the sequence; it knows those of transformers 5.23: {', '.join(_MIXERS)}"
        )

"""Layers that carry a state along the sequence: their mixers compute on shards, as for each document alone.

Mixers of transformers compute everything that crosses tokens in a few functions of their modeling file. The forward of
an instance becomes its class's own forward, rebuilt with other globals: those functions are replaced, everything else
is transformers' code. No class and no module changes.

Each replacement has the arguments of its namesake in the modeling files, behind the route of the batch, and returns
this rank's part of what its namesake returns.
"""

# T tokens of this rank, C channels, H heads, K key dim, V value dim, N state size

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

import spanwise
from spanwise import recurrence
from spanwise.integrations.transformers.batches import ARGUMENT, PlannedBatch, planned_of
from spanwise.integrations.transformers.masks import MIXED, layer_types
from spanwise.recurrence import RecurrenceRoute


def causal_conv1d(
    route: RecurrenceRoute, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """``[1, C, T]``: a convolution of each channel ``[C, width]`` over the tokens before in the document."""
    x = hidden_states[0].t().to(weight.dtype)
    out = recurrence.causal_conv(x, weight, bias, route).reshape(x.shape)  # compiled code sees then that T is the same
    out = out if activation is None else ACT2FN[activation](out)
    return out.t()[None].to(hidden_states.dtype)


def delta_rule(
    route: RecurrenceRoute, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """``[1, T, H, V]`` of the gated delta rule; with decays ``[1, T, H]`` a head, or ``[1, T, H, K]`` a channel."""
    assert kwargs.get("initial_state") is None and not kwargs.get("output_final_state")  # there is no cache
    q, k, v, decay, b = (x[0].float() for x in (query, key, value, g, beta))
    normalize = kwargs.get("use_qk_l2norm_in_kernel", False)
    out: Any = recurrence.gated_delta(q, k, v, decay, b, route, normalize=normalize)
    return out[None].to(query.dtype), None


def mamba2_chunk_scan(
    route: RecurrenceRoute, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, z: None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """``[1, T, H, V]`` in float32 of Mamba-2's scan, which is linear attention with one decay a head."""
    assert initial_states is None and not return_final_states and z is None
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0].float()
    x = hidden_states[0].float()
    out: Any = recurrence.gated_linear(C[0].float(), B[0].float(), x * dt[..., None], A.float() * dt, route, scale=1.0)
    return (out if D is None else out + D[..., None] * x)[None]


def mamba_selective_scan(
    route: RecurrenceRoute, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """``[1, C, T]`` of Mamba's scan: linear attention with a head for each channel and a decay for each of N states."""
    assert not return_last_state
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = functional.softplus(dt) if delta_softplus else dt
    x, step = hidden_states[0].t(), dt[0].t()  # [T, C]
    decay = A * step[..., None]  # [T, C, N]
    q, k = (y[0].t()[:, None].float() for y in (C, B))  # [T, 1, N]
    out: Any = recurrence.gated_linear(q, k, (step * x.float())[..., None], decay, route, scale=1.0)
    out = out[..., 0].to(x.dtype)
    out = (out if D is None else out + x * D).t()[None]
    return out if z is None else out * functional.silu(z)


def none(route: RecurrenceRoute, *args: Any, **kwargs: Any) -> None:
    """What fused kernels' namesakes return where there is no kernel: the mixer then takes its other path."""


def lightning_attention(
    route: RecurrenceRoute, module: Any, hidden_states: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """MiniMax: ``[1, T, hidden]``, linear attention with a constant decay a head."""
    qkv = module.act_fn(module.qkv_proj(hidden_states))[0]
    q, k, v = qkv.unflatten(-1, (module.num_attention_heads, 3 * module.head_dim)).chunk(3, dim=-1)
    decay = -module.slope_rate.flatten().to(torch.promote_types(v.dtype, torch.float32))
    out: Any = recurrence.gated_linear(q, k, v, decay, route, scale=1.0)
    out = module.norm(out.flatten(1)[None])
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), None


# What replaces functions that mixers call for all that crosses tokens: convolutions, scans, and fused kernels, which
# are left out. A mixer calls a convolution and a scan; a short convolution has no scan.
_CONVOLUTION: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": causal_conv1d}
_SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
}
_FUSED = dict.fromkeys(("mamba2_split_conv1d_scan_combined", "mamba_inner_fn"), none)
_FORWARD = "forward"  # in place of a name of a function: the forward itself
# Class names of mixers that compute in their own code, and what replaces their forward.
_WHOLE: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": lightning_attention}
_BEHIND = ("JambaMambaMixer",)  # layers of these do not pass keyword arguments on


class PlannedForward:
    """Its method `forward` is that of a mixer, an instance, whose functions know of ranks while a batch is planned."""

    def __init__(self, module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.module, self.functions = module, functions  # in place of those of its file, each with a route in front
        self.expected = False  # whether the decoder runs a planned batch, so that a call without a plan is an error
        self._route: RecurrenceRoute | None = None  # of the call that runs
        calls = {name: functools.partial(self._call, f) for name, f in functions.items()}
        self._planned = calls.get(_FORWARD) or with_globals(type(module).forward, calls)

    def __reduce__(self) -> Any:  # for copies and pickles: the rest belongs to this instance
        return PlannedForward, (self.module, self.functions)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        planned = mask if isinstance(mask, PlannedBatch) else kwargs.pop(ARGUMENT, None) or planned_of(mask)
        if planned is None:
            if self.expected:
                name = type(self.module).__name__
                raise ValueError(f"{name} was called without the plan of its batch; its model must pass keywords on")
            return type(self.module).forward(self.module, *args, **kwargs)
        kwargs["attention_mask"] = None  # there is no padding
        tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
        if planned.there is not None:
            assert planned.route is not None
            move = functools.partial(_moved, planned.there, planned.route.tokens.shape[0])
            args = (*(move(x) for x in args[:1]), *args[1:])
            kwargs |= {n: move(x) for n in ("hidden_states", "position_ids") if (x := kwargs.get(n)) is not None}
        self._route = planned.route
        try:
            output = self._planned(self.module, *args, **kwargs)
        finally:
            self._route = None
        if planned.back is None:
            return output
        first, *rest = output if isinstance(output, tuple) else (output,)
        first = _moved(planned.back, tokens, first)
        return (first, *rest) if isinstance(output, tuple) else first

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(ARGUMENT, None)
        return function(self._route, *args, **kwargs)


def _moved(route: spanwise.RelayoutRoute, tokens: int, x: Tensor) -> Tensor:
    """`x` ``[1, T, …]`` in the other layout, of which compiled code then knows that it has `tokens` tokens."""
    x = spanwise.relayout(x, route)
    torch._check(x.shape[1] == tokens)
    return x


def with_globals(function: Callable[..., Any], replaced: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of `function`, without its decorators, that sees `replaced` among its globals.

    >>> length = with_globals(lambda x: len(x) + 1, {"len": lambda x: 41})
    >>> length([])
    42
    """
    inner = inspect.unwrap(function)
    names = inner.__globals__ | dict(replaced)
    del names["__name__"]  # torch.compile looks up globals in the module of this name, where there is one
    copy = types.FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__, copy.__module__ = inner.__kwdefaults__, inner.__module__
    return copy


def attach(decoder: nn.Module, config: Any) -> list[PlannedForward]:
    """Let the mixers of `decoder` take plans; their forwards, in the order of its modules.

    Raises:
        ValueError: layers that carry a state in a way that is not known.
    """
    mixers = {name: PlannedForward(x, found) for name, x in decoder.named_modules() if (found := _functions(x))}
    layers = {int(n) for name in mixers for n in re.findall(r"^layers\.(\d+)\.", name)}
    known = tuple(f"{name}." for name in mixers)  # beside the layers are encoders of images and sound
    convolutions = [name for name, x in decoder.named_modules() if isinstance(x, nn.Conv1d)]
    what = [
        *(f"layers of type {x!r}" for n, x in enumerate(layer_types(config)) if x in MIXED and n not in layers),
        *(f"a convolution, {x}" for x in convolutions if x.startswith("layers.") and not x.startswith(known)),
    ]
    if what:
        name = type(decoder).__name__
        raise ValueError(f"{name} has {what[0]}, in a module that is not known to carry a state; use data parallelism")
    for name, mixer in mixers.items():
        module, kind = mixer.module, type(mixer.module).__name__
        if "forward" in vars(module):
            raise ValueError(f"the forward of a {kind} was replaced, as by device_map; call hf.context_parallel before")
        module.forward = mixer.forward  # a method: Dynamo shares graphs among layers whose code it is
        if kind in _BEHIND:
            layer = decoder.get_submodule(name.rpartition(".")[0])
            layer.register_forward_pre_hook(_plan_for_mask, with_kwargs=True)
    return list(mixers.values())


def _plan_for_mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook of layers that give their mixer a mask and no keyword arguments: the plan in place of the mask."""
    planned = kwargs.get(ARGUMENT)
    return None if planned is None else (args, kwargs | {"attention_mask": planned})


def conv_width(mixers: list[PlannedForward]) -> int | None:
    """The largest width of a convolution in `mixers`; None without any of them."""
    widths = [c.kernel_size[0] for mixer in mixers for c in mixer.module.modules() if isinstance(c, nn.Conv1d)]
    return max(widths, default=1) if mixers else None


def _functions(module: nn.Module) -> Mapping[str, Callable[..., Any]] | None:
    """What replaces functions that the forward of `module` calls; None where it is not a mixer as it is known here."""
    name, forward = type(module).__name__, inspect.unwrap(type(module).forward)
    if not forward.__module__.startswith("transformers.models."):
        return None
    if forward.__qualname__.partition(".")[0] in _WHOLE:
        return {_FORWARD: _WHOLE[forward.__qualname__.partition(".")[0]]}
    called = set(forward.__code__.co_names)
    known = _CONVOLUTION.keys() <= called and (name.endswith("ShortConv") or _SCANS.keys() & called)
    return _CONVOLUTION | _SCANS | _FUSED if known else None

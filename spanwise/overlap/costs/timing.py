"""Run and time a single node of an fx graph on this device, with made-up inputs.

    fx node ─► signature ─► trial ─► milliseconds ─► measure

Inputs have the shapes, strides and dtypes of ``meta["val"]``. Floats are between 0.1 and 1, integers valid indices.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.costs.flops import is_attention
from spanwise.overlap.fx import operators
from spanwise.overlap.fx.operators import COALESCED, MESSAGES, STARTS, Role, host_copy, nodes_in, tensors_in, tensors_of

_aten = torch.ops.aten

# Operators whose integer arguments are data, or indices into a dim of another argument: any small ones will do.
_INTEGERS_WELCOME = frozenset({
    _aten.amax, _aten.amin, _aten.any, _aten.argmax, _aten.cat, _aten.cumsum, _aten.embedding,
    _aten.embedding_dense_backward, _aten.gather, _aten.index, _aten.index_add, _aten.index_put, _aten.index_put_,
    _aten.index_select, _aten.nll_loss_backward, _aten.nll_loss_forward, _aten.scatter, _aten.scatter_add, _aten.sort,
    _aten.sum
})  # fmt: skip
_DRAWN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # torch draws random numbers of these
_WARM_UP = 2
_FLUSH_BYTES = 1 << 28  # more than the last-level cache of any GPU so far


class Call(NamedTuple):
    """An operator and its arguments, with fx nodes for tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def named(self) -> Iterator[tuple[str, Any]]:
        schema = getattr(self.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema else map(str, itertools.count())
        yield from zip(names, self.args, strict=False)
        yield from self.kwargs.items()

    def signature(self) -> str:
        """The call as text that is the same in every process.

        Tensors appear as dtype, shape and strides, and a hash of ``meta["known"]`` if there. Devices and process groups
        are left out.
        """
        given = [f"{name}={_described(value)}" for name, value in self.named() if name != "group_name"]
        return f"{self.target}({', '.join(given)})"


def calls(node: fx.Node) -> list[Call]:
    """The call of a node; for a coalesced collective, one call for each member."""
    if node.target not in COALESCED:
        return [Call(node.target, node.args, node.kwargs)]
    members: Any = node.args[0]
    return [Call(COALESCED[node.target], (member, *node.args[1:]), node.kwargs) for member in members]


def _described(value: Any) -> str:
    if isinstance(value, fx.Node):
        known = value.meta.get("known")
        text = _described(value.meta.get("val"))
        return text if known is None else f"{text}#{hashlib.sha256(known.cpu().numpy().tobytes()).hexdigest()[:16]}"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.layout is not torch.strided:
            return f"{dtype}{list(value.shape)} {value.layout}"
        return f"{dtype}{list(value.shape)}" + ("" if value.is_contiguous() else f"/{list(value.stride())}")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return "" if isinstance(value, torch.device) else str(value)


def why_not(node: fx.Node) -> str | None:
    """The reason why a node cannot run alone on made-up inputs; None if it can."""
    known = operators.traits(node)
    if not isinstance(node.target, _torch.OpOverload):
        return "it calls no operator"
    if known.role is Role.BARRIER:
        return "it does more than compute from its arguments"
    if node.target in MESSAGES:
        return "it needs its peer"
    if host_copy(node):
        return "it is a copy to or from the host"
    given = [(arg, tensor) for arg in node.all_input_nodes for tensor in tensors_of(arg)]
    sizes = [size for _, tensor in given for size in tensor.shape]
    sizes += [arg.meta["val"] for arg in node.all_input_nodes if not tensors_of(arg) and "val" in arg.meta]
    if any(type(size) is not int for size in sizes):
        return "its sizes are not known"
    if any(tensor.layout is not torch.strided for _, tensor in given):
        return "it takes tensors that are not strided"
    welcome = known.pointwise or node.target.overloadpacket in _INTEGERS_WELCOME
    torchs = node.target.namespace == "aten" and is_attention(node)  # integers are seeds of an unused dropout
    for arg, tensor in given:
        if not (tensor.is_floating_point() or tensor.is_complex() or welcome or torchs or "known" in arg.meta):
            return f"its work depends on the integers in {arg.name!r}, which are not known"
    return None


def trial(call: Call, device: torch.device) -> Callable[[], Any]:
    """A function that runs `call` on made-up inputs on `device`; a collective is started and waited for."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[fx.Node, Any] = {}
    # Integers below the smallest dim of all tensors that may be indexed are valid indices.
    tensors = [t for n in nodes_in([call.args, dict(call.kwargs)]) for t in tensors_of(n)]
    indexed = [t for t in tensors if t.is_floating_point() or t.is_complex()] or tensors
    sizes = [size for t in indexed for size in t.shape]
    sizes += [value for name, value in call.named() if name == "num_weights" and isinstance(value, int)]
    limit = max(1, min(sizes, default=1))

    def draw(like: Any) -> Any:
        return _made_up(like, device, limit, generator) if isinstance(like, torch.Tensor) else like

    def given(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if not isinstance(value, fx.Node):
            return value
        if value not in made:
            known = value.meta.get("known")
            made[value] = known.to(device) if known is not None else _torch.tree_map(draw, value.meta.get("val"))
        return made[value]

    args, kwargs = fx.node.map_aggregate((call.args, dict(call.kwargs)), given)
    if call.target in STARTS:
        return lambda: [_torch.wait(x) for x in tensors_in(call.target(*args, **kwargs))]
    return lambda: call.target(*args, **kwargs)


def _made_up(like: torch.Tensor, device: torch.device, limit: int, generator: torch.Generator) -> torch.Tensor:
    # Drawn as it lies in memory: an expanded dim has one element there.
    held = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    held = held if like.numel() else 0
    if like.is_floating_point() or like.is_complex():
        dtype = like.dtype if like.dtype in _DRAWN else torch.float32
        flat = torch.empty(held, dtype=dtype, device=device).uniform_(0.1, 1, generator=generator).to(like.dtype)
    else:
        top = min(limit, 2 if like.dtype is torch.bool else torch.iinfo(like.dtype).max)
        flat = torch.randint(top, (held,), device=device, generator=generator).to(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of `repeats` calls, after two warm-up calls.

    On CUDA the time between two events, after a write larger than the cache. The write evicts the call's inputs, and
    keeps the device busy while the call is launched, so launching is not counted.
    """
    if device.type != "cuda":
        samples = []
        for _ in range(_WARM_UP + repeats):
            began = time.perf_counter()
            call()
            samples.append(1e3 * (time.perf_counter() - began))
        return statistics.median(samples[_WARM_UP:])
    with torch.cuda.device(device):
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for _ in range(_WARM_UP):
            call()
        for before, after in pairs:
            flush.zero_()
            before.record()
            call()
            after.record()
        torch.cuda.synchronize(device)
        return statistics.median(before.elapsed_time(after) for before, after in pairs)

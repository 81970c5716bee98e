"""What must be equal in the calls of all ranks, and the comparison of each call, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.exchange import failure
from spanwise.attention.exchange.expectation import Call
from spanwise.attention.kernels.base import AttentionOptions, Kernel
from spanwise.attention.rank_plan import RankPlan, mesh_ranks


class _Compiled(NamedTuple):
    """A call in a compiled graph: the result of its `compare_call`, and arguments for that of its backward."""

    plan: torch.Tensor
    groups: str
    name: str
    what: str


Compare = Callable[[], None] | _Compiled

_ATTENTION = (
    "mask", "kernel", "dtype", "[batch, heads, head dim] of q", "[heads, head dim] of v", "requires grad", "scale",
    "softcap", "score_mod", "sinks", "returns",
)  # fmt: skip
_GATHER = ("side", "dtype", "rows", "requires grad")
_RELAYOUT = ("dtype", "features of a token", "requires grad")
_RECURRENCE = ("dtypes", "shapes of a token", "requires grad", "options")
# Compiled code names sizes apart, so that they may be symbols; the labels of the other values and of the sizes.
_COMPILED = {
    "context_parallel_attention": ("mask, kernel, dtype, …", "[batch, heads of q and k, head dims of q and v]"),
    "unshard or roll": ("side, dtype, requires grad", "rows"),
    "relayout": ("dtype, requires grad", "features of a token"),
}
_COMPILED_RECURRENCE = ("dtypes, requires grad, options", "shapes of a token")

_library = torch.library.Library("spanwise", "FRAGMENT")
# The first returns a copy of `plan`, for the second. That depends on a gradient, and so on nothing in a forward graph;
# the plan itself in both would let torch put both comparisons into both graphs.
_library.define("compare_call(Tensor plan, str groups, str name, str what, SymInt[] sizes) -> Tensor")
_library.define("compare_backward(Tensor grad, Tensor plan, str groups, str name, str what) -> ()")
_torch.mark_effectful(torch.ops.spanwise.compare_call.default)
_torch.mark_effectful(torch.ops.spanwise.compare_backward.default)


def compare_attention(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    local: RankPlan,
    mesh: DeviceMesh | None,
    kernel: Kernel,
    mask: str,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    returns: tuple[bool, bool],
) -> Compare | None:
    """Compare an attention call across the ranks of `mesh`; returns when its collectives may start.

    Args:
        returns: whether lse and max_logit are returned.

    Returns:
        an argument for `compare_backward`; None if the call is not compared.

    Raises:
        MismatchError: ranks make different calls.
        ExchangeError: a rank is gone or too late.
    """
    if mesh is None or local.num_ranks == 1:
        return None
    q, k, v = tensors
    batch, q_heads, _, head_dim = q.shape
    _, kv_heads, _, v_dim = v.shape
    scale, mod = options.scale, options.score_mod
    values: tuple[Any, ...] = (
        mask, kernel.name, q.dtype, (batch, q_heads, head_dim), (kv_heads, v_dim), _grads(q, k, v),
        head_dim**-0.5 if scale is None else _plain(scale), _plain(options.softcap),
        None if mod is None else getattr(mod, "__qualname__", type(mod).__name__),
        None if sinks is None else tuple(sinks.shape), tuple(map(bool, returns)),
    )  # fmt: skip
    if torch.compiler.is_compiling():
        what = (*values[:3], *values[5:])
        sizes = [batch, q_heads, kv_heads, head_dim, v_dim]
        return _compare_compiled(local.digest, "context_parallel_attention", what, sizes, mesh)
    if _torch.is_fake(q):
        return None
    return _compare(Call(local.fingerprint, "context_parallel_attention", _ATTENTION, values), mesh)


def compare_gather(x_BTF: torch.Tensor, local: RankPlan, mesh: DeviceMesh, side: str) -> Compare | None:
    """`compare_attention` for an `unshard` or `roll`."""
    if torch.compiler.is_compiling():
        what, sizes = (side, x_BTF.dtype, _grads(x_BTF)), [x_BTF.shape[0], x_BTF.shape[2]]
        return _compare_compiled(local.digest, "unshard or roll", what, sizes, mesh)
    if _torch.is_fake(x_BTF):
        return None
    values = (side, x_BTF.dtype, (x_BTF.shape[0], x_BTF.shape[2]), _grads(x_BTF))
    return _compare(Call(local.fingerprint, "unshard or roll", _GATHER, values), mesh)


def compare_relayout(rows_RF: torch.Tensor, digest: torch.Tensor, mesh: DeviceMesh) -> Compare | None:
    """`compare_attention` for a `relayout` between the plans of `digest`."""
    values = (rows_RF.dtype, rows_RF.shape[1], _grads(rows_RF))
    if torch.compiler.is_compiling():
        return _compare_compiled(digest, "relayout", (values[0], values[2]), [rows_RF.shape[1]], mesh)
    if _torch.is_fake(rows_RF):
        return None
    return _compare(Call(_bytes(digest), "relayout", _RELAYOUT, values), mesh)


def compare_recurrence(
    name: str, tensors: Sequence[torch.Tensor], options: Any, digest: torch.Tensor, mesh: DeviceMesh
) -> Compare | None:
    """`compare_attention` for a call of `name`, a layer that carries a state, with the rows ``[R, …]`` of `tensors`."""
    dtypes, grads = tuple([x.dtype for x in tensors]), _grads(*tensors)
    if torch.compiler.is_compiling():
        sizes = [size for x in tensors for size in x.shape[1:]]
        return _compare_compiled(digest, name, (dtypes, grads, options), sizes, mesh)
    if any(_torch.is_fake(x) for x in tensors):
        return None
    values = (dtypes, tuple([tuple(x.shape[1:]) for x in tensors]), grads, options)
    return _compare(Call(_bytes(digest), name, _RECURRENCE, values), mesh)


def _compare(call: Call, mesh: DeviceMesh) -> Compare:
    groups, ranks = mesh_ranks(mesh)
    confirm = failure.compare(call, groups, ranks)

    def in_backward() -> None:
        if confirm is not None:
            confirm()
        failure.compare(call._replace(name=f"backward of {call.name}"), groups, ranks)

    return in_backward


def _compare_compiled(
    digest: torch.Tensor, name: str, what: tuple[Any, ...], sizes: list[Any], mesh: DeviceMesh
) -> Compare:
    groups = " ".join([_torch.group_name(group) for group in mesh_ranks(mesh)[0]])
    name, said = f"compiled {name}", " ".join([str(value) for value in what])
    return _Compiled(torch.ops.spanwise.compare_call(digest, groups, name, said, sizes), groups, name, said)


def compare_backward(outputs: tuple[torch.Tensor, ...], compare: Compare | None) -> tuple[torch.Tensor, ...]:
    """The `outputs` of a call, whose backward begins with `compare`.

    It waits until all ranks have made the call, so that no gradient comes from calls that differ. And it compares the
    backward as a call of its own: a rank that has left out one of several equal calls differs only there.
    """
    if compare is None or not any(out.requires_grad for out in outputs):
        return outputs
    if isinstance(compare, _Compiled):
        return _InBackward.apply(*compare, *outputs)
    last = -1

    def once(_: Any) -> None:
        nonlocal last
        if (number := _torch.backward_number()) != last:  # ranks may use different ones of the outputs
            last = number
            compare()

    for out in outputs:
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(once)
    return outputs


class _InBackward(torch.autograd.Function):
    """Identity of outputs; a comparison in the backward of compiled code."""

    @staticmethod
    def forward(
        ctx: Any, plan: torch.Tensor, groups: str, name: str, what: str, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(plan)
        ctx.call = groups, f"backward of {name}", what
        return tuple([out.view_as(out) for out in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (plan,) = ctx.saved_tensors
        torch.ops.spanwise.compare_backward(grads[0], plan, *ctx.call)
        return None, None, None, None, *grads


def _plain(number: Any) -> Any:
    """Equal numbers look alike on all ranks, whether one is an int, of numpy or a tensor."""
    return number if number is None or torch.compiler.is_compiling() else float(number)


def _grads(*tensors: torch.Tensor) -> tuple[bool, ...]:
    enabled = torch.is_grad_enabled()
    return tuple([enabled and x.requires_grad for x in tensors])


def _bytes(digest: torch.Tensor) -> bytes:
    return digest.numpy().tobytes()


@torch.library.impl(_library, "compare_call", "CompositeExplicitAutograd")
def _(plan: torch.Tensor, groups: str, name: str, what: str, sizes: Sequence[int]) -> torch.Tensor:
    labels = _COMPILED.get(name.removeprefix("compiled "), _COMPILED_RECURRENCE)
    _compare_in_graph(Call(_bytes(plan), name, labels, (what, tuple(sizes))), groups)
    return plan.clone()


@torch.library.impl(_library, "compare_backward", "CompositeExplicitAutograd")
def _(grad: torch.Tensor, plan: torch.Tensor, groups: str, name: str, what: str) -> None:
    labels = _COMPILED.get(name.removeprefix("backward of compiled "), _COMPILED_RECURRENCE)
    _compare_in_graph(Call(_bytes(plan), name, labels[:1], (what,)), groups)


def _compare_in_graph(call: Call, groups: str) -> None:
    found = [_torch.find_group(name) for name in groups.split()]

    def ranks() -> Sequence[int]:
        if len(found) > 1:
            raise ValueError(
                f"{call.name} on a mesh of two axes compares its calls over connections that do not exist yet; "
                "call plan.local(mesh) in this process before it"
            )
        return dist.get_process_group_ranks(found[0])

    failure.compare(call, found, ranks)


@torch.library.register_fake("spanwise::compare_call", lib=_library)
def _(plan: torch.Tensor, groups: str, name: str, what: str, sizes: Sequence[int]) -> torch.Tensor:
    return torch.empty_like(plan)


@torch.library.register_fake("spanwise::compare_backward", lib=_library)
def _(grad: torch.Tensor, plan: torch.Tensor, groups: str, name: str, what: str) -> None:
    return None

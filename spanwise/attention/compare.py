"""What must be equal in the calls of all ranks, and the comparison of each call, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.exchange import failure
from spanwise.attention.exchange.expectation import Call
from spanwise.attention.kernels.base import AttentionOptions, Kernel
from spanwise.attention.rank_plan import RankPlan, mesh_ranks

Compare = Callable[[], None]

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
    "relayout": ("dtype, requires grad", "features of a token"),
}
_COMPILED_RECURRENCE = ("dtypes, requires grad, options", "shapes of a token")

_library = torch.library.Library("spanwise", "FRAGMENT")
_library.define("compare_call(Tensor plan, str groups, str name, str what, SymInt[] sizes) -> ()")
_torch.mark_effectful(torch.ops.spanwise.compare_call.default)


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
        a function for `compare_backward`; None if the call is not compared in eager code.

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
        sizes = [batch, q_heads, kv_heads, head_dim, v_dim]
        _in_graph(local.digest, mesh, "context_parallel_attention", (*values[:3], *values[5:]), sizes)
        return None
    if _torch.is_fake(q):
        return None
    return _compare(Call(local.fingerprint, "context_parallel_attention", _ATTENTION, values), mesh)


def compare_gather(x_BTF: torch.Tensor, local: RankPlan, mesh: DeviceMesh, side: str) -> Compare | None:
    """`compare_attention` for an `unshard` or `roll`."""
    if _torch.is_fake(x_BTF) or torch.compiler.is_compiling():
        return None
    values = (side, x_BTF.dtype, (x_BTF.shape[0], x_BTF.shape[2]), _grads(x_BTF))
    return _compare(Call(local.fingerprint, "unshard or roll", _GATHER, values), mesh)


def compare_relayout(rows_RF: torch.Tensor, digest: torch.Tensor, mesh: DeviceMesh) -> Compare | None:
    """`compare_attention` for a `relayout` between the plans of `digest`."""
    values = (rows_RF.dtype, rows_RF.shape[1], _grads(rows_RF))
    if torch.compiler.is_compiling():
        _in_graph(digest, mesh, "relayout", (values[0], values[2]), [rows_RF.shape[1]])
        return None
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
        _in_graph(digest, mesh, name, (dtypes, grads, options), sizes)
        return None
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


def compare_backward(outputs: Sequence[torch.Tensor | None], compare: Compare | None) -> None:
    """Let each backward of the `outputs` of a call begin with `compare`.

    It waits until all ranks have made the call, so that no gradient comes from calls that differ. And it compares the
    backward as a call of its own: a rank that has left out one of several equal calls differs only there.
    """
    if compare is None:
        return
    last = -1

    def once(_: Any) -> None:
        nonlocal last
        if (number := _torch.backward_number()) != last:  # ranks may use different ones of the outputs
            last = number
            compare()

    for out in outputs:
        node = None if out is None else out.grad_fn
        if node is not None:
            node.register_prehook(once)


def _plain(number: Any) -> Any:
    """Equal numbers look alike on all ranks, whether one is an int, of numpy or a tensor."""
    return number if number is None or torch.compiler.is_compiling() else float(number)


def _grads(*tensors: torch.Tensor) -> tuple[bool, ...]:
    enabled = torch.is_grad_enabled()
    return tuple([enabled and x.requires_grad for x in tensors])


def _bytes(digest: torch.Tensor) -> bytes:
    return digest.numpy().tobytes()


def _in_graph(digest: torch.Tensor, mesh: DeviceMesh, name: str, values: Sequence[Any], sizes: Sequence[int]) -> None:
    """Compare the call when the compiled code runs; its digest is an input, so that no plan compiles again."""
    names = " ".join(_torch.group_name(group) for group in mesh_ranks(mesh)[0])
    torch.ops.spanwise.compare_call(digest, names, name, " ".join(str(value) for value in values), sizes)


@torch.library.impl(_library, "compare_call", "CompositeExplicitAutograd")
def _compare_call(plan: torch.Tensor, groups: str, name: str, what: str, sizes: Sequence[int]) -> None:
    labels = _COMPILED.get(name, _COMPILED_RECURRENCE)
    call = Call(_bytes(plan), f"compiled {name}", labels, (what, tuple(sizes)))
    found = [_torch.find_group(name) for name in groups.split()]

    def ranks() -> Sequence[int]:
        if len(found) > 1:
            raise ValueError(
                f"compiled {name} on a mesh of two axes compares its calls over connections that do not exist yet; "
                "call plan.local(mesh) in this process before it"
            )
        return dist.get_process_group_ranks(found[0])

    failure.compare(call, found, ranks)


@torch.library.register_fake("spanwise::compare_call", lib=_library)
def _(plan: torch.Tensor, groups: str, name: str, what: str, sizes: Sequence[int]) -> None:
    return None

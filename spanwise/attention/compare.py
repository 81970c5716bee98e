"""What must be equal in the calls of all ranks, and the comparison of each call, in eager and in compiled code."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

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

    plan: torch.Tensor | None
    groups: str
    name: str
    labels: str
    what: str


class Sums(NamedTuple):
    """A call in a compiled graph whose collectives are all-reduces: arguments for its `compare_sums` after the sums."""

    amount: torch.Tensor | None
    groups: str
    ranks: tuple[int, ...]
    name: str
    labels: str
    what: str
    sizes: Sequence[int]


Compare = failure.Compared | _Compiled | Sums
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Labels of what is compared. Compiled code names sizes apart and last, so that they may be symbols.
_ATTENTION = (
    "mask", "kernel", "dtype", "[batch, heads, head dim] of q", "[heads, head dim] of v", "requires grad", "scale",
    "softcap", "score_mod", "sinks", "returns",
)  # fmt: skip
_COMPILED_ATTENTION = (*_ATTENTION[:3], *_ATTENTION[5:], "[batch, heads of q and k, head dims of q and v]")
_GATHER = ("side", "dtype", "requires grad", "rows")
_RELAYOUT = ("dtype", "requires grad", "features of a token")
_RECURRENCE = ("dtypes", "requires grad", "options", "shapes of a token")

_library = torch.library.Library("spanwise", "FRAGMENT")
# The first returns a copy of `plan`, for the second. That depends on a gradient, and so on nothing in a forward graph;
# the plan itself in both would let torch put both comparisons into both graphs. The third returns the sums, for the
# all-reduces.
# A CUDA graph that had captured them would compare only once, while it is captured.
for _schema in (
    "compare_call(Tensor plan, str groups, str name, str labels, str what, SymInt[] sizes) -> Tensor",
    "compare_backward(Tensor grad, Tensor? plan, str groups, str name, str labels, str what) -> ()",
    "compare_sums(Tensor[] sums, Tensor? amount, str groups, int[] ranks, str name, str labels, str what, "
    "SymInt[] sizes) -> Tensor[]",
):
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))
_torch.mark_effectful(torch.ops.spanwise.compare_call.default)
_torch.mark_effectful(torch.ops.spanwise.compare_backward.default)


def tells_refusals(*names: str) -> Callable[[_Function], _Function]:
    """Decorator of a collective call: if it raises on this rank, ranks that wait for it learn why, in eager code.

    Args:
        names: of arguments that are the mesh, or have it as an attribute.
    """

    def of(function: _Function) -> _Function:
        @functools.wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            # Not Exception: torch ends the recomputation of a checkpoint by one of its own.
            except (LookupError, RuntimeError, TypeError, ValueError) as error:
                given = inspect.signature(function).bind(*args, **kwargs).arguments
                for name in names:
                    mesh = given.get(name)
                    mesh = mesh if isinstance(mesh, DeviceMesh) else getattr(mesh, "mesh", None)
                    if isinstance(mesh, DeviceMesh):
                        failure.report_refusal(error, mesh.mesh.flatten().tolist(), began)
                raise

        return told  # type: ignore[return-value]

    return of


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
    compiling, scale, mod = torch.compiler.is_compiling(), plain(options.scale), options.score_mod
    if scale is None and not compiling:  # there, the head dim may be a symbol
        scale = head_dim**-0.5
    of_sinks = () if sinks is None else tuple(sinks.shape)
    values: tuple[Any, ...] = (
        mask, kernel.name, q.dtype, (batch, q_heads, head_dim), (kv_heads, v_dim), _grads(q, k, v), scale,
        plain(options.softcap), None if mod is None else getattr(mod, "__qualname__", type(mod).__name__),
        None if sinks is None else len(of_sinks) if compiling else of_sinks, tuple(map(bool, returns)),
    )  # fmt: skip
    if compiling:
        what = (*values[:3], *values[5:])
        sizes = [batch, q_heads, kv_heads, head_dim, v_dim, *of_sinks]
        return _compare_compiled(local.digest, "context_parallel_attention", _COMPILED_ATTENTION, what, sizes, mesh)
    if _torch.is_fake(q):
        return None
    return _compare(Call(local.fingerprint, "context_parallel_attention", _ATTENTION, values), mesh)


def compare_gather(x_BTF: torch.Tensor, local: RankPlan, mesh: DeviceMesh, side: str) -> Compare | None:
    """`compare_attention` for an `unshard` or `roll`."""
    what, sizes = (side, x_BTF.dtype, _grads(x_BTF)), (x_BTF.shape[0], x_BTF.shape[2])
    if torch.compiler.is_compiling():
        return _compare_compiled(local.digest, "unshard or roll", _GATHER, what, sizes, mesh)
    if _torch.is_fake(x_BTF):
        return None
    return _compare(Call(local.fingerprint, "unshard or roll", _GATHER, (*what, sizes)), mesh)


def compare_relayout(rows_RF: torch.Tensor, digest: torch.Tensor, mesh: DeviceMesh) -> Compare | None:
    """`compare_attention` for a `relayout` between the plans of `digest`."""
    what, features = (rows_RF.dtype, _grads(rows_RF)), rows_RF.shape[1]
    if torch.compiler.is_compiling():
        return _compare_compiled(digest, "relayout", _RELAYOUT, what, [features], mesh)
    if _torch.is_fake(rows_RF):
        return None
    return _compare(Call(_bytes(digest), "relayout", _RELAYOUT, (*what, features)), mesh)


def compare_recurrence(
    name: str, tensors: Sequence[torch.Tensor], options: Any, digest: torch.Tensor, mesh: DeviceMesh
) -> Compare | None:
    """`compare_attention` for a call of `name`, a layer that carries a state, with the rows ``[R, …]`` of `tensors`."""
    what = (tuple([x.dtype for x in tensors]), _grads(*tensors), options)
    if torch.compiler.is_compiling():
        sizes = [size for x in tensors for size in x.shape[1:]]
        return _compare_compiled(digest, name, _RECURRENCE, what, sizes, mesh)
    if any(_torch.is_fake(x) for x in tensors):
        return None
    values = (*what, tuple([tuple(x.shape[1:]) for x in tensors]))
    return _compare(Call(_bytes(digest), name, _RECURRENCE, values), mesh)


def compare_sums(
    name: str,
    facts: dict[str, Any],
    mesh: DeviceMesh,
    *,
    of: torch.Tensor,
    sizes: tuple[str, Sequence[int]] = ("", ()),
    amount: float | torch.Tensor | None = None,
) -> Compare | None:
    """`compare_attention` for a call without a plan, whose collectives are all-reduces; the same call in compiled code.

    They look alike in different calls, and would add up what differs without an error.

    Args:
        facts: what must be equal, by label.
        of: tells whether tensors are fake.
        sizes: with their label.
        amount: a number that changes from call to call; in a tensor it is not compared.

    Returns:
        an argument for `compare_backward` and for `compared`.
    """
    what = tuple([_line(value) for value in facts.values()])
    labels = (*facts, sizes[0]) if sizes[1] else tuple(facts)
    number = None if amount is None or isinstance(amount, torch.Tensor) else amount
    groups, ranks = mesh_ranks(mesh)
    if torch.compiler.is_compiling():
        kept = None if number is None else scalar(number, torch.device("cpu"))
        return Sums(kept, _names(groups), ranks(), name, "\n".join(labels), "\n".join(what), sizes[1])
    if _torch.is_fake(of):
        return None
    values = (*what, tuple(sizes[1])) if sizes[1] else what
    call = Call(b"", name, labels, values, None if number is None else float(number))
    return _compare(call, mesh, Call(b"", name, tuple(facts), what))


def compared(sums: tuple[torch.Tensor, ...], compare: Compare | None) -> Sequence[torch.Tensor]:
    """Copies of the `sums` of a call that compiled code has compared by then; in eager code the sums themselves."""
    return torch.ops.spanwise.compare_sums(sums, *compare) if isinstance(compare, Sums) else sums


def _compare(call: Call, mesh: DeviceMesh, backward: Call | None = None) -> Compare:
    """Compare in eager code; the backward as the same call, if it is not told apart."""
    groups, ranks = mesh_ranks(mesh)
    number, confirm = failure.compare(call, groups, ranks)
    last = -1

    def in_backward() -> None:
        nonlocal last
        this = _torch.backward_number()
        if this == last:  # a call has several collectives, and ranks may use different ones of its outputs
            return
        last = this
        if confirm is not None:
            confirm()
        # Compiled code compares sums by the same calls, and knows no numbers of calls.
        one = call._replace(forward=number) if backward is None else backward
        failure.compare(one._replace(name=f"backward of {call.name}"), groups, ranks)

    return failure.Compared(number, in_backward)


def _compare_compiled(
    digest: torch.Tensor,
    name: str,
    labels: tuple[str, ...],
    values: tuple[Any, ...],
    sizes: Sequence[int],
    mesh: DeviceMesh,
) -> Compare:
    call = _names(mesh_ranks(mesh)[0]), f"compiled {name}", "\n".join(labels), "\n".join(map(_line, values))
    return _Compiled(torch.ops.spanwise.compare_call(digest, *call, sizes), *call)


def compare_backward(outputs: tuple[torch.Tensor, ...], compare: Compare | None) -> tuple[torch.Tensor, ...]:
    """The `outputs` of a call, whose backward begins with `compare`.

    It waits until all ranks have made the call, so that no gradient comes from calls that differ. And it compares the
    backward as a call of its own: a rank that has left out one of several equal calls differs only there.
    """
    if compare is None or not any(out.requires_grad for out in outputs):
        return outputs
    if isinstance(compare, Sums):
        compare = _Compiled(None, compare.groups, compare.name, compare.labels, compare.what)
    if isinstance(compare, _Compiled):
        return _InBackward.apply(compare, *outputs)
    for out in outputs:
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda _: compare.backward())
    return outputs


def compiled(compare: Compare | None) -> Compare | None:
    """`compare` of compiled code, for `compare_backward`; the executor compares the backwards of eager code."""
    return None if isinstance(compare, failure.Compared) else compare


def eager(compare: Compare | None) -> failure.Compared | None:
    """`compare` of eager code, for the executor."""
    return compare if isinstance(compare, failure.Compared) else None


class _InBackward(torch.autograd.Function):
    """Identity of outputs; a comparison in the backward of compiled code."""

    @staticmethod
    def forward(ctx: Any, compare: _Compiled, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if compare.plan is not None:
            ctx.save_for_backward(compare.plan)
        ctx.call = compare.groups, f"backward of {compare.name}", compare.labels, compare.what
        return tuple([out.view_as(out) for out in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (plan,) = ctx.saved_tensors or (None,)
        torch.ops.spanwise.compare_backward(grads[0], plan, *ctx.call)
        return None, *grads


def plain(number: Any) -> Any:
    """Equal numbers look alike on all ranks, whether one is an int, of numpy or a tensor."""
    return _torch.constant(number) if number is None or torch.compiler.is_compiling() else float(number)


def scalar(number: float, device: torch.device) -> torch.Tensor:
    """`number` in float64, without a copy that the host waits for; with `full`, each number would make a graph."""
    return torch.ones((), dtype=torch.float64, device=device) * number


def _grads(*tensors: torch.Tensor) -> tuple[bool, ...]:
    enabled = torch.is_grad_enabled()
    return tuple([enabled and x.requires_grad for x in tensors])


def _bytes(digest: torch.Tensor) -> bytes:
    return digest.numpy().tobytes()


def _line(value: Any) -> str:
    return str(value).replace("\n", " ")


def _names(groups: Sequence[dist.ProcessGroup]) -> str:
    """Groups in one string, as operators take them; `_groups` finds them again."""
    return " ".join([_torch.group_name(group) for group in groups])


def _groups(names: str) -> list[dist.ProcessGroup]:
    return [_torch.find_group(name) for name in names.split()]


@torch.library.impl(_library, "compare_call", "CompositeExplicitAutograd")
def _(plan: torch.Tensor, groups: str, name: str, labels: str, what: str, sizes: Sequence[int]) -> torch.Tensor:
    _compare_in_graph(_call(plan, name, labels, what, sizes), groups)
    return plan.clone()


@torch.library.impl(_library, "compare_backward", "CompositeExplicitAutograd")
def _(grad: torch.Tensor, plan: torch.Tensor | None, groups: str, name: str, labels: str, what: str) -> None:
    _compare_in_graph(_call(plan, name, labels, what), groups)


@torch.library.impl(_library, "compare_sums", "CompositeExplicitAutograd")
def _(
    sums: Sequence[torch.Tensor], amount: torch.Tensor | None, groups: str, ranks: Sequence[int], name: str,
    labels: str, what: str, sizes: Sequence[int],
) -> list[torch.Tensor]:  # fmt: skip
    call = _call(None, name, labels, what, sizes)
    call = call._replace(amount=None if amount is None else float(amount))
    failure.compare(call, _groups(groups), lambda: ranks)
    return [x.clone() for x in sums]


def _call(plan: torch.Tensor | None, name: str, labels: str, what: str, sizes: Sequence[int] = ()) -> Call:
    """The call of an operator; a backward has no sizes."""
    values = (*what.split("\n"), *([tuple(sizes)] if sizes else []))
    return Call(b"" if plan is None else _bytes(plan), name, tuple(labels.split("\n"))[: len(values)], values)


def _compare_in_graph(call: Call, groups: str) -> None:
    found = _groups(groups)

    def ranks() -> Sequence[int]:
        if len(found) > 1:
            raise ValueError(
                f"{call.name} on a mesh of two axes compares its calls over connections that do not exist yet; "
                "call plan.local(mesh) in this process before it"
            )
        return dist.get_process_group_ranks(found[0])

    failure.compare(call, found, ranks)


@torch.library.register_fake("spanwise::compare_call", lib=_library)
def _(plan: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(plan)


@torch.library.register_fake("spanwise::compare_backward", lib=_library)
def _(*_: Any) -> None:
    return None


@torch.library.register_fake("spanwise::compare_sums", lib=_library)
def _(sums: Sequence[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in sums]

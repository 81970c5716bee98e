"""Private and version-dependent names of torch for the whole package; `overlap._torch` adds those of overlap alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.torch_version import TorchVersion
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# The functional collectives by their operators: start and wait are nodes of their own. The Python wrappers of torch
# return a tensor subclass that waits at its first use, which hides where the wait happens.
_ops = torch.ops._c10d_functional

# torch 2.11 compiles an autograd function with a collective to one whose gradients are wrong, without an error.
COMPILES = TorchVersion(torch.__version__) >= "2.12"
_LET_GO = 5.0  # most seconds to wait for gloo's thread after a collective; it needs microseconds, or a turn
_TAG = 0x5BA2  # apart from a user's own sends and receives


def group_name(group: dist.ProcessGroup) -> str:
    """Name of ``group`` in functional collectives."""
    return group.group_name


def start_all_gather(x: torch.Tensor, group_size: int, name: str) -> torch.Tensor:
    """Start an all-gather along dim 0; the result is not readable before :func:`wait`."""
    x = x.contiguous()
    if not _by_messages(x, name):
        if torch.compiler.is_compiling() or x.device.type == "cpu" or not is_gloo(find_group(name), x.device.type):
            return _ops.all_gather_into_tensor(x, group_size, name)
        # gloo has no such operator for accelerators, and torch ends the process instead of saying so.
        received = x.new_empty(group_size, *x.shape)
        work = find_group(name).allgather([list(received.unbind())], [x.detach()])
        torch._C._distributed_c10d._register_work(received, work)
        return received.flatten(0, 1)
    x = x.detach() if x.dim() else x.detach().view(1)
    received = x.new_empty(group_size, *x.shape)
    for work in _messages(received.unbind(), [x] * group_size, find_group(name)):
        torch._C._distributed_c10d._register_work(received, work)
    return received.flatten(0, 1)


def start_reduce_scatter(x: torch.Tensor, group_size: int, name: str) -> torch.Tensor:
    """Start a summing reduce-scatter along dim 0; the result is not readable before :func:`wait`."""
    x = x.contiguous()
    if not _by_messages(x, name):
        return _ops.reduce_scatter_tensor(x, "sum", group_size, name)
    parts = x.detach().unflatten(0, (group_size, -1))
    received, summed = torch.empty_like(parts), torch.empty_like(parts[0])
    works = _messages(received.unbind(), parts.unbind(), find_group(name))
    return _finished_by(lambda: torch.sum(received, 0, out=summed), summed, works)


def start_all_to_all(x: torch.Tensor, recv_rows: list[int], send_rows: list[int], name: str) -> torch.Tensor:
    """Start an uneven all-to-all of rows along dim 0; the result is not readable before :func:`wait`.

    Eager code on gloo uses sends and receives. gloo's all-to-all sends before it announces that it can receive: on a
    rank that starts late the notice queues behind the data, and the two directions of a connection take turns.
    """
    x = x.contiguous()
    if not _by_messages(x, name):
        return _ops.all_to_all_single(x, recv_rows, send_rows, name)
    group = find_group(name)
    rank, size = group.rank(), group.size()
    fits = len(recv_rows) == len(send_rows) == size and sum(send_rows) == x.shape[0]
    if not fits or min(*recv_rows, *send_rows) < 0 or recv_rows[rank] != send_rows[rank]:
        raise ValueError(
            f"an all-to-all of {size} ranks needs {size} numbers of rows, none negative, those {x.shape[0]} in all, "
            f"equal ones from rank {rank} to itself; got {recv_rows} to receive and {send_rows} to send"
        )
    received = x.new_empty(sum(recv_rows), *x.shape[1:])
    for work in _messages(received.split(recv_rows), x.detach().split(send_rows), group):
        torch._C._distributed_c10d._register_work(received, work)  # waited for by wait_tensor, all of them
    return received


def _by_messages(x: torch.Tensor, name: str) -> bool:
    """Whether ranks send to each rank. What decides by operators sees one: selective checkpointing, make_fx."""
    # Parameters and other subclasses without a dispatcher of their own are plain tensors: padding makes some ranks'
    # rows plain, and all ranks must decide alike.
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    if get_proxy_mode() is not None:  # a trace with real tensors would keep what came as constants
        return False
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    selects = any(isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) for mode in modes)
    return not selects and is_gloo(find_group(name))


def _messages(
    incoming: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Starts a message from and to each rank, those that are empty left out."""
    rank, size = group.rank(), group.size()
    incoming[rank].copy_(outgoing[rank])
    before, after = [(rank - d) % size for d in range(1, size)], [(rank + d) % size for d in range(1, size)]
    works = [group.recv([incoming[peer]], peer, _TAG) for peer in before if len(incoming[peer])]
    return works + [group.send([outgoing[peer]], peer, _TAG) for peer in after if len(outgoing[peer])]


def start_all_reduce(x: torch.Tensor, op: str, name: str) -> torch.Tensor:
    """Start an all-reduce (``"sum"`` or ``"max"``); the result is not readable before :func:`wait`."""
    # A mode that traces or counts may keep what it sees.
    if x.is_complex() or not is_readable(x) or not is_gloo(find_group(name)):
        return _ops.all_reduce(x.contiguous(), op, name)
    reduced = x.detach().clone(memory_format=torch.contiguous_format)
    handed, options = Handed(reduced), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp({"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])
    return _finished_by(handed.await_release, reduced, [find_group(name).allreduce(handed.tensors, options)])


def _finished_by(last: Callable[[], Any], result: torch.Tensor, works: list[dist.Work]) -> torch.Tensor:
    """Let :func:`wait` for `result` wait for the works, drop them, and do the last step."""

    def finish(_: timedelta) -> bool:
        while works:
            works.pop().wait()
        last()
        return True

    torch._C._distributed_c10d._register_work(result, torch._C._distributed_c10d.PythonCallbackWork(finish))
    return result


class Handed:
    """Tensors handed to gloo's threads: the memory of `given`, in tensors that nobody else has.

    gloo's thread drops its references after it has announced the result. If it leaves a tensor to Python alone, it asks
    for the interpreter's lock, and a process that is ending aborts. So who waits also waits until it has let go.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        # Not views: a view refers to the tensor that it is a view of, and so would the parts that gloo makes.
        def own(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

        self.tensors = list(map(own, given))
        self._before = self._references()

    def _references(self) -> list[int]:
        # Of C++, and of Python: the last step of letting go drops the reference that C++ has to Python's tensor.
        return [n for x in self.tensors for n in (x._use_count(), sys.getrefcount(x))]  # type: ignore[attr-defined]

    def await_release(self) -> None:
        """Return when gloo has no reference any more."""
        until = time.monotonic() + _LET_GO
        while any(map(operator.gt, self._references(), self._before)) and time.monotonic() < until:
            time.sleep(1e-5)


def check_compiling() -> None:
    """``NotImplementedError`` in compiled code where this torch would compute wrong gradients."""
    if not COMPILES and torch.compiler.is_compiling():
        version = torch.__version__
        raise NotImplementedError(f"torch {version} cannot compile context parallelism; use torch 2.12 or newer")


def check_first_order() -> None:
    """``NotImplementedError`` in a backward under ``create_graph=True``; call it before any collective."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError("no second derivatives through context parallelism; leave create_graph=True out")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager_with_torch_2_11(function: _Function) -> _Function:
    """`function`; with torch 2.11, one that ``fullgraph=True`` refuses and that runs eagerly in other compiled code."""
    if COMPILES:
        return function
    eager = torch.compiler.disable(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_compiling()
        return eager(*args, **kwargs)

    return checked  # type: ignore[return-value]


def wait(x: torch.Tensor) -> torch.Tensor:
    """Wait for a started collective."""
    return _ops.wait_tensor(x)


def comparison_device(group: dist.ProcessGroup) -> torch.device:
    """Where a small eager collective can run: the CPU unless the group serves only accelerators."""
    devices = {device.type for device in group._device_types}
    return torch.device("cpu" if not devices or "cpu" in devices else min(devices))


def register_pytree_dataclass(cls: type, *, static: tuple[str, ...] = ()) -> type:
    """Register a frozen dataclass as a pytree; ``static`` fields belong to the tree's structure."""
    tensors = tuple(f.name for f in dataclasses.fields(cls) if f.name not in static)

    def flatten(obj: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(obj, n) for n in tensors], tuple(getattr(obj, n) for n in static)

    def unflatten(children: Any, context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(tensors, children, strict=True)), **dict(zip(static, context, strict=True)))

    _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    return cls


tree_map = _pytree.tree_map
tree_leaves = _pytree.tree_leaves

# Real tensors and real operators inside, though the caller traces, fakes or selects what to save.
without_modes = torch.utils._python_dispatch._disable_current_modes


def mark_dynamic(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Tell torch.compile that ``x.shape[dim]`` varies from call to call, so that its first graph fits every size.

    It is no error if a graph fixes the size after all. The mark stays on the tensor object.
    """
    torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def mark_unbacked(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Tell torch.compile to assume nothing of ``x.shape[dim]``, so that 0 and 1 share a graph with every other size."""
    torch._dynamo.decorators.mark_unbacked(x, dim)
    return x


def mark_static(x: torch.Tensor, dim: int) -> None:
    """Tell torch.compile, inside compiled code too, that ``x.shape[dim]`` is a constant of the graph."""
    torch._dynamo.mark_static(x, dim)


def constant(number: Any) -> Any:
    """`number` or None; in compiled code a constant of the graph, even where torch has made a symbol of it."""
    if number is None or isinstance(number, torch.Tensor) or not torch.compiler.is_compiling():
        return number
    return torch.fx.experimental.symbolic_shapes.guard_scalar(number)


def fix_sizes(*sizes: int) -> None:
    """Make sizes constants of compiled code, which has symbols for them under ``dynamic=True``."""
    if torch.compiler.is_compiling():
        for size in sizes:
            operator.index(size)


def index_with_scalars() -> AbstractContextManager[Any]:
    """Lets a score_mod index captured tensors with its scalar arguments under vmap, as FlexAttention allows."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def find_group(name: str) -> dist.ProcessGroup:
    """Group of this name in functional collectives."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def groups() -> list[dist.ProcessGroup]:
    """The groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store through which the ranks of ``group`` found each other; its keys are this group's own."""
    return dist.distributed_c10d._get_process_group_store(group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Time after which a collective of ``group`` fails."""
    options = getattr(group._get_backend(comparison_device(group)), "options", None)
    return group_store(group).timeout if options is None else options._timeout  # type: ignore[attr-defined]


def is_gloo(group: dist.ProcessGroup, device: str = "cpu") -> bool:
    """Whether ``group`` communicates over gloo on devices of this type."""
    return f"{device}:gloo" in dist.get_backend_config(group)


def has_processes(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of ``group`` are processes that gloo can connect; "fake" and "threaded" groups are not."""
    return any(backend in dist.get_backend_config(group) for backend in ("gloo", "nccl", "xccl"))


def host_group(store: dist.Store, name: str, rank: int, num_ranks: int, timeout: timedelta) -> Any:
    """gloo connections between ranks that find each other through ``store``, unknown to torch. A collective."""
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, num_ranks, timeout)


def saved_tensor_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Pack and unpack of the active hooks for tensors that autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def mark_effectful(op: torch._ops.OpOverload) -> None:
    """Keep calls of ``op`` in graphs though nothing uses their results."""
    torch.fx.node.has_side_effect(op)


@contextlib.contextmanager
def plain_tensors() -> Iterator[Callable[[Any], Any]]:
    """Inside, operators make tensors that outlive inference mode and a mode of fake tensors.

    Yields a function to call afterwards. It turns the tensors of a pytree into fake ones if a mode of those is active.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    fake: Any
    with torch.inference_mode(False), unset_fake_temporarily() as fake:
        yield lambda tree: tree if fake is None else _pytree.tree_map_only(torch.Tensor, fake.from_tensor, tree)


def backward_number() -> int:
    """Number of the backward pass that runs in this thread, -1 outside of one."""
    return torch._C._current_graph_task_id()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Inside, autograd records, also in an operator of ``torch.library``."""
    keys = torch._C.DispatchKey.AutogradFunctionality
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(keys, False):
        yield


def after_backward(do: Callable[[], None]) -> None:
    """Call `do` at the end of the backward pass that runs in this thread, unless that raises."""
    torch.autograd.Variable._execution_engine.queue_callback(do)


def check_transforms(*tensors: torch.Tensor) -> None:
    """``NotImplementedError`` inside a transform of `torch.func`, or for a tensor with a forward-mode tangent.

    Compiled code sees only vmap here; other transforms meet what Dynamo refuses.
    """
    from torch.autograd import forward_ad

    if torch.compiler.is_compiling():
        # The call passes by `__torch_function__`, and a graph would get a marked output of a model as it is.
        batched = [
            torch._C._functorch.is_batchedtensor(x if type(x) is torch.Tensor else x.view_as(x)) for x in tensors
        ]
    else:
        batched = [torch._C._functorch.peek_interpreter_stack() is not None]
    if any(batched):
        raise NotImplementedError(
            "context parallelism does not run inside torch.func (vmap, grad, vjp, jacrev, …); use the batch dim in "
            "place of vmap, and torch.autograd.grad or backward() in place of torch.func.grad"
        )
    tangents = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    if tangents and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "context parallelism has no forward-mode derivatives; use torch.autograd.grad or backward()"
        )


def is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no contents to read."""
    return x.is_meta or (type(x) is not torch.Tensor and isinstance(x, torch._subclasses.FakeTensor))


def is_readable(x: torch.Tensor) -> bool:
    """Whether eager code may ask for a number of `x` at no cost: it lies on the CPU, and nothing traces."""
    if type(x) is not torch.Tensor or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def storage_id(x: torch.Tensor) -> int:
    """Identity of a tensor's storage while one of its tensors lives; fake tensors have one, but no address."""
    return x.untyped_storage()._cdata


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`x` on ``device``; through pinned memory to CUDA, so that the host does not wait."""
    if device.type != "cuda" or is_fake(x):  # those cannot be pinned
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)

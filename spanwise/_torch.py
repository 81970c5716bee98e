"""The only file that touches private or version-dependent torch names (torch 2.11 and later)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# The functional collectives by their operators: a graph sees start and wait as nodes of their own. The Python wrappers
# in torch.distributed._functional_collectives return a tensor subclass that waits at its first use, which hides where
# the wait happens.
_ops = torch.ops._c10d_functional
functional_collectives, autograd_collectives = _ops, torch.ops._c10d_functional_autograd
shard_dim_alltoall = torch.ops._dtensor.shard_dim_alltoall.default
ALL_GATHER = _ops.all_gather_into_tensor.default

_ALL_TO_ALL_TAG = 0x5BA2  # apart from a user's own sends and receives


def group_name(group: dist.ProcessGroup) -> str:
    """The name under which functional collectives know ``group``."""
    return group.group_name


def start_all_gather(x: torch.Tensor, group_size: int, name: str) -> torch.Tensor:
    """Start an all-gather along dim 0; the result is not readable before :func:`wait`."""
    return _ops.all_gather_into_tensor(x.contiguous(), group_size, name)


def start_reduce_scatter(x: torch.Tensor, group_size: int, name: str) -> torch.Tensor:
    """Start a summing reduce-scatter along dim 0; the result is not readable before :func:`wait`."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group_size, name)


def start_all_to_all(x: torch.Tensor, recv_rows: list[int], send_rows: list[int], name: str) -> torch.Tensor:
    """Start an uneven all-to-all of rows along dim 0; the result is not readable before :func:`wait`.

    Eager code on gloo sends and receives by itself. gloo's all-to-all sends before it says that it is ready to receive:
    on a rank that starts late the notice queues behind the data, and the two directions of a connection take turns.
    Selective checkpointing, which decides by operators, sees the operator.
    """
    plain = type(x) is torch.Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if plain and not _selects_what_to_save():
        group = find_group(name)
        if "cpu:gloo" in dist.get_backend_config(group):
            return _start_receives_first(x.contiguous(), recv_rows, send_rows, group)
    return _ops.all_to_all_single(x.contiguous(), recv_rows, send_rows, name)


def _selects_what_to_save() -> bool:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) for mode in modes)


def _start_receives_first(
    x: torch.Tensor, recv_rows: list[int], send_rows: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    rank, size = group.rank(), group.size()
    fits = len(recv_rows) == len(send_rows) == size and sum(send_rows) == x.shape[0]
    if not fits or min(*recv_rows, *send_rows) < 0 or recv_rows[rank] != send_rows[rank]:
        raise ValueError(
            f"an all-to-all of {size} ranks needs {size} numbers of rows, none negative, those sent {x.shape[0]} "
            f"together, as many from rank {rank} to itself as it receives; got {recv_rows} to receive and {send_rows} "
            f"to send"
        )
    x = x.detach()  # autograd is the exchange's business
    received = x.new_empty(sum(recv_rows), *x.shape[1:])
    incoming, outgoing = received.split(recv_rows), x.split(send_rows)
    incoming[rank].copy_(outgoing[rank])
    before, after = [(rank - d) % size for d in range(1, size)], [(rank + d) % size for d in range(1, size)]
    works = [group.recv([incoming[peer]], peer, _ALL_TO_ALL_TAG) for peer in before if recv_rows[peer]]
    works += [group.send([outgoing[peer]], peer, _ALL_TO_ALL_TAG) for peer in after if send_rows[peer]]
    for work in works:
        torch._C._distributed_c10d._register_work(received, work)  # waited for by wait_tensor, all of them
    return received


def start_all_reduce(x: torch.Tensor, op: str, name: str) -> torch.Tensor:
    """Start an all-reduce (``"sum"`` or ``"max"``); the result is not readable before :func:`wait`."""
    return _ops.all_reduce(x.contiguous(), op, name)


def wait(x: torch.Tensor) -> torch.Tensor:
    """Wait for a started collective."""
    return _ops.wait_tensor(x)


def comparison_device(group: dist.ProcessGroup) -> torch.device:
    """Where a small eager collective can run: the CPU unless the group serves only accelerators."""
    devices = {device.type for device in group._device_types}
    if not devices or "cpu" in devices:
        return torch.device("cpu")
    return torch.device(sorted(devices)[0])


def register_pytree_dataclass(cls: type, *, static: tuple[str, ...] = ()) -> type:
    """Register a frozen dataclass as a pytree; ``static`` fields belong to the tree's structure."""
    names = [f.name for f in dataclasses.fields(cls)]
    tensors = tuple(n for n in names if n not in static)

    def flatten(obj: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(obj, n) for n in tensors], tuple(getattr(obj, n) for n in static)

    def unflatten(children: Any, context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(tensors, children, strict=True)), **dict(zip(static, context, strict=True)))

    _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    return cls


tree_map = _pytree.tree_map
tree_leaves = _pytree.tree_leaves
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten


def mark_dynamic(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Tell torch.compile that ``x.shape[dim]`` varies from call to call, so that its first graph fits every size.

    Unlike ``torch._dynamo.mark_dynamic`` it is no error if a graph fixes the size after all. The mark stays on the
    tensor object, not on what is computed from it.
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


def index_with_scalars() -> AbstractContextManager[Any]:
    """Lets a score_mod index captured tensors with its scalar arguments under vmap, as FlexAttention allows."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def find_group(name: str) -> dist.ProcessGroup:
    """The group that functional collectives know under ``name``."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def is_nccl(name: str, device: torch.device) -> bool:
    """Whether NCCL carries tensors of ``device`` in a group; one that this process does not have is taken for usual."""
    if device.type != "cuda":
        return False
    try:
        config = dist.get_backend_config(find_group(name))
    except (RuntimeError, ValueError, KeyError):
        return True
    return "cuda:nccl" in config or "cuda:fake" in config


def groups() -> list[dist.ProcessGroup]:
    """The groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store through which the ranks of ``group`` found each other; its keys are this group's own."""
    return dist.distributed_c10d._get_process_group_store(group)


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash kernel as `varlen_attn` calls it; `spanwise.attention.kernels._rounds.Flash.forward`."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, window == (-1, 0), False,
        scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return out, lse


def flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its backward; `Flash.backward` there."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, window == (-1, 0), *no_dropout,
        scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return dq, dk, dv


def fake_store() -> dist.Store:
    """A store for process groups of the backend "fake", which this makes known to torch: they send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_mode() -> Any:
    """A mode in which tensors have shapes, strides and dtypes and no contents; a `DeviceMesh` may have real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def to_fake(mode: Any, x: torch.Tensor) -> torch.Tensor:
    """A fake tensor of ``mode`` with the sizes of ``x``, which may be real."""
    return mode.from_tensor(x, static_shapes=True)


@contextmanager
def compiling() -> Iterator[None]:
    """Lets ``torch.compiler.is_compiling()`` say yes to code that is traced without torch.compile."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no contents to read."""
    from torch._subclasses import FakeTensor

    return isinstance(x, FakeTensor) or x.is_meta


def drop_assertions(graph: torch.fx.Graph) -> None:
    """Erase the checks of dtypes that tracing leaves behind: with fixed dtypes they check nothing."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def relabel(x: torch.Tensor, device: torch.device) -> None:
    """Let a fake tensor name another device, in place; what shares its storage goes on sharing it."""
    x.fake_device = device  # type: ignore[attr-defined]


def copy_graph(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node]]:
    """A graph of the same nodes, names, metadata and calling convention, and the new nodes by the old ones."""
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    new = torch.fx.Graph(tracer_cls=graph._tracer_cls)
    new.graph_copy(graph, copied)
    new.set_codegen(copy.copy(graph._codegen))
    for output in graph.find_nodes(op="output"):
        copied[output] = new.node_copy(output, copied.__getitem__)
    return new, copied


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph, class_name: str) -> torch.fx.GraphModule:
    """Module of `graph` with the attributes of `root` that it names.

    Its code is generated when it is first run or read, which a compiler never does: of 17,000 nodes that takes seconds.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name)


def joint_graph(
    function: Callable[..., tuple[torch.Tensor, ...]], inputs: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """ATen graph of a function and its backward: ``primals_*`` and ``tangents_*`` to outputs and gradients."""
    from torch._functorch.aot_autograd import aot_export_joint_simple

    return aot_export_joint_simple(function, tuple(inputs), trace_joint=True)  # type: ignore[return-value]


def partition(joint: torch.fx.GraphModule, num_outputs: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut a joint graph in two where the least has to be saved, as torch.compile does.

    Nodes whose ``meta["recompute"]`` is ``CheckpointPolicy.MUST_RECOMPUTE`` are done again in the backward.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, (), num_fwd_outputs=num_outputs)


def sdpa_flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device_type: str) -> tuple[torch.Tensor, ...]:
    """Causal attention as `scaled_dot_product_attention` does it: the output, and what the backward takes after it."""
    if device_type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return out, lse, seed, offset


def sdpa_flash_backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *saved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its backward; `saved` is what `sdpa_flash_forward` gave."""
    out, lse, *dropout = saved
    if not dropout:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, True
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, True, *dropout
        )
    return grads


def has_hidden_effects(target: Any) -> bool:
    """Whether torch itself keeps calls of ``target`` in place for what they do beside their results.

    Assertions, profiler ranges, operators registered as effectful; not what a schema says of mutated arguments.
    """
    from torch._higher_order_ops.effects import _get_effect

    if target in torch.fx.node._side_effectful_functions:
        return True
    operator = isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    return operator and _get_effect(target) is not None


def decomposes(op: torch._ops.OpOverload) -> bool:
    """Whether ``op`` is defined by other operators alone, so that what its schema calls an alias may be a copy."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@contextmanager
def without_modes() -> Iterator[None]:
    """Operators within are seen by no mode that was entered before: none fakes, traces or counts them."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of ``group`` may take before it fails."""
    options = getattr(group._get_backend(comparison_device(group)), "options", None)
    return group_store(group).timeout if options is None else options._timeout  # type: ignore[attr-defined]


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` is of the backend "fake": nobody answers there."""
    return "fake" in dist.get_backend_config(group)


def mark_effectful(op: OpOverload) -> None:
    """Keep calls of ``op`` in graphs, though their results are not used."""
    torch.fx.node.has_side_effect(op)


def compile_aot_eager(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], schedule: Callable[[torch.fx.GraphModule], torch.fx.GraphModule]
) -> Callable[..., Any]:
    """The backend "aot_eager" whose forward and backward graphs go through ``schedule`` before they run as they are."""
    from torch._dynamo.backends import debugging

    def compiler(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        # Where a checkpoint draws random numbers, the partitioner leaves nodes without "val"; Inductor does the same.
        if any("val" not in node.meta for node in graph.graph.nodes if node.op == "call_function"):
            from torch._inductor.compile_fx import fake_tensor_prop

            fake_tensor_prop(graph, given)
        return debugging.boxed_nop(schedule(graph), list(given))

    # The cache that this turns on would not know of the schedule.
    with torch._functorch.config.patch(force_autograd_cache=False):
        return debugging.aot_eager(gm, list(inputs), fw_compiler=compiler, bw_compiler=compiler)


def compile_inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    schedule: Callable[[torch.fx.GraphModule], Any],
    fingerprint: str | None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend "inductor" with ``schedule`` as its last change to each forward and backward ATen graph, in place.

    Args:
        fingerprint: what ``schedule`` depends on, for the caches of compiled graphs; None keeps graphs out of them.
        mode, options: of ``torch.compile``.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    patches = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    patches |= {name.replace("-", "_"): value for name, value in (options or {}).items()}
    before = patches.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)
    earlier = list(before) if isinstance(before, (list, tuple)) else [] if before is None else [before]

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for other in earlier:
                other(graph)
            schedule(graph.owning_module)  # type: ignore[arg-type]

        def uuid(self) -> Any:
            known = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in earlier]
            return None if None in (*known, fingerprint) else (*known, fingerprint)

    # Other passes that reorder communication would run after this one.
    patches |= {
        "post_grad_custom_post_pass": Pass(),
        "reorder_for_compute_comm_overlap": False,
        "aten_distributed_optimizations.enable_overlap_scheduling": False,
    }
    return compile_fx(gm, list(inputs), config_patches=patches)  # type: ignore[return-value]


def keep_order(graph: torch.fx.Graph, after: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]) -> None:
    """Make Inductor run each of these nodes after others of the graph, as a control dependency; in place."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in after.items()})


def assume_symbols(size: Any, number: int) -> int:
    """``size`` if all symbols in it are ``number``."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, number)))


def dump_graph(gm: torch.fx.GraphModule, keep: Sequence[str]) -> bytes:
    """A graph with these entries of its nodes' metadata, without data of tensors; for `load_graph`."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(gm, Options(ops_filter=None, node_metadata_key_filter=lambda key: key in keep))


def load_graph(data: bytes) -> torch.fx.GraphModule:
    """What `dump_graph` wrote; its tensors are fake."""
    from torch.fx._graph_pickler import GraphPickler

    found: Any = GraphPickler.loads(data, fake_mode())
    return found


def torch_overlap_pass(
    gm: torch.fx.GraphModule, estimate: Callable[[torch.fx.Node, int | None], float | None], *, bucket: bool
) -> torch.fx.GraphModule:
    """PyTorch's own overlap pass on ``gm``, which it may change; all costs are asked of ``estimate``.

    The pass asks the GPU at hand for its FLOP/s and bandwidth even so, and counts the memory of GPUs alone. A copy of
    its module, which nobody else has, asks for nothing and counts all.

    Raises:
        NotImplementedError: this torch has no such pass, or another one.
    """
    import importlib.util
    import sys

    name = "torch._inductor.fx_passes.overlap_scheduling"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or spec.loader is None:
        raise NotImplementedError(f"torch {torch.__version__} has no {name}")
    spec = importlib.util.spec_from_file_location("spanwise._torch.overlap_scheduling", spec.origin)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # while it defines its dataclasses, which look themselves up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    try:
        module.estimate_roofline_runtime_ms = lambda node: 0.0
        module.MemoryTracker = functools.partial(module.MemoryTracker, device_filter=lambda device: True)
        run = functools.partial(
            module.schedule_overlap_bucketing,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            collective_bucketing=bucket,
            pre_bucketing_fsdp_collectives=False,
        )
        inspect.signature(module.schedule_overlap_bucketing).bind(gm, **run.keywords)
    except (AttributeError, TypeError) as error:
        raise NotImplementedError(f"torch {torch.__version__} has another overlap pass: {error}") from error
    return run(gm)

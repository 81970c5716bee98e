"""Private and version-dependent names of torch for the overlap half (torch 2.11 and later).

Names that both halves use are defined in `spanwise._torch` and imported here: this half has one place to look.
"""

from __future__ import annotations

import collections
import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator as HigherOrderOperator, OpOverload as OpOverload
from torch.utils import _pytree
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from spanwise._torch import (
    find_group as find_group,
    group_name as group_name,
    group_store as group_store,
    group_timeout as group_timeout,
    groups as groups,
    is_fake as is_fake,
    mark_effectful as mark_effectful,
    start_all_gather as start_all_gather,
    start_all_reduce as start_all_reduce,
    start_reduce_scatter as start_reduce_scatter,
    storage_id as storage_id,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    wait as wait,
    without_modes as without_modes,
)

functional_collectives = torch.ops._c10d_functional
autograd_collectives = torch.ops._c10d_functional_autograd
shard_dim_alltoall = torch.ops._dtensor.shard_dim_alltoall.default


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **given: Any) -> float:
    return sdpa_flop_count(q.shape, k.shape, v.shape) * _read_share(given)


def _flex_backward_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, *_: Any, **given: Any) -> float:
    return sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape) * _read_share(given)


def _cpu_backward_flops(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> float:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _read_share(given: Mapping[str, Any]) -> float:
    """Of FlexAttention: the share of all scores that its mask lets it compute."""
    return 1.0 - (given.get("_node_meta", {}).get("custom") or {}).get("sparsity_hint", 0.0)


# torch's formulas; it lacks those of attention on the CPU, torch 2.11 and 2.12 also those of FlexAttention.
flop_formulas: Mapping[Any, Callable[..., Any]] = collections.ChainMap(
    flop_registry,
    {
        torch.ops.higher_order.flex_attention: _attention_flops,
        torch.ops.higher_order.flex_attention_backward: _flex_backward_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_backward_flops,
    },
)

tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten


def is_nccl(name: str, device: torch.device) -> bool:
    """Whether NCCL carries tensors of ``device`` in a group; assumed for CUDA where this process lacks the group."""
    if device.type != "cuda":
        return False
    try:
        config = dist.get_backend_config(find_group(name))
    except (RuntimeError, ValueError, KeyError):
        return True
    return "cuda:nccl" in config or "cuda:fake" in config


def fake_store() -> dist.Store:
    """Register the backend "fake", whose process groups send nothing, and return a store for it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_mode() -> Any:
    """A mode of tensors without contents; a `DeviceMesh` inside may hold real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_of(x: torch.Tensor) -> Any:
    """The mode of a fake tensor; None for other tensors."""
    return getattr(x, "fake_mode", None)


@contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true for code that is traced without torch.compile."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def drop_assertions(graph: torch.fx.Graph) -> None:
    """Erase the checks of dtypes that tracing leaves behind; dtypes are fixed here."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def relabel(x: torch.Tensor, device: torch.device) -> None:
    """Put a fake tensor on another device, in place; shared storages stay shared."""
    x.fake_device = device  # type: ignore[attr-defined]


def copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Copy a graph with its order, names, metadata and calling convention."""
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    new = torch.fx.Graph(tracer_cls=graph._tracer_cls)
    new.graph_copy(graph, copied)
    new.set_codegen(copy.copy(graph._codegen))
    for output in graph.find_nodes(op="output"):
        new.node_copy(output, copied.__getitem__)
    return new


def copy_module(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a module with its graph and metadata; parameters and submodules that the graph names are shared.

    Its code is generated when it first runs or is read. A compiler does neither, and 17,000 nodes take seconds.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    made = _LazyGraphModule(gm, copy_graph(gm.graph), type(gm).__name__)
    made.meta = dict(gm.meta)
    return made


def activation_offloads() -> Any:
    """Operators that copy tensors to pinned memory of the host and back; ``NotImplementedError`` without them."""
    try:
        importlib.import_module("torch._functorch._activation_offloading.offload_ops")
    except ImportError as error:
        raise NotImplementedError(f"torch {torch.__version__} has no operators for offload=True") from error
    return torch.ops.ao


def joint_graph(
    function: Callable[..., tuple[torch.Tensor, ...]], inputs: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """ATen graph of a function and its backward: ``primals_*`` and ``tangents_*`` to outputs and gradients."""
    from torch._functorch.aot_autograd import aot_export_joint_simple

    return aot_export_joint_simple(function, tuple(inputs), trace_joint=True)  # type: ignore[return-value]


def partition(joint: torch.fx.GraphModule, num_outputs: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut a joint graph in two where the least must be saved, as torch.compile does.

    Nodes with ``meta["recompute"] == CheckpointPolicy.MUST_RECOMPUTE`` are recomputed in the backward.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, (), num_fwd_outputs=num_outputs)


def has_hidden_effects(target: Any) -> bool:
    """Whether torch keeps calls of ``target`` in place for their effects.

    Assertions, profiler ranges and operators registered as effectful; arguments mutated by schema do not count.
    """
    from torch._higher_order_ops.effects import _get_effect

    if target in torch.fx.node._side_effectful_functions:
        return True
    operator = isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    return operator and _get_effect(target) is not None


def decomposes(op: torch._ops.OpOverload) -> bool:
    """Whether ``op`` is defined by other operators alone; an alias of its schema may then be a copy."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has the backend "fake", where no rank answers."""
    return "fake" in dist.get_backend_config(group)


def compile_aot_eager(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], schedule: Callable[[torch.fx.GraphModule], torch.fx.GraphModule]
) -> Callable[..., Any]:
    """Compile by "aot_eager", with ``schedule`` applied to the forward and the backward graph."""
    from torch._dynamo.backends import debugging

    def compiler(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        # Where a checkpoint draws random numbers, the partitioner leaves nodes without "val"; Inductor also adds it.
        if any("val" not in node.meta for node in graph.graph.nodes if node.op == "call_function"):
            from torch._inductor.compile_fx import fake_tensor_prop

            fake_tensor_prop(graph, given)
        return debugging.boxed_nop(schedule(graph), list(given))

    # The cache that aot_eager turns on does not know of the schedule.
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
    """Compile by "inductor", with ``schedule`` as its last change to each forward and backward graph, in place.

    Args:
        fingerprint: digest of what ``schedule`` depends on, for Inductor's caches; None keeps graphs out of them.
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
    patches |= {"post_grad_custom_post_pass": Pass(), "reorder_for_compute_comm_overlap": False}
    for name in ("enable_overlap_scheduling", "enable_simple_overlap"):  # the latter from torch 2.14 on
        if hasattr(config.aten_distributed_optimizations, name):
            patches[f"aten_distributed_optimizations.{name}"] = False
    return compile_fx(gm, list(inputs), config_patches=patches)  # type: ignore[return-value]


def keep_order(graph: torch.fx.Graph, after: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]) -> None:
    """Make Inductor run each of these nodes after others of the graph, by control dependencies; in place."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in after.items()})


def assume_symbols(size: Any, numbers: int | Mapping[str, int]) -> int:
    """Value of ``size`` with a number for each symbol in it: one for all, or one by its name."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    known = numbers if isinstance(numbers, Mapping) else dict.fromkeys(map(str, expression.free_symbols), numbers)
    return int(expression.subs({symbol: known[str(symbol)] for symbol in expression.free_symbols}))


def dump_graph(gm: torch.fx.GraphModule, keep: Sequence[str]) -> bytes:
    """Pickle a graph with these entries of its nodes' metadata and without tensor data."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(gm, Options(ops_filter=None, node_metadata_key_filter=lambda key: key in keep))


def load_graph(data: bytes) -> torch.fx.GraphModule:
    """Load a graph that `dump_graph` wrote; its tensors are fake."""
    from torch.fx._graph_pickler import GraphPickler

    found: Any = GraphPickler.loads(data, fake_mode())
    return found


def torch_overlap_pass(
    gm: torch.fx.GraphModule, estimate: Callable[[torch.fx.Node, int | None], float | None], *, bucket: bool
) -> torch.fx.GraphModule:
    """Run PyTorch's own overlap pass on ``gm``, which it may change, at the costs of ``estimate``.

    The pass also asks the local GPU for FLOP/s and bandwidth, and counts GPU memory only. So a private copy of its
    module runs: it asks for nothing and counts all memory. ``NotImplementedError`` where this torch has another pass,
    or none.
    """
    import importlib.util
    import sys

    name = "torch._inductor.fx_passes.overlap_scheduling"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or spec.loader is None:
        raise NotImplementedError(f"torch {torch.__version__} has no {name}")
    # A sibling of the original, whose relative imports it keeps.
    spec = importlib.util.spec_from_file_location(f"{name}_of_spanwise", spec.origin)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up while the module runs
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    try:
        module.estimate_roofline_runtime_ms = lambda node: 0.0
        module.MemoryTracker = functools.partial(module.MemoryTracker, device_filter=lambda device: True)
        known = inspect.signature(module.schedule_overlap_bucketing)
        newer = {"pre_bucketing_fsdp_collectives": False}  # torch 2.13
        run = functools.partial(
            module.schedule_overlap_bucketing,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            collective_bucketing=bucket,
            **{name: value for name, value in newer.items() if name in known.parameters},
        )
        known.bind(gm, **run.keywords)
    except (AttributeError, TypeError) as error:
        raise NotImplementedError(f"torch {torch.__version__} has another overlap pass: {error}") from error
    return run(gm)

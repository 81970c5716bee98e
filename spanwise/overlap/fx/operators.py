"""Traits of a node by its operator: whether it starts or waits for a collective, reads, writes, or is free.

Operators are recognised by `OpOverload` and schema, never by name: a schema's ``group_name`` is the group, arguments
that it marks as written are written. An operator whose schema says too little is a barrier. ``isend``, ``irecv`` and
``batch_p2p_ops`` of ``_c10d_functional`` keep the order in which two ranks send and receive (`chains`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.dag import GraphError

_ops = _torch.functional_collectives
_autograd = _torch.autograd_collectives

# Operators by kind of collective; each starts one and returns before its end.
ALL_GATHER = frozenset({
    _ops.all_gather_into_tensor.default, _ops.all_gather_into_tensor_out.default,
    _ops.all_gather_into_tensor_coalesced.default, _autograd.all_gather_into_tensor.default
})  # fmt: skip
REDUCE_SCATTER = frozenset({
    _ops.reduce_scatter_tensor.default, _ops.reduce_scatter_tensor_out.default,
    _ops.reduce_scatter_tensor_coalesced.default, _autograd.reduce_scatter_tensor.default
})  # fmt: skip
ALL_REDUCE = frozenset({
    _ops.all_reduce.default, _ops.all_reduce_.default, _ops.all_reduce_coalesced.default,
    _ops.all_reduce_coalesced_.default
})  # fmt: skip
ALL_TO_ALL = frozenset({_ops.all_to_all_single.default, _autograd.all_to_all_single.default})
BROADCAST = frozenset({_ops.broadcast.default, _ops.broadcast_.default})
# Messages between two ranks; torch 2.12 has no such operators.
MESSAGES = frozenset(getattr(_ops, n).default for n in ("isend", "irecv", "batch_p2p_ops") if hasattr(_ops, n))
STARTS = ALL_GATHER | REDUCE_SCATTER | ALL_REDUCE | ALL_TO_ALL | BROADCAST | MESSAGES
WAIT = _ops.wait_tensor.default
# Copies of PyTorch's activation offloading, by schema, with the stream that each takes in place of a group's.
COPIES: Mapping[str, str] = MappingProxyType({"ao::offload": "to host", "ao::reload": "from host"})

# Coalesced operators that return new tensors, with the operator that does the same to one tensor.
COALESCED: Mapping[Any, Any] = MappingProxyType({
    _ops.all_gather_into_tensor_coalesced.default: _ops.all_gather_into_tensor.default,
    _ops.reduce_scatter_tensor_coalesced.default: _ops.reduce_scatter_tensor.default,
    _ops.all_reduce_coalesced.default: _ops.all_reduce.default,
})  # fmt: skip

# All other operators of these namespaces communicate in other ways, by groups or by pointers.
# "dc" is DeepSpeed's DeepCompile, whose gathers and reductions share state.
_COMMUNICATION = frozenset({
    "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "_dtensor", "dc"
})  # fmt: skip

_aten = torch.ops.aten
_EMPTY = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided}
)
# Views whose schema does not say so.
_UNSAFE_VIEWS = frozenset({_aten._unsafe_view.default})
# Operators that write arguments of these names although their schema does not say so.
_STATISTICS = frozenset({"running_mean", "running_var"})
_UNSAID_WRITES: Mapping[str, frozenset[str]] = MappingProxyType({
    **dict.fromkeys((
        "aten::_batch_norm_impl_index", "aten::batch_norm", "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_update_stats", "aten::cudnn_batch_norm",
        "aten::instance_norm", "aten::miopen_batch_norm", "aten::native_batch_norm",
    ), _STATISTICS),
    "fsdp::all_gather_copy_in": frozenset({"all_gather_output"}),
})  # fmt: skip

# Pointwise operators without torch's tag.
_UNTAGGED = frozenset({
    _aten._to_copy, _aten.clone, _aten.copy, _aten.copy_, _aten.fill, _aten.full, _aten.full_like, _aten.native_dropout,
    _aten.ones_like, _aten.where, _aten.zeros_like, torch.ops.prims.iota
})  # fmt: skip

# Begin and end of a range for the profiler. torch's optimizers put them around their steps, where nothing could cross
# into the optimizer if they were barriers.
_profiler = torch.ops.profiler
_RANGES = frozenset(
    {_profiler._record_function_enter, _profiler._record_function_enter_new, _profiler._record_function_exit}
)

# Assertions on sizes that the host has. torch.export puts one before every cast. Sizes that are known at run time, such
# as those of an all-to-all between experts, have two each: as barriers they would keep all collectives in place.
_SIZE_CHECKS = frozenset({
    _aten._assert_scalar, _aten._assert_tensor_metadata, _aten.sym_constrain_range, _aten.sym_constrain_range_for_size
})  # fmt: skip

# Modules of functions on sizes: operator.add, math.ceil, torch.sym_max, …
_ARITHMETIC = frozenset({"_operator", "builtins", "math", "torch"})

# Higher-order operators that only run subgraphs, kernels or an operator on their arguments. A subgraph that does more
# than compute makes them barriers.
_PLAIN_HOPS = frozenset({
    "associative_scan", "auto_functionalized", "auto_functionalized_v2", "cond", "control_deps", "flex_attention",
    "flex_attention_backward", "invoke_subgraph", "map_impl", "out_dtype", "scan", "triton_kernel_wrapper_functional",
    "while_loop"
})  # fmt: skip
# Runs a Triton kernel that may write any of its tensors (only Triton can tell which), and that may communicate if it
# gets pointers.
_TRITON = "triton_kernel_wrapper_mutation"
_RANDOM_HOPS = frozenset({"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"})


class Role(enum.Enum):
    """COMPUTE uses its arguments only; FREE does nothing at run time; nothing moves across a BARRIER.

    A GUARD does nothing on the device; no collective that starts after it moves before it.
    """

    COMPUTE = enum.auto()
    FREE = enum.auto()
    GUARD = enum.auto()
    START = enum.auto()
    WAIT = enum.auto()
    BARRIER = enum.auto()


@dataclasses.dataclass(frozen=True)
class Traits:
    """Traits of an operator.

    Attributes:
        ordered: whether it keeps its place among all such operators: it draws from a generator, or marks a range.
        communicates: whether it is a barrier because it communicates.
        names: arguments in the order of the schema; empty without a schema.
        writes: arguments that it writes.
        aliases: for each result, the arguments whose memory it may be.
        never_copies: whether a result with aliases is always one of them, never a copy.
        pointwise: whether a compiler runs it in one loop with its pointwise neighbours.
    """

    role: Role
    ordered: bool = False
    communicates: bool = False
    names: tuple[str, ...] = ()
    writes: frozenset[str] = frozenset()
    aliases: tuple[frozenset[str], ...] = ()
    never_copies: bool = True
    pointwise: bool = False

    @functools.cached_property
    def is_alias(self) -> bool:
        """Whether a result may lie in an argument's memory."""
        return any(self.aliases)


def traits(node: fx.Node) -> Traits:
    """Traits of the operator that `node` calls, with those of the subgraphs that it runs."""
    target = node.target
    if node.op != "call_function":
        return Traits(Role.BARRIER)
    if isinstance(target, _torch.OpOverload):
        known = _of_operator(target)
        if known.ordered and "dropout_p" in known.names and not dict(arguments(node, known)).get("dropout_p"):
            return dataclasses.replace(known, ordered=False)
        return known
    if isinstance(target, _torch.HigherOrderOperator):
        return _of_higher_order(node, target)
    if target is operator.getitem:
        return Traits(Role.FREE)
    numbers = getattr(target, "__module__", None) in _ARITHMETIC and not _torch.has_hidden_effects(target)
    on_tensors = any(map(tensors_of, (node, *node.all_input_nodes)))
    return Traits(Role.FREE if numbers and not on_tensors else Role.BARRIER)


@functools.cache
def _of_operator(op: _torch.OpOverload) -> Traits:
    arguments, returns = op._schema.arguments, op._schema.returns
    names = tuple(argument.name for argument in arguments)
    writes = frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    writes |= _UNSAID_WRITES.get(op._schema.name, frozenset())
    aliases = tuple(_aliased(result.alias_info, arguments) for result in returns)
    if op in _UNSAFE_VIEWS:
        aliases = (frozenset(names[:1]),)
    copies = _torch.decomposes(op)
    known = functools.partial(Traits, names=names, writes=writes, aliases=aliases, never_copies=not copies)
    if op in STARTS or op._schema.name in COPIES:
        return known(Role.START)
    if op is WAIT or op._schema.name == "ao::wait_tensor":
        return known(Role.WAIT)
    handles = any("torch.classes." in str(a.type) for a in arguments)
    if op.namespace in _COMMUNICATION or "group_name" in names or "process_group" in names:
        return known(Role.BARRIER, communicates=True)
    if op.overloadpacket in _SIZE_CHECKS:
        return known(Role.FREE)
    if op.overloadpacket in _RANGES:
        return known(Role.FREE, ordered=True)
    if op._schema.name == "spanwise::compare_call":
        return known(Role.GUARD)
    nothing = not returns and not writes
    if handles or nothing or _torch.has_hidden_effects(op) or op.overloadpacket in (_aten.set_, _aten.resize_):
        return known(Role.BARRIER)
    random = torch.Tag.nondeterministic_seeded in op.tags or "generator" in names
    view = bool(aliases) and not writes and all(aliases) and not copies
    free = view or op.overloadpacket in _EMPTY
    pointwise = torch.Tag.pointwise in op.tags or op.overloadpacket in _UNTAGGED
    return known(Role.FREE if free else Role.COMPUTE, ordered=random, pointwise=pointwise)


def _aliased(info: Any, arguments: Any) -> frozenset[str]:
    """Arguments that share an alias label with a result; all labelled ones if the label is that of list elements."""
    if info is None:
        return frozenset()
    labelled = {a.name: a.alias_info.before_set | a.alias_info.after_set for a in arguments if a.alias_info is not None}
    label = info.before_set | info.after_set
    return frozenset(name for name, set_ in labelled.items() if set_ & label) or frozenset(labelled)


def _of_higher_order(node: fx.Node, hop: _torch.HigherOrderOperator) -> Traits:
    name = hop.name()
    if name == _TRITON:
        given = [tensor.dtype for arg in node.all_input_nodes for tensor in tensors_of(arg)]
        if torch.int64 in given or torch.uint64 in given:
            return Traits(Role.BARRIER)
        return Traits(Role.COMPUTE, names=("kwargs",), writes=frozenset({"kwargs"}))
    if _torch.has_hidden_effects(hop) or name not in _PLAIN_HOPS | _RANDOM_HOPS:
        return Traits(Role.BARRIER)
    inside = [_of_operator(arg) for arg in node.args if isinstance(arg, _torch.OpOverload)]
    for arg in node.all_input_nodes:
        if arg.op == "get_attr" and isinstance(graph := attribute(arg), fx.GraphModule):
            inside += [traits(inner) for inner in graph.graph.nodes if inner.op.startswith("call_")]
    # An auto-functionalized operator writes copies. Other writes make a barrier.
    functional = name.startswith("auto_functionalized")
    if any(t.role not in (Role.COMPUTE, Role.FREE) or (t.writes and not functional) for t in inside):
        return Traits(
            Role.BARRIER, communicates=any(t.communicates or t.role in (Role.START, Role.WAIT) for t in inside)
        )
    return Traits(Role.COMPUTE, ordered=name in _RANDOM_HOPS or any(t.ordered for t in inside))


def operator_name(node: fx.Node) -> str:
    """Name of what a node calls, such as ``_c10d_functional.isend``."""
    target = node.target
    if isinstance(target, _torch.OpOverload):
        return str(target.overloadpacket)
    return str(getattr(target, "__name__", target))


def attribute(node: fx.Node) -> Any:
    """Value of a ``get_attr`` node; None if the graph has no module or the module lacks the attribute."""
    try:
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        return None


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Tensors of ``meta["val"]``; lists and tuples are flattened in order."""
    value = node.meta.get("val")
    return [value] if isinstance(value, torch.Tensor) else tensors_in(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in a value; lists and tuples are flattened in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or type(value) is int:
        return []
    return [leaf for leaf in _torch.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def lacks_value(node: fx.Node, known: Traits) -> bool:
    """Whether a call has no ``meta["val"]`` and needs one: it may return tensors."""
    if "val" in node.meta or (known.role is Role.BARRIER and not node.users):
        return False
    if isinstance(node.target, _torch.OpOverload):
        return any("Tensor" in str(result.type) for result in node.target._schema.returns)
    whole = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if node.target is operator.getitem and isinstance(whole, (list, tuple)) and isinstance(node.args[1], int):
        return bool(tensors_in(whole[node.args[1]]))  # tracing gives items that are no tensors no value: None, sizes
    return True


def arguments(node: fx.Node, known: Traits) -> Iterator[tuple[str, Any]]:
    """Given arguments by their names in the schema."""
    yield from zip(known.names, node.args, strict=False)
    yield from node.kwargs.items()


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """`arguments` of a node, as a dict."""
    return dict(arguments(node, traits(node)))


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective, a message or a copy."""
    return traits(node).role is Role.START


def host_copy(node: fx.Node) -> str:
    """ "to host" or "from host" for a node that copies there or from there, asynchronously or not; else ""."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name in COPIES or name not in ("aten::_to_copy", "prims::device_put"):
        return COPIES.get(name, "")
    given, made = ({t.device.type for n in nodes for t in tensors_of(n)} for nodes in (node.all_input_nodes, [node]))
    if given == made:
        return ""
    return "to host" if made == {"cpu"} else "from host" if given == {"cpu"} else ""


def received(node: fx.Node) -> list[fx.Node | None]:
    """Of each result of `MESSAGES`, the operand in which it is received; None for one that is sent."""
    given = named_arguments(node)
    names, operands = given.get("op_list", [operator_name(node)]), given.get("tensors") or [given["tensor"]]
    return [x if name.endswith("irecv") else None for name, x in zip(names, operands, strict=True)]


def peers_of(node: fx.Node) -> list[str]:
    """What `MESSAGES` keep their order with: a peer, and of a batch also its group; nothing for other nodes."""
    if node.target not in MESSAGES:
        return []
    given, group = named_arguments(node), group_of(node)
    if (batch := given.get("peer_list")) is not None:
        return [group, *(f"{group} {peer}" for peer in batch)]
    return [f"{group} {given.get('dst', given.get('src'))}"]


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """All nodes of an argument."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        yield from nodes_in(list(value.values()))


def group_of(node: fx.Node) -> str:
    """Name of the process group of a collective, or the stream of a copy; `GraphError` if the graph does not tell."""
    if (copies := host_copy(node)) != "":
        return copies
    group = named_arguments(node).get("group_name")
    if isinstance(group, torch.distributed.ProcessGroup):
        return _torch.group_name(group)
    if not isinstance(group, str) or not group:
        raise GraphError(node.name, f"its process group must be known when the graph is made, got {group!r}")
    return group


def storage_of(tensor: torch.Tensor) -> int | None:
    """Identity of the storage while `tensor` lives; None for layouts without a storage."""
    try:
        return _torch.storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def is_free(node: fx.Node, known: Traits | None = None) -> bool:
    """Whether nothing runs on the device: views, items of tuples, uninitialised memory, arithmetic on sizes."""
    known = known or traits(node)
    if known.role in (Role.FREE, Role.GUARD):
        return True
    if known.role is not Role.COMPUTE or known.writes:
        return False
    if not known.is_alias and isinstance(node.meta.get("val"), torch.Tensor):
        return False
    results = tensors_of(node)
    if not results:  # sizes
        return True
    if not known.is_alias:
        return False
    # For example a reshape that returned a view.
    given = {storage_of(t) for arg in node.all_input_nodes for t in tensors_of(arg)}
    return all(storage_of(t) in given for t in results)


Cost = Callable[[fx.Node], float]

"""to_dag: the `Dag` of an fx ATen graph, and the way back from its numbers to fx nodes.

    fx graph ─► to_dag ─► Captured (dag, nodes) ─► simulate, schedule ─► emit

A node depends on more than its arguments:

- Memory is read and written in the order of the graph: a reader stays after the last writer, a writer after all earlier
  readers. Aliases are found by schemas, and by fake tensors in ``meta["val"]`` that share a storage.
- A collective reads and writes until its wait; so does a copy to or from the host.
- `chains` adds the rest: random operators, messages between two ranks, and barriers, which communicate in an unknown
  way or touch more than their tensor arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from spanwise.overlap.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.fx import operators
from spanwise.overlap.fx.chains import Chains
from spanwise.overlap.fx.operators import MESSAGES, Cost, Role, Traits, arguments, host_copy, nodes_in, storage_of
from spanwise.overlap.quotient import Quotient, contract


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A `Dag` and its fx graph.

    Attributes:
        nodes: the fx node of each node of `dag`: all calls, in the order of the graph.
        inputs: placeholders and attributes, in the order of the graph; they are not in `dag`.
        barriers: numbers of the barriers.
        outside_waits: numbers of the waits for collectives that the graph does not start. They take no time here, and
            stay behind the last collective and the last compute with time that they follow.
    """

    dag: Dag
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    barriers: tuple[int, ...] = ()
    outside_waits: tuple[int, ...] = ()

    @functools.cached_property
    def contracted(self) -> Quotient:
        """`dag` without its views, for the search."""
        return contract(self.dag)


def bind(dag: Dag, graph: fx.Graph) -> Captured:
    """`dag` with the nodes of a graph that has the same calls in the same order, such as a copy of its graph."""
    inputs = [node for node in graph.nodes if node.op in _INPUTS]
    calls = [node for node in graph.nodes if node.op not in (*_INPUTS, "output")]
    assert len(calls) == len(dag), "the graph is another one"
    return Captured(dag, tuple(calls), tuple(inputs))


def to_dag(gm: fx.GraphModule, cost: Cost) -> Captured:
    """Convert `gm` to a `Dag`; `gm` does not change.

    A collective has one wait in a `Dag`. Of several waits of a coalesced collective, the first is that wait. The others
    take no time and depend on it.

    Memory is counted by storage, from the node that allocates it to the last node that reads or writes it through any
    alias. Results of the graph, and operands of a collective without a wait, live to the end. Inputs and attributes are
    not counted, except for what a backward is given to free: its inputs that are neither parameters nor inputs of the
    forward, which AOTAutograd names ``primals_``. After their last user they count as free.

    Args:
        cost: milliseconds of a node; see `costs`. Not called for nodes that take no time: waits, views, items of
            tuples, uninitialised memory and arithmetic on sizes. Its method ``link(group)``, if any, names what the
            group may share with others, and tells whether it does.

    Raises:
        GraphError: a node before its arguments, a symbolic size, an input or a call without ``meta["val"]``, a start of
            an unknown group, a negative or non-finite cost, or an exception of `cost`. Names the node.

    >>> from spanwise.overlap.fx.capture import CaptureConfig, capture
    >>> config = CaptureConfig(layers=1, dim=64, heads=4, kv_heads=2, ffn=128, seq_len=32, dp=2, device="cpu")
    >>> captured = to_dag(capture(config).forward, lambda node: 1.0)
    >>> len(captured.dag.starts)  # gathers of the parameters
    9
    """
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    builder = _Builder(cost, is_backward=any(name.startswith("tangents") for name in names))
    for node in gm.graph.nodes:
        if node.op == "output":
            builder.returns(node)
        elif node.op in _INPUTS:
            builder.input(node)
        else:
            builder.call(node)
    return builder.captured()


_INPUTS = ("placeholder", "get_attr")
_NO_VALUE = (
    'it has no meta["val"], which gives sizes and aliases: make it with torch.fx.passes.fake_tensor_prop.FakeTensorProp'
    "(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)"
)


@dataclasses.dataclass(slots=True, eq=False)
class _Memory:
    """A storage during the walk over the graph, by numbers of nodes; that of an input has no maker."""

    num_bytes: int = 0
    maker: int = -1
    last_write: int = -1
    readers: list[int] = dataclasses.field(default_factory=list)  # since the last write
    users: list[int] = dataclasses.field(default_factory=list)
    kept: bool = False
    start: int = -1  # the last collective that writes it


_Places = tuple[_Memory, ...]  # where a tensor may lie: one storage, or several if its schema is not exact
_Tensors = list[tuple[int | None, _Places]]  # the identity of each tensor's storage, and where it lies


@dataclasses.dataclass(frozen=True)
class _Collective:
    reads: list[_Memory]
    writes: list[_Memory]
    wait: list[int] = dataclasses.field(default_factory=list)  # its first wait, once found


class _Builder:
    """Nodes, dependencies and storages of the part of a graph that was walked."""

    def __init__(self, cost: Cost, is_backward: bool) -> None:
        self.cost, self.is_backward = cost, is_backward
        self.link = getattr(cost, "link", lambda group: ("", False))
        self.nodes: list[Node] = []
        self.calls: list[fx.Node] = []
        self.number: dict[fx.Node, int] = {}
        self.inputs: list[fx.Node] = []
        self.tensors: dict[fx.Node, _Tensors] = {}
        self.first: dict[fx.Node, list[int]] = {}  # of a tuple: the number of each item's first tensor
        self.outside: dict[int | None, _Memory] = {}  # storages of inputs
        self.made: list[_Memory] = []
        self.given: list[_Memory] = []  # of inputs that the graph may free
        self.collectives: dict[int, _Collective] = {}
        self.chains = Chains()
        self.last_work: dict[Kind, int] = {}  # the last compute and the last collective that take time
        self.outside_waits: list[int] = []

    def input(self, node: fx.Node) -> None:
        self.inputs.append(node)
        own = operators.attribute(node) if node.op == "get_attr" else None
        if node.op == "placeholder" and "val" not in node.meta and node.users:
            raise GraphError(node.name, _NO_VALUE)
        values = operators.tensors_of(node) or operators.tensors_in(own)
        # Two attributes may be one tensor; placeholders may share a storage.
        owners = [own] if isinstance(own, torch.Tensor) else values
        self.tensors[node] = []
        for value, owner in zip(values, owners, strict=True):
            storage = storage_of(owner)
            memory = _Memory() if storage is None else self.outside.setdefault(storage, _Memory())
            self.tensors[node].append((storage_of(value), (memory,)))
            is_freed = self.is_backward and node.op == "placeholder" and not node.name.startswith("primals")
            memory.kept |= not is_freed  # one of several that share a storage keeps it
            if is_freed and not memory.num_bytes:
                memory.num_bytes = self._num_bytes(node, value)
                self.given.append(memory)

    def returns(self, node: fx.Node) -> None:
        self._check_order(node)
        for memory in self._places(node.all_input_nodes):
            memory.kept = True

    def call(self, node: fx.Node) -> None:
        self._check_order(node)
        known = operators.traits(node)
        values = self._checked_values(node, known)
        i, args = len(self.nodes), node.all_input_nodes
        deps = {self.number.get(arg, -1) for arg in args}
        if node.target is operator.getitem:
            given = self.tensors[node] = self._item(node, values)
        else:
            given = [pair for arg in args for pair in self.tensors.get(arg, ())]
        reads = [memory for _, places in given for memory in places]  # may repeat
        writes: list[_Memory] = []
        if known.writes:
            written = [value for name, value in arguments(node, known) if name in known.writes]
            writes = self._places(nodes_in(written))
        elif node.target in MESSAGES:
            writes = self._places(filter(None, operators.received(node)))
        kind, start = Kind.COMPUTE, -1
        barrier = known.role is Role.BARRIER

        if known.role is Role.START:
            kind = Kind.START
        elif known.role is Role.WAIT:
            start = max((memory.start for memory in reads), default=-1)  # the last collective that wrote it
            if start < 0:  # started outside of the graph; nothing is gained by waiting for it sooner
                writes = reads
                deps.update(self.last_work.values())
                self.outside_waits.append(i)
            elif start in self.collectives:
                writes = reads
                kind, reads = self._wait(i, start, reads, deps)
            else:  # a barrier like the node that it waits for
                barrier = True
        _touch(i, reads, writes, deps)
        if node.target is operator.getitem:
            made = reads
        else:
            found = self.tensors[node] = self._results(node, known, i, given, values)
            made = [memory for _, places in found for memory in places]
            for memory in made:
                memory.users.append(i)
        if getattr(node.target, "overloadpacket", None) is torch.ops.aten.set_:  # two tensors share memory from now on
            both = tuple(self._places(args))
            for arg in (node, *args):
                self.tensors[arg] = [(storage, both) for storage, _ in self.tensors[arg]]
        if kind == Kind.START:
            self.collectives[i] = _Collective(reads, made)
        if kind == Kind.START or known.communicates:
            for memory in (*made, *writes):
                memory.start = i

        peers = operators.peers_of(self.calls[start] if kind == Kind.WAIT else node)
        self.chains.link(i, deps, known, kind, peers, barrier)
        self.number[node] = i
        self.calls.append(node)
        group = operators.group_of(node) if kind == Kind.START else ""
        start, ms = start if kind == Kind.WAIT else -1, self._ms(node, known)
        link, is_shared = self.link(group) if group else ("", False)
        self.nodes.append(Node(node.name, kind, ms, tuple(sorted(deps)), group, start, link if is_shared else ""))
        if self.nodes[-1].ms > 0:
            self.last_work[kind] = i

    def _wait(self, i: int, start: int, reads: list[_Memory], deps: set[int]) -> tuple[Kind, list[_Memory]]:
        """Add dependencies of a wait for `start`; return its kind and all memory that it reads."""
        collective = self.collectives[start]
        if collective.wait:
            deps.add(collective.wait[0])
            return Kind.COMPUTE, reads
        collective.wait.append(i)
        deps.add(start)
        return Kind.WAIT, list(dict.fromkeys((*reads, *collective.reads, *collective.writes)))

    def _check_order(self, node: fx.Node) -> None:
        for arg in node.all_input_nodes:
            if arg not in self.tensors:
                raise GraphError(
                    node.name, f"it uses {arg.name!r}, which does not come before it: a cycle, or no order"
                )

    def _checked_values(self, node: fx.Node, known: Traits) -> list[torch.Tensor]:
        if operators.lacks_value(node, known):
            raise GraphError(node.name, _NO_VALUE)
        values = operators.tensors_of(node)
        for tensor in values:
            if any(type(size) is not int for size in tensor.shape):
                raise GraphError(node.name, f"its shape {tuple(tensor.shape)} is symbolic; give numbers with sizes=")
        return values

    def _places(self, nodes: Iterable[fx.Node]) -> list[_Memory]:
        """Storages of the tensors of `nodes`, each once."""
        found: list[_Memory] = []
        for node in nodes:
            for _, places in self.tensors.get(node, ()):
                found += places
        return found if len(found) < 2 else list(dict.fromkeys(found))

    def _results(
        self, node: fx.Node, known: Traits, i: int, given: _Tensors, values: Sequence[torch.Tensor]
    ) -> _Tensors:
        """Where the results lie: in the memory of arguments (`given`), or in new memory."""
        if known.role is Role.WAIT:
            return [(storage_of(value), given[0][1]) for value in values]
        if len(given) == 1 == len(values) and known.is_alias and known.never_copies:  # a view of its one argument
            return [(storage_of(values[0]), given[0][1])]
        by_storage = dict(given)
        by_storage.pop(None, None)
        by_name = dict(arguments(node, known)) if known.is_alias else {}
        lands = operators.received(node) if node.target in MESSAGES else ()
        unknown = (known.role is Role.BARRIER and not known.names) or known.communicates  # may return any argument
        found: _Tensors = []
        new: dict[int | None, _Memory] = {}  # results of one node that share a storage
        for at, value in enumerate(values):
            storage = storage_of(value)
            places: _Places = tuple(self._places(filter(None, lands[at : at + 1])))
            if by_name:
                # One result may be a list of tensors, or no tensor.
                aliased = known.aliases[at : at + 1] if len(known.aliases) == len(values) else known.aliases
                nodes = [n for names in aliased for name in names for n in nodes_in(by_name.get(name))]
                if len(nodes) > 1 and len(nodes) == len(values):  # a list, item by item
                    nodes = [nodes[at]]
                places = tuple(self._places(nodes))
            if storage in by_storage:
                places = tuple(dict.fromkeys((*places, *by_storage[storage]))) if places else by_storage[storage]
            elif not (places and known.never_copies):
                if unknown:
                    places = tuple(self._places(node.all_input_nodes))
                if storage not in new or storage is None:
                    new[storage] = _Memory(self._num_bytes(node, value), i)
                    self.made.append(new[storage])
                places = (*places, new[storage])
            found.append((storage, places))
        return found

    def _item(self, node: fx.Node, values: Sequence[torch.Tensor]) -> _Tensors:
        source, key = node.args
        if not isinstance(source, fx.Node):  # a literal tuple
            return [(storage_of(value), tuple(self._places(node.all_input_nodes))) for value in values]
        given, whole = self.tensors[source], source.meta.get("val")
        if isinstance(whole, (list, tuple)) and isinstance(key, int) and 0 <= key < len(whole):
            if source not in self.first:
                self.first[source] = [0, *itertools.accumulate(len(operators.tensors_in(item)) for item in whole)]
            before = self.first[source][key]
            return given[before : before + len(values)]
        every = tuple(dict.fromkeys(m for _, places in given for m in places))
        return [(storage_of(value), every) for value in values]

    def _num_bytes(self, node: fx.Node, value: torch.Tensor) -> int:
        if host_copy(node) == "to host" or any(host_copy(user) == "from host" for user in node.users):
            return 0  # memory of the host
        try:
            size = value.untyped_storage().nbytes()
        except (NotImplementedError, RuntimeError):  # no storage
            size = value.numel() * value.element_size()
        if type(size) is not int:
            raise GraphError(node.name, f"its storage has {size} bytes; give numbers with sizes=")
        return size

    def _ms(self, node: fx.Node, known: Traits) -> float:
        if known.role is Role.WAIT or operators.is_free(node, known):
            return 0.0
        try:
            return float(self.cost(node))
        except GraphError:
            raise
        except Exception as error:
            raise GraphError(node.name, f"its cost is not known: {type(error).__name__}: {error}") from error

    def captured(self) -> Captured:
        for collective in self.collectives.values():
            if not collective.wait:
                for memory in (*collective.reads, *collective.writes):
                    memory.kept = True
        storages = tuple(
            Storage(memory.num_bytes, memory.maker, tuple(dict.fromkeys(memory.users)), memory.kept)
            for memory in (*self.made, *(one for one in self.given if one.users and not one.kept))
            if memory.num_bytes
        )
        dag = Dag(tuple(self.nodes), storages)
        return Captured(
            dag, tuple(self.calls), tuple(self.inputs), tuple(self.chains.barriers), tuple(self.outside_waits)
        )


def _touch(i: int, reads: Iterable[_Memory], writes: Iterable[_Memory], deps: set[int]) -> None:
    """Record that node `i` reads and writes memory, and add the dependencies that follow."""
    for memory in reads:
        deps.add(memory.last_write)
        memory.readers.append(i)
        memory.users.append(i)
    for memory in writes:
        deps.add(memory.last_write)
        deps.update(memory.readers)
        memory.last_write, memory.readers = i, []

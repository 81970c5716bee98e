"""Capture: the ATen graphs of a Llama-like step under data × context × tensor parallelism, without ranks or devices.

    CaptureConfig ─► fake process groups ─► fake tensors through `decoder` ─► forward and backward graph ─► graph

What `spanwise overlap` schedules when it is given no saved graph, and what benchmarks and tests of the other modules
run on. The parallelism is torchtitan's: parameters sharded over dp and cp (FSDP2: every matrix is gathered in the
forward, gathered again in the backward, its gradient reduce-scattered in float32), sequence and heads over tp
(Megatron-LM: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022), tokens over
cp. Collectives are functional: starts and waits are nodes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy

from spanwise import _torch
from spanwise.overlap.fx.decoder import Attention, Axis, Decoder, flash, inputs_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """A decoder and how it is spread over ranks.

    Attributes:
        layers, dim, heads, kv_heads, ffn: of the decoder; the head dim is ``dim // heads``.
        vocab: with an embedding before the layers and a loss after them, both split over tp; None for layers alone,
            from hidden states to hidden states.
        seq_len, batch: tokens of a sequence before cp shards it, and sequences of a data-parallel rank.
        dp, cp, tp: sizes of the mesh axes, tp innermost: the ranks of a tp group are neighbours.
        dtype: of compute and of gathered parameters; shards and reduced gradients are float32 (float64 if `dtype` is).
        device: "cuda" or "cpu", whose operators the graph has. No such device is needed.
        rank: whose graphs; ranks differ in the rows of the vocabulary that they hold.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    seq_len: int
    batch: int = 1
    vocab: int | None = None
    dp: int = 1
    cp: int = 1
    tp: int = 1
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "kv_heads", "ffn", "seq_len", "batch", "dp", "cp", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, dp * cp * tp = {self.num_ranks}), got {self.rank}")
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f'device must be "cuda" or "cpu", got {self.device!r}')
        shards = self.dp * self.cp
        for name, value, divisor, of in (
            ("dim", self.dim, 2 * self.heads, "2 * heads"),
            ("heads", self.heads, self.kv_heads, "kv_heads"),
            ("kv_heads", self.kv_heads, self.tp, "tp"),
            ("ffn", self.ffn, self.tp * shards, "tp * dp * cp"),
            ("vocab", self.vocab or 0, self.tp * shards, "tp * dp * cp"),
            ("dim", self.dim, shards, "dp * cp"),
            ("kv_heads * head dim", self.kv_heads * self.head_dim, self.tp * shards, "tp * dp * cp"),
            ("seq_len", self.seq_len, self.cp * self.tp, "cp * tp"),
        ):
            if value % divisor:
                raise ValueError(f"{name} must be a multiple of {of} = {divisor}, got {value}")

    @property
    def num_ranks(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


@dataclasses.dataclass(frozen=True)
class Graphs:
    """What was captured.

    Attributes:
        forward: from parameters and inputs to outputs and what is saved.
        backward: from what is saved and the outputs' gradients to the gradients.
        axes: by "dp" (which is dp and cp together), "cp", "tp".
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    axes: Mapping[str, Axis]


@contextlib.contextmanager
def fake_world(config: CaptureConfig) -> Iterator[dict[str, Axis]]:
    """All process groups of one rank, which send nothing; gone afterwards. Group names are the same every time.

    Raises:
        RuntimeError: this process has process groups of its own.
    """
    if dist.is_initialized():
        raise RuntimeError("graphs are captured with process groups of their own; call destroy_process_group() first")
    dist.init_process_group("fake", rank=config.rank, world_size=config.num_ranks, store=_torch.fake_store())
    try:
        tp_index, outer = config.rank % config.tp, config.rank // config.tp
        first = outer // config.cp * config.cp
        ranks = {
            "dp": range(tp_index, config.num_ranks, config.tp),
            "cp": range(first * config.tp + tp_index, (first + config.cp) * config.tp, config.tp),
            "tp": range(outer * config.tp, (outer + 1) * config.tp),
        }
        axes = {}
        for axis, members in ranks.items():
            name = ""
            if len(members) > 1:
                name = _torch.group_name(dist.new_group(list(members), group_desc=axis))
            axes[axis] = Axis(name, tuple(members), members.index(config.rank))
        yield axes
    finally:
        dist.destroy_process_group()


def capture(config: CaptureConfig, attention: Callable[[DeviceMesh], tuple[Attention, Any]] | None = None) -> Graphs:
    """Trace a step of the model.

    Args:
        attention: for cp > 1: called with the cp mesh, it returns the attention of shards, and what that takes beside
            them, a pytree (a plan, say) whose tensors become the graph's last inputs; what these hold is known to
            `flops` as ``meta["known"]``. While it is traced, ``torch.compiler.is_compiling()`` is true: a plan has to
            have ``keep_kv=True``.

    Raises:
        ValueError: cp > 1 without `attention`.
        RuntimeError: this process has process groups of its own.
    """
    if config.cp > 1 and attention is None:
        raise ValueError(f"cp = {config.cp}: pass attention=, which exchanges K/V between the shards")
    with fake_world(config) as axes:
        attend: Attention = flash(config.device)
        given: Any = None
        if attention is not None:
            group = _torch.find_group(axes["cp"].name) if config.cp > 1 else dist.new_group([config.rank])
            attend, given = attention(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",)))
        leaves, spec = _torch.tree_flatten(given)
        real = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def attend_with(tensors: Iterable[torch.Tensor], *qkv: torch.Tensor) -> torch.Tensor:
            left = iter(tensors)
            tree = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            q, k, v = qkv
            return attend(q, k, v, _torch.tree_unflatten(tree, spec))

        mode = _torch.fake_mode()
        with mode, _torch.compiling():
            inputs = inputs_of(config) + [_torch.to_fake(mode, x) for x in real]
            joint = _torch.joint_graph(Decoder(config, axes, attend_with), inputs)
    placeholders = joint.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders[len(inputs) - len(real) : len(inputs)], real, strict=True):
        node.meta["known"] = value  # spans, by which attention is priced
    _torch.drop_assertions(joint.graph)
    _gather_again(joint, axes["dp"].name)
    forward, backward = _torch.partition(joint, 1)
    for module in (forward, backward):
        if config.device != "cpu":
            relabel(module, torch.device(config.device, 0))
        module.graph.lint()
        module.recompile()
    return Graphs(forward, backward, axes)


def _gather_again(joint: torch.fx.GraphModule, dp: str) -> None:
    """Mark gathered parameters to be gathered again in the backward rather than saved; FSDP2's reshard_after_forward.

    torchtitan's compiled FSDP does the same with a checkpointing policy.
    """
    starts = joint.graph.find_nodes(op="call_function", target=_torch.ALL_GATHER)
    for start in starts:
        if start.args[2] == dp:
            for node in (start, *start.users, *start.all_input_nodes):
                if node.op == "call_function":
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def relabel(module: torch.fx.GraphModule, device: torch.device) -> None:
    """Put a graph of fake tensors on another device, in place: in its values and where a node names one.

    Autograd on fake CUDA tensors needs a torch that has CUDA, so that graphs are traced on the CPU.
    """
    for node in module.graph.nodes:
        for value in _torch.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                _torch.relabel(value, device)
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", device)

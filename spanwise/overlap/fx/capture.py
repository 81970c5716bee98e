"""Capture the ATen graphs of a Llama-like step under data × context × tensor parallelism, without ranks or devices.

    CaptureConfig ─► fake process groups ─► fake tensors through `decoder` ─► forward and backward graph

The parallelism is torchtitan's. Parameters are sharded over dp and cp (FSDP2): every matrix is gathered in the forward
and again in the backward, and its gradient is reduce-scattered in float32. Sequence and heads are sharded over tp
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022), tokens over cp.
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

from spanwise.overlap import _torch
from spanwise.overlap.fx.decoder import Attention, Axis, CaptureConfig, Decoder, flash, inputs_of


@dataclasses.dataclass(frozen=True)
class Graphs:
    """The graphs of a step.

    Attributes:
        joint: forward and backward, as traced on the CPU.
        forward: from parameters and inputs to outputs and saved tensors.
        backward: from saved tensors and the outputs' gradients to the gradients.
        axes: process groups by "dp" (dp and cp together), "cp" and "tp".
    """

    joint: torch.fx.GraphModule
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    axes: Mapping[str, Axis]


@contextlib.contextmanager
def fake_world(config: CaptureConfig) -> Iterator[dict[str, Axis]]:
    """Simulate all process groups of one rank, with the same names every time; ``RuntimeError`` beside real ones."""
    if dist.is_initialized():
        raise RuntimeError("capture simulates process groups; call destroy_process_group() first")
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
            name = _torch.group_name(dist.new_group(list(members), group_desc=axis)) if len(members) > 1 else ""
            axes[axis] = Axis(name, tuple(members), members.index(config.rank))
        yield axes
    finally:
        dist.destroy_process_group()


def capture(config: CaptureConfig, attention: Callable[[DeviceMesh], tuple[Attention, Any]] | None = None) -> Graphs:
    """Trace a step of the model.

    Args:
        attention: required for cp > 1. It is called with the cp mesh and returns the attention of shards and its extra
            argument, a pytree such as a plan. The tensors of that pytree become the graph's last inputs; `flops` reads
            their contents from ``meta["known"]``. ``torch.compiler.is_compiling()`` is true while it is traced, so a
            plan needs ``keep_kv=True``.

    Raises:
        ValueError: cp > 1 without `attention`.
        RuntimeError: torch.distributed is initialized in this process.

    >>> config = CaptureConfig(layers=1, dim=64, heads=4, kv_heads=2, ffn=128, seq_len=32, dp=2, tp=2, device="cpu")
    >>> capture(config).axes["tp"].ranks
    (0, 1)
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
            inputs = inputs_of(config) + [mode.from_tensor(x, static_shapes=True) for x in real]
            joint = _torch.joint_graph(Decoder(config, axes, attend_with), inputs)
    placeholders = joint.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders[len(inputs) - len(real) : len(inputs)], real, strict=True):
        node.meta["known"] = value  # spans: attention is priced by them
    _torch.drop_assertions(joint.graph)
    recompute_gathers(joint, axes["dp"].name)
    forward, backward = _torch.partition(joint, 1)
    for module in (forward, backward):
        if config.device != "cpu":
            relabel(module, torch.device(config.device, 0))
        module.graph.lint()
        module.recompile()
    return Graphs(joint, forward, backward, axes)


def recompute_gathers(joint: torch.fx.GraphModule, group: str) -> None:
    """Mark what `group` gathers to be gathered again in the backward, not saved (FSDP2's ``reshard_after_forward``).

    torchtitan's compiled FSDP does the same with a checkpointing policy.
    """
    all_gather = _torch.functional_collectives.all_gather_into_tensor.default
    for start in joint.graph.find_nodes(op="call_function", target=all_gather):
        if start.args[2] == group:
            for node in (start, *start.users, *start.all_input_nodes):
                if node.op == "call_function":
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def relabel(module: torch.fx.GraphModule, device: torch.device) -> None:
    """Put a graph of fake tensors on another device, in place: its values, and arguments that name a device.

    Graphs are traced on the CPU because autograd on fake CUDA tensors needs a torch with CUDA.
    """
    for node in module.graph.nodes:
        for value in _torch.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                _torch.relabel(value, device)
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", device)

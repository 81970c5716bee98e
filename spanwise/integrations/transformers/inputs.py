"""Whole batches in, this rank's part out: compared over the ranks, planned, cut, labels shifted before the cut.

Plans are compared anyway, but batches of equal document lengths have equal plans.
"""

# B rows, S tokens a row, T tokens of this rank

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import spanwise
from spanwise import _torch
from spanwise._torch import tree_leaves, tree_map
from spanwise.attention import executor
from spanwise.attention.call_log import Call
from spanwise.attention.compare import mesh_ranks, record
from spanwise.integrations.transformers import batches, masks
from spanwise.integrations.transformers.attention import PREFIX
from spanwise.integrations.transformers.batches import ARGUMENT, DESCRIPTIONS, Batch, Documents, PlannedBatch
from spanwise.integrations.transformers.outputs import GlobalLoss
from spanwise.planning.documents import packings
from spanwise.recurrence import recurrence_route

SITE = "_spanwise"  # attribute of a model: its Site
_LABELS = ("labels", "shift_labels", "label_weights", "tree")
# Features of image tokens for deeper layers, a row for each in order, by the argument [B, S] that marks these tokens.
_FEATURES = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}
_NOT_OF_TOKENS = {"position_ids", "attention_mask", *_FEATURES.values(), *DESCRIPTIONS, *_LABELS}
_START_ANEW = ("hunyuan_vl",)  # types of models whose positions start anew at images
_CROSSED = ("encoder_hidden_states", "cross_attention_states")
_CACHES = ("use_cache", "past_key_values", "cache_params")
# Arguments that do not go with a cut batch, and what would work.
_REFUSED = {
    **dict.fromkeys(_CROSSED, "the model reads it by cross attention, and it is not cut; leave it out of the batch"),
    **dict.fromkeys(_CACHES, "a KV cache holds whole sequences; pass use_cache=False"),
    "output_attentions": "it makes no attention weights; call the model without cutting, in evaluation mode",
    "logits_to_keep": "the logits of a rank are its shard's; leave it out",
}


class Parameters:
    """Compares the parameters of a model that train: at its first batch, and after each of two optimizer steps.

    Ranks whose gradients nobody averages print equal losses while their weights drift apart. Parameters that are
    sharded or replicated over ranks of the cp mesh, as by FSDP2, are left out: their owner averages gradients.
    """

    _left, _last = 3, 0  # comparisons to come, and the checksum at the last one

    def checksum(self, model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
        """int64 without dims; 0 if nothing is left to compare."""
        own = _own(model, mesh) if self._left else []
        total = _total([_checksum(x) for x in own])
        # By value: fused optimizers, and those that write to `.data`, leave the versions of tensors as they are.
        self._left, self._last = (self._left - (int(total) != self._last) if own else 0), int(total)
        return total


@dataclasses.dataclass(frozen=True)
class Site:
    """What `context_parallel` leaves on a model."""

    mesh: DeviceMesh  # of the cp axis
    loss_mesh: DeviceMesh  # all axes over which gradients are averaged
    options: Mapping[str, Any]  # of `spanwise.make_plan`
    reduce_loss: bool  # whether the loss is that of all ranks; False for the model's own
    conv_width: int | None  # largest width of a convolution in layers that carry a state; None without such layers
    parameters: Parameters | None  # compared over the cp mesh; None where the user does that

    def __deepcopy__(self, memo: Any) -> Site:  # meshes cannot be copied
        return dataclasses.replace(self, parameters=copy.copy(self.parameters))


def site_of(model: Any) -> Site:
    """What `context_parallel` left on `model`, also inside of wrappers such as PEFT's and DDP's."""
    return getattr(_inside(model), SITE)


def _inside(model: Any) -> Any:
    """The model that `context_parallel` was given; ValueError without one."""
    while not hasattr(model, SITE) and hasattr(model, "module"):
        model = model.module
    if not hasattr(model, SITE):
        raise ValueError(f"{type(model).__name__} is not prepared; call hf.context_parallel(model, mesh) first")
    return model


def prepare(batch: Batch, model: Any, plan: spanwise.Plan | None = None) -> Any:
    """Arguments of this rank's ``model(**arguments)`` for a whole batch.

    ``model(**batch)`` does this itself while the model trains. Call it to cut a batch for evaluation, to give a plan
    that was made elsewhere, or before a model that is compiled as one graph. A collective call over the cp mesh.

    Args:
        batch: a whole batch, the same on all ranks of the cp mesh; as `find_documents` takes it. Tensors ``[B, S, …]``
            are cut. ``labels`` are shifted inside documents and then cut, or follow the edges of the batch's ``tree``;
            ``shift_labels`` are cut as they are. ``label_weights`` ``[1, S]``, beside a tree, weight its labels.
        model: a model after `context_parallel`.
        plan: of this batch, for the ranks of the cp mesh, with a mask for each kind of the model's layers; default: by
            `make_plan`. Outputs of two models hold the same tokens if both got one plan.

    Returns:
        The arguments; tensors of tokens are ``[1, T, …]``, without padding.

    Raises:
        ValueError: a batch that cannot be cut, or a plan of another batch; on all ranks alike.
    """
    model = _inside(model)
    site, config, documents = site_of(model), model.config, batches.find_documents(batch)
    expected = masks.span_masks(config, documents, batch)
    if plan is None:
        plan = masks.plan_documents(documents, expected, config, site.mesh.size(), **site.options)
    _check_plan(plan, documents, site.mesh)
    masks.check_masks(plan, expected, documents)
    device = next(batch[name].device for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None)
    local = plan.local(site.mesh, device)
    check_same(batch, site.mesh, model, site.parameters)
    _check_options(batch, model)
    positions, given, tree = documents.positions, batch.get("position_ids"), documents.tree
    last = (positions if given is None else documents.flat(given, given.dim() - 2)).max().view(1).to(device)
    positions, blocks = spanwise.shard(local, x=positions.to(device)), masks.is_marked(batch, config)
    edges = None if tree is None else spanwise.shard_edges(tree, plan, site.mesh, device=device)
    weights = batch.get("label_weights")
    if weights is not None:
        if edges is None:
            raise ValueError("label_weights go with a tree; for other batches weight the losses of spanwise yourself")
        weights = documents.flat(weights)[:, edges.targets]
    routes = _routes(plan, documents, site, device)
    planned = PlannedBatch(local, plan.layout, documents, positions, last, blocks, edges, weights, *routes)
    dropped = {*DESCRIPTIONS, *_LABELS, *_REFUSED} - {"output_attentions"}
    arguments = {name: x for name, x in batch.items() if x is not None and name not in dropped}
    labels = _labels(batch, planned, site, model)
    read = signature_of(type(model)).parameters
    # Models without attention pass the mask on to their decoder, and not the plan; those with router logits do both.
    requested = masks.NO_ATTENTION in expected and "output_router_logits" not in read
    if config.get_text_config() is config:
        arguments = cut(arguments, planned, type(model).__name__)
    else:  # images are merged into whole sequences, and the decoder's inputs cut
        counts = any(hasattr(x, "get_rope_index") for x in (model, model.base_model))  # positions of images
        requested |= not counts
        name, packed, own = type(model).__name__, documents.packed, "position_ids" in arguments
        if config.model_type in _START_ANEW and (packed or own):
            raise ValueError(f"positions of {name} start anew at images; pad the batch, and leave position_ids out")
        if counts and packed and not own:
            raise ValueError(f"{name} counts positions by row; pass position_ids, [3, B, S]")
        if not counts and not own and "position_ids" in read:  # or encoders would get them
            arguments["position_ids"] = documents.restored(documents.positions[0]).to(device)
    if requested:
        arguments["attention_mask"] = batches.empty_mask(device, planned)
    return arguments | labels | {"use_cache": False, ARGUMENT: planned}


def _check_options(batch: Batch, model: Any) -> None:
    """Raise ValueError for arguments, and attention, that do not go with a cut batch."""
    implementation = model.config.get_text_config()._attn_implementation
    if masks.NO_ATTENTION not in masks.mask_weights(model.config) and not implementation.startswith(PREFIX):
        raise ValueError(f"the attention was set to {implementation!r} after hf.context_parallel; set it before")
    given = {"output_attentions": getattr(model.config, "output_attentions", False)}
    given |= {name: x for name, x in batch.items() if x is not None}
    for argument, reason in _REFUSED.items():
        if not isinstance(given.get(argument, 0), int) or given.get(argument):
            raise ValueError(f"{argument} does not go with context parallelism: {reason}")


def _routes(plan: spanwise.Plan, documents: Documents, site: Site, device: torch.device) -> tuple[Any, ...]:
    """How layers that carry a state pass it on, and how tokens get to their layout and back; empty without them."""
    if site.conv_width is None:
        return ()
    own, mesh = plan.recurrent(), site.mesh
    route = recurrence_route(own, mesh, device, cu_seqlens=documents.cu_seqlens, conv_width=site.conv_width)
    pairs = ((plan, own), (own, plan)) if plan.relayout else ()
    return route, *(spanwise.relayout_route(*pair, mesh, device) for pair in pairs)


signature_of: Callable[[Any], inspect.Signature] = functools.cache(lambda cls: inspect.signature(cls.forward))


def by_name(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments of a module's forward, by name."""
    return dict([*signature_of(type(module)).bind_partial(module, *args).arguments.items()][1:]) if args else {}


def cut(given: Mapping[str, Any], planned: PlannedBatch, who: str) -> dict[str, Any]:
    """Arguments of a model or decoder `who` with every tensor ``[B, S, …]`` cut to ``[1, T, …]``, and position ids.

    Raises:
        ValueError: a tensor that holds neither tokens, nor a number, nor features of image tokens.
    """
    shape = planned.documents.rows, planned.documents.length
    result = {**given, "attention_mask": None}  # there is no padding
    for name, x in given.items():
        if name in _NOT_OF_TOKENS:
            continue
        tensors = [y for y in tree_leaves(x) if isinstance(y, torch.Tensor)]
        if any(y.numel() != 1 and tuple(y.shape[:2]) != shape for y in tensors):
            shapes = [tuple(y.shape) for y in tensors][:4]
            raise ValueError(f"{who} gets {name} of shape {shapes}, not of {shape} tokens; merge it into inputs_embeds")
        result[name] = tree_map(lambda y: batches.shard(planned, y) if torch.is_tensor(y) and y.numel() > 1 else y, x)
    positions = given.get("position_ids")
    own = planned.positions if positions is None else batches.shard(planned, positions, positions.dim() - 2)
    result["position_ids"] = own
    for mask, name in _FEATURES.items():
        if given.get(mask) is not None and given.get(name) is not None:
            visual = given[mask].view(shape)
            rows = (visual.flatten().cumsum(0) - 1).view(shape)
            mine = batches.shard(planned, rows)[batches.shard(planned, visual)]
            result[name] = tree_map(lambda x, mine=mine: x.index_select(0, mine), given[name])
    return result


def _check_plan(plan: spanwise.Plan, documents: Documents, mesh: DeviceMesh) -> None:
    tokens, want = int(documents.cu_seqlens[-1]), documents.cu_seqlens.tolist()
    given, shards = (plan.seq_len, plan.num_ranks), plan.layout.tokens_per_rank.tolist()
    if given != (tokens, mesh.size()):
        raise ValueError(f"the plan is for {given} tokens and ranks, the batch has {tokens} on {mesh.size()} ranks")
    if documents.tree is None and (offsets := [packing.q_offsets.tolist() for packing in packings(plan)]) != [want]:
        raise ValueError(f"the plan's documents start at {offsets[0][:16]}, the batch's at {want[:16]}")
    if min(shards) == 0:
        raise ValueError(f"models need a token on every rank, and shards have {shards}; give a smaller block_size")


def _labels(batch: Batch, planned: PlannedBatch, site: Site, model: Any) -> dict[str, torch.Tensor]:
    """This rank's labels, under both names that models read; nothing if the batch has none."""
    documents, name = planned.documents, type(model).__name__
    shifted = batch.get("shift_labels") is not None
    labels = batch["shift_labels"] if shifted else batch.get("labels")
    if labels is None:
        return {}
    if site.reduce_loss and not isinstance(model.loss_function, GlobalLoss):
        raise ValueError(
            f"the loss function of {name} is not known, or was replaced after hf.context_parallel; leave labels out, "
            f"or keep it by reduce_loss=False"
        )
    shape = documents.rows, documents.length
    if tuple(labels.shape) != shape or labels.is_floating_point():
        raise ValueError(f"labels must be [B, S] = {shape}, integers, got {labels.dtype} {tuple(labels.shape)}")
    flat = documents.flat(labels.long())
    lost = int((labels != -100).sum() - (flat != -100).sum()) if documents.keep is not None else 0
    if lost:
        raise ValueError(f"{lost} tokens of padding have labels, and padding is dropped; set their labels to -100")
    follows = not shifted and getattr(model, "loss_type", None) != "ForTokenClassification"  # labels of next tokens
    if planned.edges is not None:
        if not follows or not site.reduce_loss:
            raise ValueError("labels of a tree follow its edges; give unshifted ones to a loss of next tokens")
        own = flat[:, planned.edges.targets]
    else:
        if follows:
            flat = flat.roll(-1, 1)
            flat[:, documents.cu_seqlens[1:] - 1] = -100  # a last token predicts none
        own = spanwise.shard(planned.plan, x=flat)
    return dict.fromkeys(("labels", "shift_labels"), batches.marked(own, planned))


def check_same(batch: Mapping[str, Any], mesh: DeviceMesh, model: nn.Module, parameters: Parameters | None) -> None:
    """Compare tensors and numbers of a batch, and parameters of a model, over `mesh`; an all-reduce of 32 bytes.

    Embeddings are not compared: ranks may have computed them, and kernels need not give the same bits twice.

    Raises:
        ValueError: batches or parameters that differ, on all ranks.
        spanwise.MismatchError: a rank makes another call, as after a backward that it left out.
        spanwise.ExchangeError: a rank is gone or too late.
    """
    if mesh.size() == 1:
        return
    record(Call("a batch"), *mesh_ranks(mesh))
    compared = [
        n for n, x in sorted(batch.items()) if isinstance(x, (torch.Tensor, int, float)) and n != "inputs_embeds"
    ]
    tensors = [torch.as_tensor(batch[n]) for n in compared]
    weights = parameters.checksum(model, mesh) if parameters and torch.is_grad_enabled() else torch.tensor(0)
    device = _torch.comparison_device(mesh.get_group(0))
    sums = torch.stack([x.to(device) for x in (_total([_checksum(x.detach()) for x in tensors]), weights)])
    extremes = executor.all_reduce(torch.stack([sums, -sums]), "max", mesh, "checksums")
    same_batch, same_weights = (extremes[0] == -extremes[1]).tolist()
    if not same_batch:
        raise ValueError("the ranks of the cp mesh got different batches of equal lengths; give all of them the same")
    if not same_weights:
        raise ValueError(
            "parameters differ between ranks of the cp mesh; average gradients over it, as FSDP and DDP do; if they "
            "differ by design, as local experts, pass check_parameters=False to hf.context_parallel"
        )


def _own(model: nn.Module, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The parameters that ranks of `mesh` must have equal."""
    ranks, found = set(mesh.mesh.flatten().tolist()), []
    for x in model.parameters():
        shared = isinstance(x, DTensor) and len(ranks.intersection(x.device_mesh.mesh.flatten().tolist())) > 1
        if x.requires_grad and not shared:
            found.append((x.to_local() if isinstance(x, DTensor) else x).detach())
    return found


def _total(sums: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64 without dims: differs, almost surely, where one of `sums`, or their order, does."""
    total = torch.zeros((), dtype=torch.int64)
    for index, x in enumerate(sums):
        total = total.to(x.device) * 1000003 + (index + 1) * x
    return total


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """int64 without dims: differs, almost surely, where contents or shapes do."""
    if x.is_floating_point():  # the bits, summed by row: images are large
        bits = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        x = bits.flatten(1).sum(1, dtype=torch.int64) if x.dim() > 1 else bits
    x = x.flatten().long()
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 2654435761 + 1
    return (x * weights).sum() + x.numel()

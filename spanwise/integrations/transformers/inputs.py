"""Whole batches in, this rank's part out: planned, cut, labels shifted before the cut."""

# B rows, S tokens a row, T tokens of this rank

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise._torch import tree_leaves, tree_map
from spanwise.integrations.transformers import corrections
from spanwise.integrations.transformers.agreement import Parameters, check_same
from spanwise.integrations.transformers.attention import PREFIX
from spanwise.integrations.transformers.blocks import find_blocks
from spanwise.integrations.transformers.documents import DESCRIPTIONS, Documents, find_documents, shape_of
from spanwise.integrations.transformers.loss import GlobalLoss, predicts_next
from spanwise.integrations.transformers.masks import (
    NO_ATTENTION,
    mask_names,
    mask_weights,
    plan_documents,
    span_masks,
)
from spanwise.integrations.transformers.planned import ARGUMENT, PlannedBatch, marked, request, shard
from spanwise.planning.documents import packings
from spanwise.recurrence import recurrence_route

SITE = "_spanwise"  # attribute of a model: its Site
_LABELS = ("labels", "shift_labels", "label_weights", "tree")
# Features of image tokens for deeper layers, a row for each in order, by the argument [B, S] that marks these tokens.
_FEATURES = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}
_NOT_OF_TOKENS = {"position_ids", "attention_mask", *_FEATURES.values(), *DESCRIPTIONS, *_LABELS}
_START_ANEW = ("hunyuan_vl",)  # types of models whose positions start anew at images
_CROSSED = ("encoder_hidden_states", "cross_attention_states")  # of another sequence


@dataclasses.dataclass(frozen=True)
class Site:
    """What `context_parallel` leaves on a model.

    Attributes:
        mesh: the cp mesh.
        loss_mesh: all axes over which gradients are averaged.
        options: arguments of `spanwise.make_plan`.
        cut_in_decoder: whether the decoder's inputs are cut, because images are merged into whole sequences before.
        reduce_loss: whether the loss is to be that of all ranks; False for the model's own.
        conv_width: largest width of a convolution in layers that carry a state; None where the model has none.
        padding: the padding token behind whose number positions start, as RoBERTa's do; None where they start at 0.
        parameters: compared over the cp mesh; None where the user does that.
    """

    mesh: DeviceMesh
    loss_mesh: DeviceMesh
    options: Mapping[str, Any]
    cut_in_decoder: bool
    reduce_loss: bool
    conv_width: int | None
    padding: int | None
    parameters: Parameters | None

    def __deepcopy__(self, memo: Any) -> Site:  # meshes cannot be copied
        return dataclasses.replace(self, parameters=copy.copy(self.parameters))


def site_of(model: Any) -> Site:
    """What `context_parallel` left on `model`, also inside of wrappers such as PEFT's and DDP's."""
    while not hasattr(model, SITE) and hasattr(model, "module"):
        model = model.module
    if not hasattr(model, SITE):
        raise ValueError(f"{type(model).__name__} is not prepared; call hf.context_parallel(model, mesh) first")
    return getattr(model, SITE)


def prepare(batch: Mapping[str, Any], model: Any, plan: spanwise.Plan | None = None) -> Any:
    """Arguments of this rank's ``model(**arguments)`` for a whole batch.

    ``model(**batch)`` does this itself while the model trains. Call it to cut a batch for evaluation, to give a plan
    that was made elsewhere, for several models whose outputs are combined, or before a model that is compiled as one
    graph. A collective call over the cp mesh.

    Args:
        batch: a whole batch, the same on all ranks of the cp mesh; as `find_documents` takes it. Tensors ``[B, S, …]``
            are cut. ``labels`` are shifted inside documents and then cut, or follow the edges of the batch's ``tree``;
            ``shift_labels`` are cut as they are. ``label_weights`` ``[1, S]``, beside a tree, weight its labels.
        model: a model after `context_parallel`; or a list of them, which get one layout, so that their outputs hold
            the same tokens.
        plan: of this batch, for the ranks of the cp mesh, with a mask for each kind of the models' layers; default: by
            `make_plan`.

    Returns:
        The arguments, or a list of them; tensors of tokens are ``[1, T, …]``, without padding.

    Raises:
        ValueError: a batch that cannot be cut, or a plan of another batch; on all ranks alike.
    """
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    sites, configs = [site_of(one) for one in models], [one.config for one in models]
    mesh = sites[0].mesh
    if any(site.mesh != mesh or site.options != sites[0].options for site in sites):
        raise ValueError("models that share a batch need the same mesh and options in hf.context_parallel")
    documents = find_documents(batch, mesh.size())
    if plan is None:
        plan = plan_documents(documents, batch, configs, mesh.size(), **sites[0].options)
    _check_plan(plan, documents, mesh)
    device = next(batch[name].device for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None)
    local = plan.local(mesh, device)
    check_same(batch, mesh, [(m, s.parameters) for m, s in zip(models, sites, strict=True) if s.parameters is not None])
    prepared = [_arguments(batch, one, documents, plan, local) for one in models]
    return prepared if isinstance(model, (list, tuple)) else prepared[0]


def _arguments(
    batch: Mapping[str, Any], model: Any, documents: Documents, plan: spanwise.Plan, local: spanwise.RankPlan
) -> dict[str, Any]:
    """Arguments of one model, for documents and a plan that fit the batch."""
    site, config, device = site_of(model), model.config, local.tokens.device
    _check_options(batch, model)
    blocks = find_blocks(batch, config, documents)
    positions = documents.positions
    planned = PlannedBatch(
        plan=local,
        layout=plan.layout,
        names=mask_names(plan, documents, span_masks(config, documents, blocks)),
        documents=documents,
        positions=spanwise.shard(local, x=positions.to(device)),
        last=_largest_position(batch, documents, device),
        blocks=blocks is not None,
        **_edges(batch, documents, plan, site, device),
        **_routes(plan, documents, site, device),
    )
    dropped = {*DESCRIPTIONS, *_LABELS, "logits_to_keep", "past_key_values", "cache_params", "use_cache"}
    given = {name: x for name, x in batch.items() if x is not None and name not in dropped}
    labels = _labels(batch, planned, site, model)
    if site.padding is not None:
        given["position_ids"] = corrections.positions_after_padding(given, documents, site.padding)
    if site.cut_in_decoder:
        given = _whole(given, planned, model)
    else:
        remedy = "merge it into inputs_embeds before, or train with data parallelism"
        _check_tokens(given, shape_of(batch), type(model).__name__, remedy)
        given = cut(given, planned)
    attends = NO_ATTENTION not in planned.names
    if not attends and "output_router_logits" not in inspect.signature(type(model).forward).parameters:
        given["attention_mask"] = request(planned)  # such models pass it on to their decoder, and not the plan
    return given | labels | {"use_cache": False, ARGUMENT: planned}


def _check_options(batch: Mapping[str, Any], model: Any) -> None:
    """Raise ValueError for arguments, and attention, that do not go with a cut batch."""
    config, name = model.config, type(model).__name__
    implementation = config.get_text_config()._attn_implementation
    if NO_ATTENTION not in mask_weights(config) and not implementation.startswith(PREFIX):
        raise ValueError(
            f"the attention of {name} was set to {implementation!r} after hf.context_parallel, and would read one "
            f"rank's tokens only; set it to {PREFIX + implementation!r}, or before hf.context_parallel"
        )
    crossed = [argument for argument in _CROSSED if batch.get(argument) is not None]
    if crossed:
        raise ValueError(
            f"{name} reads {crossed[0]} by cross attention, and another sequence is not cut; leave it out of the "
            f"batch, or train with data parallelism"
        )
    asked = batch.get("output_attentions")
    if getattr(config, "output_attentions", False) if asked is None else asked:
        raise ValueError(
            "output_attentions does not go with context parallelism, which makes no attention weights; call the model "
            "without cutting, in evaluation mode"
        )
    kept = batch.get("logits_to_keep")
    if isinstance(kept, torch.Tensor) or kept:
        raise ValueError("logits_to_keep does not go with context parallelism: the logits of a rank are its shard's")
    if batch.get("use_cache") or any(batch.get(n) is not None for n in ("past_key_values", "cache_params")):
        raise ValueError("a KV cache does not go with context parallelism; pass use_cache=False")


def _routes(plan: spanwise.Plan, documents: Documents, site: Site, device: torch.device) -> dict[str, Any]:
    """How layers that carry a state pass it on, and how tokens get to their layout; empty without such layers."""
    if site.conv_width is None:
        return {}
    own, mesh, offsets = plan.recurrent(), site.mesh, documents.cu_seqlens
    routes: dict[str, Any] = {
        "route": recurrence_route(own, mesh, device, cu_seqlens=offsets, conv_width=site.conv_width)
    }
    if plan.relayout:
        routes["there"] = spanwise.relayout_route(plan, own, mesh, device)
        routes["back"] = spanwise.relayout_route(own, plan, mesh, device)
    return routes


def by_name(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments of a module's forward, by name."""
    if not args:
        return {}
    return dict(inspect.signature(functools.partial(type(module).forward, module)).bind_partial(*args).arguments)


def cut(given: Mapping[str, Any], planned: PlannedBatch) -> dict[str, Any]:
    """Arguments with every tensor ``[B, S, …]`` cut to ``[1, T, …]``, and position ids."""
    shape = planned.documents.rows, planned.documents.length
    result = dict(given)
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and name != "position_ids" and tuple(x.shape[:2]) == shape:
            result[name] = shard(planned, x)
    positions = given.get("position_ids")
    result["position_ids"] = planned.positions if positions is None else shard(planned, positions, positions.dim() - 2)
    result["attention_mask"] = None  # there is no padding
    return result


def cut_for_decoder(given: Mapping[str, Any], planned: PlannedBatch) -> dict[str, Any]:
    """`cut` for the arguments that a model with images gives its decoder.

    Raises:
        ValueError: a tensor that holds neither tokens nor features of image tokens.
    """
    shape = planned.documents.rows, planned.documents.length
    result = cut(given, planned)
    for mask, name in _FEATURES.items():
        if given.get(mask) is not None and given.get(name) is not None:
            visual = given[mask].view(shape)
            rows = (visual.flatten().cumsum(0) - 1).view(shape)
            mine = shard(planned, rows)[shard(planned, visual)]
            result[name] = tree_map(lambda x, mine=mine: x.index_select(0, mine), given[name])
    _check_tokens(given, shape, "the decoder", "leave it out, or train with data parallelism")
    return result


def _check_tokens(given: Mapping[str, Any], shape: tuple[int, int], who: str, remedy: str) -> None:
    """Raise ValueError for tensors that are neither of tokens ``[B, S, …]``, nor numbers, nor known."""
    for name, x in given.items():
        tensors = [y for y in tree_leaves(x) if isinstance(y, torch.Tensor)]
        if name not in _NOT_OF_TOKENS and any(y.numel() != 1 and tuple(y.shape[:2]) != shape for y in tensors):
            raise ValueError(
                f"{who} gets {name} of shape {[tuple(y.shape) for y in tensors][:4]}, which context parallelism does "
                f"not know how to cut over its {shape} tokens; {remedy}"
            )


def _whole(given: dict[str, Any], planned: PlannedBatch, model: Any) -> dict[str, Any]:
    """Arguments of a model whose decoder's inputs are cut."""
    documents = planned.documents
    rotary_by_model = any(hasattr(x, "get_rope_index") for x in (model, model.base_model))
    named = "position_ids" in inspect.signature(type(model).forward).parameters  # or encoders may get them, too
    packed = len(documents.cu_seqlens) - 1 > documents.rows
    if model.config.model_type in _START_ANEW and (packed or given.get("position_ids") is not None):
        raise ValueError(
            f"positions of {type(model).__name__} start anew at images, so they do not tell documents; pad the batch "
            f"and leave position_ids out"
        )
    if given.get("position_ids") is None:
        if not rotary_by_model and named:
            given["position_ids"] = documents.restored(documents.positions[0]).to(planned.positions.device)
        elif rotary_by_model and packed:
            raise ValueError(
                f"{type(model).__name__} counts positions of images and text by row, and the batch packs several "
                f"documents a row; pass their position_ids, [3, B, S]"
            )
    if not rotary_by_model:
        given["attention_mask"] = request(planned)
    return given


def _check_plan(plan: spanwise.Plan, documents: Documents, mesh: DeviceMesh) -> None:
    tokens = int(documents.cu_seqlens[-1])
    if plan.seq_len != tokens or plan.num_ranks != mesh.size():
        raise ValueError(
            f"the plan is for {plan.seq_len} tokens on {plan.num_ranks} ranks; the batch has {tokens} tokens without "
            f"padding, the mesh {mesh.size()} ranks"
        )
    if documents.tree is None:
        offsets = [packing.q_offsets.tolist() for packing in packings(plan)]
        if offsets != [documents.cu_seqlens.tolist()]:
            raise ValueError(
                f"the plan's documents start at {offsets[0][:16]}, the batch's at {documents.cu_seqlens.tolist()[:16]}"
            )
    shards = plan.layout.tokens_per_rank
    if shards.min() == 0:
        raise ValueError(
            f"models need a token on every rank, and {tokens} tokens are divided into shards of {shards.tolist()}; "
            f"give hf.context_parallel a smaller block_size"
        )


def _largest_position(batch: Mapping[str, Any], documents: Documents, device: torch.device) -> torch.Tensor:
    """int64 ``[1]``: the largest position of a kept token of the batch."""
    given = batch.get("position_ids")
    positions = documents.positions if given is None else documents.flat(given, given.dim() - 2)
    return positions.max().view(1).to(device)


def _edges(
    batch: Mapping[str, Any], documents: Documents, plan: spanwise.Plan, site: Site, device: torch.device
) -> dict[str, Any]:
    """The labels of a tree that this rank's tokens predict, and their weights; empty without a tree."""
    weights = batch.get("label_weights")
    if documents.tree is None:
        if weights is not None:
            raise ValueError("label_weights go with a tree; for other batches weight the losses of spanwise yourself")
        return {}
    edges = spanwise.shard_edges(documents.tree, plan, site.mesh, device=device)
    return {"edges": edges, "weights": None if weights is None else documents.flat(weights)[:, edges.targets]}


def _labels(batch: Mapping[str, Any], planned: PlannedBatch, site: Site, model: Any) -> dict[str, torch.Tensor]:
    """This rank's labels, under both names that models read; nothing if the batch has none."""
    documents, name = planned.documents, type(model).__name__
    shifted = batch.get("shift_labels") is not None
    labels = batch["shift_labels"] if shifted else batch.get("labels")
    if labels is None:
        return {}
    if site.reduce_loss and not isinstance(model.loss_function, GlobalLoss):
        raise ValueError(
            f"the loss function of {name} is neither that of causal language models nor that of token classification, "
            f"or was replaced after hf.context_parallel, and would see one rank's tokens only; leave labels out of the "
            f"batch and compute the loss from the logits, or pass reduce_loss=False to hf.context_parallel to keep it"
        )
    if tuple(labels.shape) != shape_of(batch) or labels.is_floating_point():
        raise ValueError(
            f"labels must be [B, S] = {shape_of(batch)}, integers, got {labels.dtype} {tuple(labels.shape)}"
        )
    flat = documents.flat(labels, fill=-100).long()
    lost = int((labels != -100).sum() - (flat != -100).sum()) if documents.keep is not None else 0
    if lost:
        raise ValueError(
            f"{lost} tokens of padding have labels, and padding is dropped; set them to -100, as in "
            f"labels.masked_fill(attention_mask == 0, -100)"
        )
    follows = not shifted and predicts_next(model)
    if planned.edges is not None:
        if not follows or not site.reduce_loss:
            raise ValueError(
                f"labels of a tree follow its edges: {name} needs the loss of causal language models and labels that "
                f"are not shifted; otherwise leave labels out, and see spanwise.shard_edges"
            )
        own = flat[:, planned.edges.targets]
    else:
        if follows:
            flat = flat.roll(-1, 1)
            flat[:, documents.cu_seqlens[1:] - 1] = -100  # a last token predicts none
        own = spanwise.shard(planned.plan, x=flat)
    return dict.fromkeys(("labels", "shift_labels"), marked(own, planned))

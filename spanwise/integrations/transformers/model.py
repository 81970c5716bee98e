"""context_parallel: a Hugging Face model that trains with its sequences cut over a mesh.

Three hooks do it. The model's plans and cuts a batch; the decoder's takes care of masks and, where images are merged
into the sequence first, cuts; the decoder's second one completes router logits. Attention itself is replaced through
`AttentionInterface`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import spanwise
from spanwise.integrations.transformers import batches, inputs
from spanwise.integrations.transformers.attention import KIND, PREFIX, keep_latents, register
from spanwise.integrations.transformers.batches import ARGUMENT, PlannedBatch, planned_of
from spanwise.integrations.transformers.indexed import defer
from spanwise.integrations.transformers.inputs import by_name, prepare, signature_of, site_of
from spanwise.integrations.transformers.masks import NO_ATTENTION, layer_kinds, mask_weights
from spanwise.integrations.transformers.mixers import attach, conv_width
from spanwise.integrations.transformers.outputs import LOSSES, GlobalLoss, mark_outputs, version_of

_POOLED = "ForSequenceClassification|ForQuestionAnswering|ForMultipleChoice|DoubleHeads|ForNextSentence"  # of classes
_MASK, _STATE = "makes a mask or a bias of its own", "carries a state along the sequence in a way that is not known"
_REFUSED = {  # class names of modules
    **dict.fromkeys(("DogeAttention", "GitModel"), _MASK),
    **dict.fromkeys(("RwkvSelfAttention", "xLSTMBlock", "ZayaCCAProjection", "FNetFourierTransform"), _STATE),
}
_LAYER_DROP = ("layerdrop", "decoder_layerdrop")
_MIXERS = "_spanwise_mixers"  # attribute of a decoder: forwards of its layers that carry a state
_ROTARY = "_spanwise_rotary"  # attribute of a decoder: its rotary embeddings that depend on the largest position
_LAST = "_spanwise_last"  # attribute of each of these: the largest position of all ranks, or None
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def context_parallel(
    model: Any,
    mesh: DeviceMesh,
    *,
    loss_mesh: DeviceMesh | None = None,
    reduce_loss: bool = True,
    check_parameters: bool = True,
    **options: Any,
) -> Any:
    """Let `model` train with each batch cut over the ranks of `mesh`.

    After it, ``model(**batch)`` in training mode takes whole batches, the same on all ranks of `mesh`: packed, padded,
    one document a row, or a tree of prefixes. It plans from the batch, cuts it, and returns this rank's logits and the
    loss of all ranks. `from_pretrained` returns models in evaluation mode: call ``model.train()``. In evaluation mode,
    without gradients, each rank computes the whole batch as before; packed batches are refused there, and `prepare`
    cuts them. `generate`, `save_pretrained` and copies work as before.

    Args:
        model: a model whose attention goes through `AttentionInterface`, such as those of `AutoModelForCausalLM`; also
            wrapped by PEFT. Before or after `fully_shard`.
        mesh: the cp mesh, 1-D.
        loss_mesh: all axes over which gradients are averaged: dp and cp, or cp alone (default).
        reduce_loss: False to keep the model's loss function; labels then reach it cut, and shifted unless the model
            classifies tokens.
        check_parameters: whether to compare parameters over `mesh` at the first batch and after each of two optimizer
            steps, which finds a forgotten FSDP or DDP; False where ranks have parameters of their own.
        options: arguments of `spanwise.make_plan`, such as ``balancer`` and ``exchange``.

    Returns:
        `model`.

    Raises:
        ValueError: a model that context parallelism cannot serve exactly, or wrong arguments; the text says why.
    """
    loss_mesh = mesh if loss_mesh is None else loss_mesh
    _check_arguments(mesh, loss_mesh)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        name = type(model).__name__
        raise ValueError(f"context_parallel takes a model of transformers, got {name}; call it before it is wrapped")
    if hasattr(base, inputs.SITE):
        raise ValueError(f"{type(base).__name__} is under context parallelism already")
    decoder = _decoder_of(base)
    _check_model(base, decoder)
    _set_attention(base, decoder)
    mixers = attach(decoder, base.config)
    setattr(decoder, _MIXERS, mixers)
    _follow_length(decoder)
    parameters = inputs.Parameters() if check_parameters else None
    setattr(base, inputs.SITE, inputs.Site(mesh, loss_mesh, options, reduce_loss, conv_width(mixers), parameters))
    if reduce_loss and base.loss_function in LOSSES:
        base.loss_function = GlobalLoss(loss_mesh, base.loss_function)
    base.register_forward_pre_hook(_plan_batch, with_kwargs=True, prepend=True)
    base.register_forward_hook(_leave_model, with_kwargs=True)
    decoder.register_forward_pre_hook(_enter_decoder, with_kwargs=True, prepend=base is not decoder)
    decoder.register_forward_hook(_gather_router_logits, with_kwargs=True)
    return model


def _check_arguments(mesh: Any, loss_mesh: Any) -> None:
    """Raise ValueError for what the first batch would stumble over."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f"mesh must be a DeviceMesh of one axis, such as init_device_mesh(…)['cp'], got {mesh!r}")
    if not isinstance(loss_mesh, DeviceMesh):
        raise ValueError(f"loss_mesh must be a DeviceMesh, such as mesh['dp', 'cp'], got {loss_mesh!r}")
    missing = set(mesh.mesh.flatten().tolist()) - set(loss_mesh.mesh.flatten().tolist())
    if missing:
        raise ValueError(f"loss_mesh must hold all ranks of mesh, and lacks {sorted(missing)}")


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    decoder = model.get_decoder()
    while isinstance(decoder, PreTrainedModel) and decoder.get_decoder() is not decoder:  # a model with a head
        decoder = decoder.get_decoder()
    # Some models call their output layer so.
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model  # type: ignore[return-value]


def _check_model(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ValueError for what cannot be exact with any batch."""
    name, config = type(model).__name__, model.config
    attends = NO_ATTENTION not in mask_weights(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder; context parallelism takes decoders alone; use data parallelism")
    if any(re.search(_POOLED, cls.__name__) for cls in type(model).__mro__):
        raise ValueError(f"{name} computes its output from certain tokens; take AutoModel and spanwise.unshard")
    random = {n: x for n in _LAYER_DROP if (x := getattr(config.get_text_config(), n, None))}
    if random:
        raise ValueError(f"{name} skips layers at random, by {random} in its config, and not on all ranks; set it to 0")
    if getattr(decoder, "pooler", None) is not None:
        raise ValueError(f"the pooler of {type(decoder).__name__} reads the first token; set add_pooling_layer=False")
    if any(hasattr(module, "create_position_ids_from_inputs_embeds") for module in decoder.modules()):
        raise ValueError(f"{name} counts positions behind padding, as RoBERTa does; train with data parallelism")
    for refused in _REFUSED.keys() & {cls.__name__ for module in decoder.modules() for cls in type(module).__mro__}:
        raise ValueError(f"{refused} {_REFUSED[refused]}, which no plan has; use data parallelism")
    for module in (type(model), type(decoder)):
        parameters = signature_of(module).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise ValueError(f"{module.__name__}.forward takes no further keyword arguments, and so no plan")
    if attends and "position_ids" not in parameters:
        raise ValueError(f"{module.__name__}.forward takes no position_ids, which shards need; use data parallelism")


def _set_attention(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Let the layers of the decoder take their attention from `attention.register`, and know their kind of mask."""
    name, text, kinds = type(model).__name__, model.config.get_text_config(), layer_kinds(model.config)
    if NO_ATTENTION in mask_weights(model.config):
        return
    before = text._attn_implementation.removeprefix(PREFIX)  # a reference model is loaded as the policy is set
    function = None if before == "eager" else ALL_ATTENTION_FUNCTIONS[before]
    if function is not None and not getattr(function, "func", function).__module__.startswith("transformers."):
        raise ValueError(f"the attention {before!r} of {name} is not transformers' own; load the model with 'sdpa'")
    key = next((k for k in model.config.sub_configs if getattr(model.config, k) is text), None)
    registered = register(before)
    if type(model)._can_set_attn_implementation():
        model.set_attn_implementation({key: registered} if key else registered)
    elif type(decoder)._can_set_attn_implementation():  # an encoder of images cannot
        decoder.set_attn_implementation(registered)
    if text._attn_implementation != registered:
        raise ValueError(f"{name} does not take its attention from AttentionInterface; take a model that does")
    for path, module in decoder.named_modules():
        if hasattr(module, "layer_idx"):  # by its path: shared layers have another number, or none
            within = re.match(r"layers\.(\d+)\.", path)
            index = int(within[1]) if within else module.layer_idx
            if isinstance(index, int) and index < len(kinds):
                setattr(module, KIND, kinds[index])
                keep_latents(module)
                defer(module)


def _is_cached(kwargs: Mapping[str, Any]) -> bool:
    return any(kwargs.get(cache) is not None for cache in ("past_key_values", "cache_params"))


def _plan_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's hook: plan and cut a whole batch."""
    if ARGUMENT in kwargs:
        whole = kwargs[ARGUMENT] is None  # as `verify` asks for
        return (args, {name: x for name, x in kwargs.items() if name != ARGUMENT}) if whole else None
    name, grads = type(model).__name__, torch.is_grad_enabled()
    if _is_cached(kwargs):  # it generates
        if grads and model.training:
            raise ValueError(f"{name} trains behind a KV cache, as with prefix tuning, and cannot be cut; use LoRA")
        return None
    if model.training:
        return (), _planned_arguments(model, args, kwargs)
    if grads:
        raise ValueError(
            f"{name} cuts no batch in evaluation mode, and gradients are enabled: call model.train(), or evaluate "
            f"under torch.no_grad(), or pass hf.prepare(batch, model)"
        )
    return _refuse_packed(model, args, kwargs)


def _refuse_packed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for a whole batch that is packed; models such as Mamba pass no positions on to their decoder."""
    if not torch.compiler.is_compiling() and batches.is_packed(by_name(module, args) | kwargs):
        name = type(module).__name__
        raise ValueError(f"a row packs several documents, and {name} is in evaluation mode: hf.prepare(batch, model)")


@torch.compiler.disable  # a graph break before the model; `prepare` avoids it
def _planned_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return prepare(by_name(model, args) | dict(kwargs), model)


def _enter_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The decoder's hook: no masks, and cut inputs where the model's hook left them whole."""
    planned = kwargs.get(ARGUMENT) or planned_of(kwargs.get("attention_mask"))
    compiling = torch.compiler.is_compiling()
    _set_last_position(decoder, planned)
    for mixer in getattr(decoder, _MIXERS):
        mixer.expected = planned is not None
    if planned is None:
        if decoder.training and torch.is_grad_enabled() and not _is_cached(kwargs):
            name = type(decoder).__name__
            raise ValueError(f"{name} was called without the model around it; call that, or hf.prepare(batch, model)")
        return None if _is_cached(kwargs) else _refuse_packed(decoder, args, kwargs)
    if not compiling:
        planned.reached.append(True)
    kwargs = by_name(decoder, args) | kwargs
    tokens = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    mask, device = kwargs.get("attention_mask"), planned.positions.device
    if tokens.shape[:2] != planned.positions.shape:
        kwargs = inputs.cut(kwargs, planned, "the decoder")
    if not isinstance(mask, dict) and batches.kind_of(mask) is None:  # not made before
        mask = batches.empty_mask(device, kind=batches.UNKNOWN) if compiling else batches.empty_mask(device, planned)
    return (), kwargs | {"attention_mask": mask, ARGUMENT: planned}


def _leave_model(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """After the model: its loss is the one that knows of ranks, and its outputs know their layout."""
    planned, name = kwargs.get(ARGUMENT), type(model).__name__
    if planned is None or torch.compiler.is_compiling():
        return
    if not planned.reached:
        raise ValueError(f"{name} does not pass the plan on to its decoder; take one that passes keyword arguments on")
    mark_outputs(output, planned)
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    if kwargs.get("labels") is None or loss is None or not site_of(model).reduce_loss:
        return
    if not planned.losses:
        raise ValueError(f"{name} computes its loss itself, of one rank's tokens; call spanwise.cross_entropy instead")
    known, version = planned.losses.pop()
    # Auxiliary losses of experts are computed from the router logits of all ranks.
    experts = kwargs.get("output_router_logits")
    experts = getattr(model.config, "output_router_logits", False) if experts is None else experts
    if (loss is not known or version_of(loss) != version) and not experts:
        raise ValueError(f"{name} adds a term to its loss, of one rank; without labels, add it after spanwise.unshard")


def _follow_length(decoder: nn.Module) -> None:
    """Let rotary embeddings of `decoder` whose frequencies depend on the largest position see that of all ranks."""
    types = {module: getattr(module, "rope_type", None) for module in decoder.modules()}
    found = [m for m, x in types.items() if _LENGTH_DEPENDENT & set(x.values() if isinstance(x, dict) else [x])]
    for module in found:
        module.register_forward_pre_hook(_append_last, with_kwargs=True)
        module.register_forward_hook(_drop_last)
    setattr(decoder, _ROTARY, found)
    _set_last_position(decoder, None)


def _set_last_position(decoder: nn.Module, planned: PlannedBatch | None) -> None:
    """Before each forward of the decoder; None for a batch without a plan."""
    for rotary in getattr(decoder, _ROTARY):
        setattr(rotary, _LAST, None if planned is None else planned.last)


def _append_last(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One more token, which `_drop_last` drops again."""
    last = getattr(rotary, _LAST)
    if last is None:
        return None
    named = "position_ids" in kwargs
    positions = kwargs["position_ids"] if named else args[1]
    longer = torch.cat([positions, last.to(positions).expand(*positions.shape[:-1], 1)], dim=-1)
    return (args, kwargs | {"position_ids": longer}) if named else ((args[0], longer, *args[2:]), kwargs)


def _drop_last(rotary: nn.Module, args: Any, output: Any) -> Any:
    if getattr(rotary, _LAST) is None:
        return None
    return tuple(x[..., :-1, :] for x in output) if isinstance(output, tuple) else output[..., :-1, :]


def _gather_router_logits(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook of the decoder: router logits ``[N, experts]`` of all ranks in place of this rank's.

    The auxiliary loss of experts is a product of two means over all tokens, not a sum over tokens.
    """
    planned, logits = kwargs.get(ARGUMENT), getattr(output, "router_logits", None)
    if planned is None or logits is None:
        return None
    if planned.documents.tree is not None:
        raise ValueError("auxiliary losses of experts would count shared prefixes once; set output_router_logits=False")
    output.router_logits = tuple(
        x if x is None else spanwise.unshard(planned.plan, x=x.flatten(0, -2)[None])[0] for x in logits
    )
    return output

"""ContextParallel: context parallelism as a `parallelize_module` plan.

    parallelize_module(model, mesh["cp"], {"layers.*.attention.inner": ContextParallel(attention_type="flex")})

The forward of the wrapped module is an attention call. The style replaces it by `context_parallel_attention`. The plan
is the call's mask argument, so that activation checkpointing recomputes a batch with its plan. A scale or score_mod
inside the module would be lost silently. So applying the style runs a small one-rank problem through both and compares.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from spanwise.attention.attention import context_parallel_attention
from spanwise.attention.kernels.base import Kernel
from spanwise.attention.packed import packed_attention
from spanwise.attention.rank_plan import RankPlan, build
from spanwise.layouts.packing import Packing
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

# Attention type: the argument that holds the plan.
ATTENTION_TYPES = {"flex": "block_mask", "sdpa": "attn_mask", "varlen": "cu_seq_q"}
_TENSORS = {"q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v"}
_MASKS = ("block_mask", "attn_mask", "mask", "plan", "cu_seq_q", "cu_seq_k")
_UNREAD = ("max_q", "max_k", "scale", "score_mod")  # the plan knows the first two
# Other arguments of torch's attention calls, with the values that change nothing. The plan's mask alone decides what is
# visible, so that a window could contradict it.
_IGNORABLE: dict[str, tuple[Any, ...]] = {
    "dropout_p": (0,), "enable_gqa": (False, True), "is_causal": (False, None), "return_lse": (False,),
    "return_aux": (None,), "kernel_options": (None,), "window_size": (None, (-1, -1)), "seqused_k": (None,),
    "block_table": (None,), "num_splits": (None,),
}  # fmt: skip


class ContextParallel(ParallelStyle):
    """Context parallelism for a module whose forward is an attention call on shards.

    Calls pass the plan in place of the mask:

    - "flex": ``(q, k, v, block_mask=plan)`` on ``[B, H, T, D]``
    - "sdpa": ``(q, k, v, attn_mask=plan)`` on ``[B, H, T, D]``
    - "varlen": ``(q, k, v, plan, plan)`` on packed ``[T, H, D]``, in place of both offsets of
      `torch.nn.attention.varlen.varlen_attn`; its ``max_q`` and ``max_k`` are not read.

    Tensors may be positional or keywords, named as in the module's own forward. `parallelize_module` gets the 1-D cp
    axis, ``mesh["cp"]``, with every exchange, Ulysses included. For a plan of two levels, ``num_ranks=(outer, inner)``,
    it gets both axes, ``mesh["cp_outer", "cp_inner"]``.

    Args:
        seq_dim: the sequence dim: 2 for ``[B, H, T, D]``, 1 for ``[B, T, H, D]``. Not for "varlen".
        attention_type: the call that the module wraps: "flex", "sdpa" or "varlen". It names the mask argument; `kernel`
            decides the kernel.
        plan: serves calls without a mask. Then ``is_causal=True`` is accepted, if the plan's mask is the causal one.
        mask_name: which of the plan's masks this module uses.
        kernel: as in `context_parallel_attention`.
        scale, score_mod: those that the module applies inside; arguments of a call override them.
        probe: ``(num_q_heads, num_kv_heads, head_dim)`` of the small problem that checks the module when the style is
            applied: causal, one sequence; two causal sequences for "varlen", in bfloat16 on a GPU.

    Attributes:
        num_applied: modules that this style was applied to. `parallelize_module` only warns where a pattern matches
            nothing and does not call the style, so compare the number with your layers.

    >>> import spanwise
    >>> style = spanwise.ContextParallel(attention_type="sdpa", kernel="sdpa")
    >>> style.attention_type, style.seq_dim
    ('sdpa', 2)
    """

    def __init__(
        self,
        *,
        seq_dim: int = 2,
        attention_type: str = "flex",
        plan: Plan | RankPlan | None = None,
        mask_name: str = "default",
        kernel: str | Kernel = "auto",
        scale: float | None = None,
        score_mod: Callable[..., Any] | None = None,
        probe: tuple[int, int, int] = (2, 2, 16),
    ) -> None:
        super().__init__()
        if attention_type not in ATTENTION_TYPES:
            raise ValueError(f"unknown attention_type {attention_type!r}; choose one of {sorted(ATTENTION_TYPES)}")
        if seq_dim not in ((2,) if attention_type == "varlen" else (1, 2)):
            raise ValueError(f"seq_dim must be 2 ([B, H, T, D], or 'varlen') or 1 ([B, T, H, D]), got {seq_dim}")
        if plan is not None and not isinstance(plan, (Plan, RankPlan)):
            raise ValueError(f"plan must be a Plan or RankPlan, got {type(plan).__name__}")
        self.num_applied = 0
        self.seq_dim = seq_dim
        self.attention_type = attention_type
        self.plan = plan
        self.mask_name = mask_name
        self.kernel = kernel
        self.scale = scale
        self.score_mod = score_mod
        self.probe = probe

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inner = module.forward
        signature = inspect.signature(inner)
        owned = [name for name, _ in module.named_parameters()]
        if owned:
            raise ValueError(
                f"the module has parameters, {owned}, and the style would not use them; wrap a module whose forward is "
                f"the attention call alone"
            )
        was_training = module.training
        for training in (True, False):
            module.train(training)
            self._check_module(inner, signature, device_mesh.device_type)
        module.train(was_training)

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensors, plan, options = self._parse(signature, args, kwargs)
            return self._attend(tensors, plan, device_mesh, **options)

        module.forward = forward
        self.num_applied += 1
        return module

    def _attend(self, tensors: list[torch.Tensor], plan: Plan | RankPlan, mesh: Any, **options: Any) -> torch.Tensor:
        given: dict[str, Any] = dict(scale=self.scale, score_mod=self.score_mod, kernel=self.kernel)
        options = given | {"mask_name": self.mask_name} | options
        if self.attention_type == "varlen":
            return packed_attention(tensors[0], tensors[1], tensors[2], plan, mesh, **options)
        if any(x.dim() != 4 for x in tensors):
            raise ValueError(
                f"the wrapped attention takes four dims, the sequence in dim {self.seq_dim}, got shapes "
                f"{[tuple(x.shape) for x in tensors]}; packed tensors have attention_type='varlen'"
            )
        q, k, v = tensors if self.seq_dim == 2 else [x.transpose(1, 2) for x in tensors]
        out = context_parallel_attention(q, k, v, plan, mesh, **options)
        return out if self.seq_dim == 2 else out.transpose(1, 2)

    def _parse(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], Plan | RankPlan, dict[str, Any]]:
        """q, k, v, the plan, and options from a call of the wrapped module; refuses everything else."""
        try:
            bound = signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"the call does not fit the wrapped module's signature {signature}: {error}") from None
        bound.apply_defaults()
        call = dict(bound.arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                call |= call.pop(name)
            elif parameter.kind is parameter.VAR_POSITIONAL and not call[name]:
                del call[name]
        causal = call.get("is_causal") is True
        for name, value in call.items():
            if name in (*_TENSORS, *_MASKS, *_UNREAD) or (name == "is_causal" and causal):
                continue
            if isinstance(value, torch.Tensor) or value not in _IGNORABLE.get(name, ()):
                shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise ValueError(
                    f"{name}={shown} is not supported under ContextParallel; harmless values are "
                    f"{_IGNORABLE.get(name, ())}, and tensors are called q, k, v or query, key, value"
                )
        tensors = {_TENSORS[name]: value for name, value in call.items() if name in _TENSORS}
        if len(tensors) < 3:
            raise ValueError(f"the wrapped attention needs q, k and v, got {sorted(tensors)} in {sorted(call)}")
        options = {name: call[name] for name in ("scale", "score_mod") if call.get(name) is not None}
        given = [(name, call[name]) for name in _MASKS if call.get(name) is not None]
        if any(value is not given[0][1] for _, value in given):
            raise ValueError(f"the wrapped attention was given two masks, {[name for name, _ in given]}")
        plan = given[0][1] if given else self.plan
        if not isinstance(plan, (Plan, RankPlan)):
            what = "is_causal=True" if causal else "a call without a mask"
            raise ValueError(
                f"{what if plan is None else f'a {type(plan).__name__}'} does not say which rank holds which tokens; "
                f"pass {ATTENTION_TYPES[self.attention_type]}=plan of spanwise.make_plan, or ContextParallel(plan=…)"
            )
        if causal and self.mask_name not in plan.causal:
            raise ValueError(f"is_causal=True goes only with a plan of the causal mask, not with {self.mask_name!r}")
        return [tensors[name] for name in "qkv"], plan, options

    def _check_module(self, inner: Callable[..., Any], signature: inspect.Signature, device: str) -> None:
        """Run the module and spanwise on one small causal problem and raise if they differ."""
        num_q, num_kv, dim = self.probe
        packed = self.attention_type == "varlen"
        offsets, length = [0, 12, 32] if packed else [0, 32], 32
        mask = {self.mask_name: Packing(offsets).mask()}
        plan = build(make_plan(mask, 1, block_size=length, balancer="contiguous"), 0, device)
        generator = torch.Generator("cpu").manual_seed(0)
        # On a GPU, varlen_attn takes 16-bit dtypes only.
        dtype = torch.bfloat16 if packed and device == "cuda" else torch.get_default_dtype()

        def draw(heads: int) -> torch.Tensor:
            shape = (length, heads, dim) if packed else (1, heads, length, dim)
            x = 3 * torch.randn(shape, generator=generator, device="cpu")  # large scores show a scale or a cap inside
            return (x if self.seq_dim == 2 else x.transpose(1, 2)).to(device, dtype)

        call = [draw(heads) for heads in (num_q, num_kv, num_kv)]
        expected = self._attend(call, plan, None, kernel="reference")
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # FlexAttention warns that it runs uncompiled; for a probe of 32 tokens that is right.
                warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
                got = inner(*call, **self._probe_mask(signature, offsets, num_q != num_kv, device))
        except Exception as error:
            raise ValueError(
                f"ContextParallel could not run the module on q, k and v of shapes {[tuple(x.shape) for x in call]}: "
                f"{error}. Wrap the module whose forward is the attention call itself, and set probe=(num_q_heads, "
                f"num_kv_heads, head_dim) if it accepts only certain shapes"
            ) from error
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            raise ValueError(
                f"the module's forward is not an attention call: expected a tensor of shape {tuple(expected.shape)}, "
                f"got {tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__}"
            )
        error_size = (got - expected).abs().max().item()
        if not error_size <= (1e-3 if dtype != torch.bfloat16 else 0.1):  # its outputs are below 16
            raise ValueError(
                f"the module computes something other than softmax(scale * q kᵀ) v: on a causal probe it differs by "
                f"{error_size:.3g} from ContextParallel(scale={self.scale}, score_mod={self.score_mod}); pass the "
                f"scale or score_mod that the module applies inside"
            )

    def _probe_mask(self, signature: inspect.Signature, offsets: list[int], gqa: bool, device: str) -> dict[str, Any]:
        """Keyword arguments that make the module itself causal on the probe."""
        values: dict[str, Any] = {"is_causal": True} | ({"enable_gqa": True} if gqa else {})
        if self.attention_type == "varlen":
            made, longest = torch.tensor(offsets, dtype=torch.int32, device=device), max(np.diff(offsets).tolist())
            values = {"cu_seq_q": made, "cu_seq_k": made, "max_q": longest, "max_k": longest, "window_size": (-1, 0)}
        names = (ATTENTION_TYPES[self.attention_type], *_MASKS)
        name = next((name for name in (*names, "is_causal") if name in signature.parameters), None)
        if name is None:
            raise ValueError(f"its arguments {list(signature.parameters)} have neither a mask nor is_causal")
        if name not in values:
            mask = SpanMask.causal(offsets[-1])
            flex = self.attention_type == "flex"
            values[name] = mask.block_mask(device, 128) if flex else torch.from_numpy(mask.dense()).to(device)
            del values["is_causal"]
        return {name: value for name, value in values.items() if name in signature.parameters}

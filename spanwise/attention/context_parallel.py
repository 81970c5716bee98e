"""ContextParallel: context parallelism as a `parallelize_module` plan.

    parallelize_module(model, mesh["cp"], {"layers.*.attention.inner": ContextParallel(attention_type="flex")})

The forward of the wrapped module is an attention call. The style replaces it by `context_parallel_attention`. The plan
is the call's mask argument, so that activation checkpointing recomputes a batch with its plan. A scale or score_mod
inside the module would be lost silently. So applying the style runs a small one-rank problem through both and compares.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

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
# Arguments of torch's attention calls that have a meaning here, with the values that change nothing.
_PASSED_ON = {"scale": None, "score_mod": None}
_IGNORABLE: dict[str, tuple[Any, ...]] = {
    "dropout_p": (0, 0.0),
    "is_causal": (False, None),
    "enable_gqa": (False, True),
    "return_lse": (False,),
    "return_aux": (None,),
    "kernel_options": (None,),
    # Of varlen_attn. The plan's mask alone decides what is visible, so that a window could contradict it.
    "window_size": (None, (-1, -1)),
    "seqused_k": (None,),
    "block_table": (None,),
    "num_splits": (None,),
}
_SIZES = ("max_q", "max_k")  # the plan knows them


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
        if seq_dim not in (1, 2):
            raise ValueError(f"seq_dim must be 2 ([B, H, T, D]) or 1 ([B, T, H, D]), got {seq_dim}")
        if attention_type == "varlen" and seq_dim != 2:
            raise ValueError(f"seq_dim={seq_dim} is not for attention_type 'varlen', whose tensors are [T, H, D]")
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
        mesh = device_mesh

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensors, plan, options = self._parse(signature, args, kwargs)
            return self._attend(tensors, plan, mesh, options)

        module.forward = forward
        self.num_applied += 1
        return module

    def _attend(
        self, tensors: tuple[torch.Tensor, ...], plan: Plan | RankPlan, mesh: DeviceMesh | None, options: dict[str, Any]
    ) -> torch.Tensor:
        given: dict[str, Any] = dict(scale=self.scale, score_mod=self.score_mod, kernel=self.kernel)
        options = given | options | {"mask_name": self.mask_name}
        if self.attention_type == "varlen":
            q, k, v = tensors
            return packed_attention(q, k, v, plan, mesh, **options)
        if any(x.dim() != 4 for x in tensors):
            raise ValueError(
                f"the wrapped attention must be called with four dims, the sequence in dim {self.seq_dim}, got shapes "
                f"{[tuple(x.shape) for x in tensors]}; for packed tensors, [tokens, heads, head_dim], there are "
                f"attention_type='varlen' and spanwise.packed_attention"
            )
        if self.seq_dim == 1:
            tensors = tuple(x.transpose(1, 2) for x in tensors)
        q, k, v = tensors
        out = context_parallel_attention(q, k, v, plan, mesh, **options)
        return out.transpose(1, 2) if self.seq_dim == 1 else out

    def _parse(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], Plan | RankPlan, dict[str, Any]]:
        """q, k, v, the plan, and options from a call of the wrapped module; refuses everything else."""
        names = list(signature.parameters)
        call = {x.name: x.default for x in signature.parameters.values() if x.default is not x.empty}
        call |= dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or set(names[: len(args)]) & set(kwargs):
            raise ValueError(f"the wrapped attention takes {names} once each, got {len(args)} and {list(kwargs)}")
        tensors: dict[str, torch.Tensor] = {}
        plan: Any = None
        causal = False
        options: dict[str, Any] = {}
        for name, value in call.items():
            if name in _TENSORS:
                tensors[_TENSORS[name]] = value
            elif name in _MASKS:
                if value is not None and plan is not None and not (name == "cu_seq_k" and value is plan):
                    raise ValueError(f"the wrapped attention was given two masks; {name} is the second")
                plan = value if value is not None else plan
            elif name == "is_causal" and value is True:
                causal = True
            elif name in _PASSED_ON:
                if value is not None:
                    options[name] = value
            elif name in _SIZES:
                continue
            elif name not in _IGNORABLE:
                what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r}"
                raise ValueError(
                    f"ContextParallel does not know the argument {name}, {what}, of the wrapped attention; tensors are "
                    f"called q, k, v or query, key, value"
                )
            elif value not in _IGNORABLE[name]:
                raise ValueError(
                    f"{name}={value!r} is not supported under ContextParallel; leave it at {_IGNORABLE[name][0]!r}"
                )
        missing = sorted({"q", "k", "v"} - set(tensors))
        if missing:
            raise ValueError(f"the wrapped attention was called without {missing}; its arguments were {sorted(call)}")
        return (tensors["q"], tensors["k"], tensors["v"]), self._plan_for(plan, causal), options

    def _plan_for(self, given: Any, causal: bool) -> Plan | RankPlan:
        name = ATTENTION_TYPES[self.attention_type]
        remedy = (
            f"make one with spanwise.make_plan(mask, num_ranks) and pass {name}=plan, or give it to the style, "
            f"ContextParallel(plan=…)"
        )
        if given is not None and not isinstance(given, (Plan, RankPlan)):
            raise ValueError(
                f"under ContextParallel the mask must be a Plan, got a {type(given).__name__}: a mask does not say "
                f"which rank holds which tokens; {remedy}"
            )
        plan = given if given is not None else self.plan
        if plan is None:
            what = "is_causal=True" if causal else "a call without a mask"
            raise ValueError(f"{what} does not say which rank holds which tokens; {remedy}")
        if causal and self.mask_name not in plan.causal:
            raise ValueError(
                f"is_causal=True goes only with a plan of the causal mask; mask {self.mask_name!r} is another"
            )
        return plan

    def _check_module(self, inner: Callable[..., Any], signature: inspect.Signature, device: str) -> None:
        """Run the module and spanwise on one small causal problem and raise if they differ."""
        num_q, num_kv, dim = self.probe
        packed = self.attention_type == "varlen"
        offsets, length = [0, 12, 32] if packed else [0, 32], 32
        plan = make_plan(Packing(offsets).mask(), 1, block_size=length, balancer="contiguous")
        generator = torch.Generator("cpu").manual_seed(0)
        # On a GPU, varlen_attn takes 16-bit dtypes only.
        dtype = torch.bfloat16 if packed and device == "cuda" else torch.get_default_dtype()
        # Large scores, so that a scale or a cap inside the module shows.
        q, k, v = (
            (3 * torch.randn(1, heads, length, dim, generator=generator, device="cpu")).to(device, dtype)
            for heads in (num_q, num_kv, num_kv)
        )
        expected = context_parallel_attention(
            q, k, v, build(plan, 0, device), None, kernel="reference", scale=self.scale, score_mod=self.score_mod
        )
        call = tuple(x.transpose(1, 2) for x in (q, k, v)) if self.seq_dim == 1 else (q, k, v)
        if packed:
            call = tuple(x[0].transpose(0, 1) for x in (q, k, v))
            expected = expected[0].transpose(0, 1)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # FlexAttention warns that it runs uncompiled; for a probe of 32 tokens that is right.
                warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
                got = inner(*call, **self._probe_mask(signature, offsets, num_q != num_kv, device))
        except Exception as error:
            raise ValueError(
                f"ContextParallel could not run the module on a small problem, q {tuple(call[0].shape)}, k and v "
                f"{tuple(call[1].shape)}: {error}. Wrap the module whose forward is the attention call itself, "
                f"and set probe=(num_q_heads, num_kv_heads, head_dim) if it accepts only certain shapes"
            ) from error
        if isinstance(got, torch.Tensor) and self.seq_dim == 1:
            got = got.transpose(1, 2)
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            raise ValueError(
                f"the module's forward is not an attention call: expected a tensor of shape {tuple(expected.shape)}, "
                f"got {tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__}"
            )
        error_size = (got - expected).abs().max().item()
        if not error_size <= (1e-3 if dtype != torch.bfloat16 else 0.1):  # its outputs are below 16
            raise ValueError(
                f"the module computes something other than softmax(scale * q kᵀ) v: on a causal probe"
                f"{' of two sequences' if packed else ''} it differs by "
                f"{error_size:.3g} from what ContextParallel(scale={self.scale}, score_mod={self.score_mod}) would "
                f"run. Pass the scale or score_mod that the module applies inside to ContextParallel"
            )

    def _probe_mask(self, signature: inspect.Signature, offsets: list[int], gqa: bool, device: str) -> dict[str, Any]:
        """Keyword arguments that make the module itself causal on the probe."""
        parameters = signature.parameters
        kwargs: dict[str, Any] = {}
        if gqa and "enable_gqa" in parameters:
            kwargs["enable_gqa"] = True
        length = offsets[-1]
        if self.attention_type == "varlen":
            made = torch.tensor(offsets, dtype=torch.int32, device=device)
            longest = max(end - start for start, end in itertools.pairwise(offsets))
            varlen = {"cu_seq_q": made, "cu_seq_k": made, "max_q": longest, "max_k": longest, "window_size": (-1, 0)}
            return kwargs | {name: value for name, value in varlen.items() if name in parameters}
        mask = SpanMask.causal(length)
        name = next((n for n in (ATTENTION_TYPES[self.attention_type], *_MASKS) if n in parameters), None)
        if name is not None:
            dense = torch.from_numpy(mask.dense()).to(device)
            return kwargs | {name: mask.block_mask(device, 128) if self.attention_type == "flex" else dense}
        if "is_causal" in parameters:
            return kwargs | {"is_causal": True}
        raise ValueError(
            f"the module's forward takes {list(parameters)}, and neither a mask ({', '.join(_MASKS)}) nor is_causal"
        )

"""verify: a check that users run on their own model: parity with one device, and a probe for leaks.

Parity compares outputs and gradients of a sharded call with the same computation on one device. The leak probe changes
one token's input. Exactly the rows that the mask lets see the token must change. Every rank returns the same report.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spanwise.attention import executor
from spanwise.attention.attention import context_parallel_attention
from spanwise.attention.rank_plan import RankPlan
from spanwise.attention.tokens import gather, shard_for_rank
from spanwise.layouts.layout import contiguous
from spanwise.layouts.packing import Side
from spanwise.planning.plan import Plan

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3.5e-2, torch.float16: 1e-2}
_DENSE_LIMIT = 4096
Cells = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`; the same on every rank. True if everything held.

    Attributes:
        errors: largest relative error over all ranks, ``max |x - ref| / max |ref|``, of "out" and of each gradient:
            "dq", "dk", "dv", or "dinputs[i]" and "dparameters" of a model.
        tolerance: upper limit of the errors.
        probed: tokens whose input was changed.
        leaks: (row, token) pairs: the row's output changed although the mask hides the token from it.
        blind: (row, token) pairs: the row's output did not change although the mask shows it the token.

    >>> print(VerifyReport(errors={"out": 1e-7}, tolerance=2e-5, probed=(0, 5), leaks=((2, 5),), blind=()))
    FAILED
      out: relative error 1.00e-07 (tolerance 2e-05) ok
      gradients were not checked: no floating-point input and no parameter
      leak probe on 2 tokens: 1 leaks, 0 blind rows
        leak: row 2, token 5
    """

    errors: dict[str, float]
    tolerance: float
    probed: tuple[int, ...]
    leaks: Cells
    blind: Cells

    @property
    def ok(self) -> bool:
        """No leak, no blind row, and no error above the tolerance."""
        return not self.leaks and not self.blind and all(e <= self.tolerance for e in self.errors.values())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = ["verified" if self.ok else "FAILED"]
        for name, error in self.errors.items():
            verdict = "ok" if error <= self.tolerance else "too large"
            lines.append(f"  {name}: relative error {error:.2e} (tolerance {self.tolerance:.0e}) {verdict}")
        if set(self.errors) == {"out"}:
            lines.append("  gradients were not checked: no floating-point input and no parameter")
        found = f"leak probe on {len(self.probed)} tokens: {len(self.leaks)} leaks, {len(self.blind)} blind rows"
        lines.append(f"  {found}" if self.probed else "  leaks were not probed")
        for kind, pairs in (("leak", self.leaks), ("blind", self.blind)):
            lines += [f"    {kind}: row {row}, token {token}" for row, token in pairs[:5]]
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise ``RuntimeError`` with the report as its text unless everything held."""
        if not self.ok:
            raise RuntimeError(str(self))


def verify(
    fn_or_model: Callable[..., Any],
    plan: Plan,
    mesh: DeviceMesh | None,
    *,
    inputs: Sequence[torch.Tensor] | Mapping[str, Any] | None = None,
    plan_name: str | None = None,
    dim: int | None = None,
    mask_name: str = "default",
    dtype: torch.dtype = torch.float32,
    num_probes: int = 8,
    tolerance: float | None = None,
) -> VerifyReport:
    """Check a sharded attention call, or a whole model, against one device. Call it on every rank.

    Without `inputs`, `fn_or_model` is an attention call on BHSD shards, ``fn(q, k, v, plan)``, or a `ContextParallel`
    module. A parameter named plan, block_mask or attn_mask gets the plan, one named mesh the mesh. It is compared with
    dense float64 attention under the plan's mask. Padding of the plan's packing must give zeros, and is not probed. In
    cross attention the probed tokens are keys.

    With `inputs`, it is a model ``fn(*input_shards, plan)``, or ``fn(**input_shards, plan=plan)`` for inputs by name.
    It returns ``[B, T, …]``, an object with ``logits``, or a tuple that begins with the output. It is compared with
    itself under a plan of one rank, and a token may reach a row over several layers.

    Args:
        plan: the plan to prove.
        mesh: the cp mesh, 2-D for a plan of two levels; None for a plan of one rank.
        inputs: whole tensors, equal on all ranks, in the order of the arguments or by name; floating ones get
            gradients. By name, what is no tensor passes through, and the probe leaves ``"position_ids"`` and
            ``"attention_mask"`` as they are.
        plan_name: argument that takes the plan, where it has another name.
        dim: sequence dim of inputs and output; default 2 without `inputs`, else 1.
        mask_name: which of the plan's masks the call uses; a model may use them all where none has this name.
        dtype: of the generated q, k, v. Shapes follow the plan's heads (default 4 heads of 16, or the next number that
            Ulysses can divide).
        num_probes: tokens to change; shard edges first.
        tolerance: largest relative error; by default from the dtype.

    Parameters do not change. Gradients of a module's parameters, summed over ranks, are compared too, as "dparameters":
    also those that FSDP2 or tensor parallelism shards as DTensors. Then every rank of their mesh calls `verify`.

    Raises:
        ValueError: a `RankPlan`, which does not hold the mask; fewer than one probe; a model with more than 4,096
            tokens, or under a plan of cross attention.

    >>> import spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(64), num_ranks=1)
    >>> report = spanwise.verify(spanwise.context_parallel_attention, plan, mesh=None)
    >>> report.ok, sorted(report.errors)
    (True, ['dk', 'dq', 'dv', 'out'])
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"verify needs the Plan, which holds all ranks and the mask; got {type(plan).__name__}")
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    attention = inputs is None
    if plan.kv_layout != plan.layout and not attention:
        raise ValueError(
            f"under a plan of cross attention, {plan.seq_len} queries and {plan.kv_len} keys, verify cannot tell which "
            f"inputs belong to the keys; verify the attention call alone, without inputs"
        )
    tokens = _probe_tokens(plan, num_probes)
    masks = [mask_name] if attention or mask_name in plan.masks else sorted(plan.masks)
    must, may = _reach(plan, masks, tokens, attention)
    generator = torch.Generator("cpu").manual_seed(0)
    fixed: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        given = {key: x for key, x in inputs.items() if isinstance(x, torch.Tensor) and x.dim()}
        fixed = {key: x for key, x in inputs.items() if key not in given}
    elif inputs is None:
        given = dict(zip("qkv", _attention_inputs(plan, dtype, generator), strict=True))
    else:
        given = {f"inputs[{i}]": x for i, x in enumerate(inputs)}
    local = plan.local(mesh)
    given = {key: x.detach().to(local.tokens.device) for key, x in given.items()}

    known = inspect.signature(getattr(fn_or_model, "forward", fn_or_model)).parameters
    by_name = isinstance(inputs, Mapping)
    default = "plan" if by_name else None
    plan_name = plan_name or next((name for name in ("plan", "block_mask", "attn_mask") if name in known), default)

    def call(values: Sequence[torch.Tensor], local: RankPlan) -> torch.Tensor:
        if plan_name is None:
            result = fn_or_model(*values, local)
        else:
            named = {plan_name: local} | ({"mesh": mesh if local.num_ranks > 1 else None} if "mesh" in known else {})
            named |= dict(zip(given, values, strict=True)) | fixed if by_name else {}
            result = fn_or_model(*([] if by_name else values), **named)
        result = result[0] if isinstance(result, tuple) else getattr(result, "logits", result)
        if not isinstance(result, torch.Tensor):
            raise ValueError(f"verify compares one tensor, or logits; the function returned a {type(result).__name__}")
        return result

    dim = (2 if attention else 1) if dim is None else dim
    problem = _Problem(fn_or_model, call, plan, local, mesh, mask_name, dim, attention, given)
    errors, dtype_out = _parity(problem, generator)
    leaks, blind = _leaks(problem, tokens, must, may)
    return VerifyReport(errors, _TOLERANCES[dtype_out] if tolerance is None else tolerance, tuple(tokens), leaks, blind)


class _Problem(NamedTuple):
    """A function to verify, how it is called on inputs and a plan, its whole inputs, and this rank's part."""

    fn: Callable[..., Any]
    call: Callable[[Sequence[torch.Tensor], RankPlan], torch.Tensor]
    plan: Plan
    local: RankPlan
    mesh: DeviceMesh | None
    mask: str
    dim: int
    attention: bool
    inputs: dict[str, torch.Tensor]

    def cut(self, x: torch.Tensor, name: str = "q") -> torch.Tensor:
        """This rank's tokens of `x`, an input of this name, its gradient, or an output."""
        side: Side = "kv" if self.attention and name in ("k", "v") else "q"
        return shard_for_rank(self.plan, self.local.rank, x, dim=self.dim, side=side)


def _parity(problem: _Problem, generator: torch.Generator) -> tuple[dict[str, float], torch.dtype]:
    """Errors of the output and of all gradients against one device, and the output's dtype."""
    mesh, cut = problem.mesh, problem.cut
    parameters = parameters_of(problem.fn)  # before the forward, in which FSDP2 puts others in their place

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point())

    shards = [leaf(cut(x, name)) for name, x in problem.inputs.items()]
    out = problem.call(shards, problem.local)
    references = [leaf(x.double() if problem.attention else x) for x in problem.inputs.values()]
    reference = _reference(problem, references)
    where = reference.device
    cotangent = torch.randn(reference.shape, generator=generator, dtype=torch.float64, device="cpu").to(where)
    errors = {"out": error_of(out.detach(), cut(reference.detach()), reference, mesh)}
    named = [x for x in zip(problem.inputs, shards, references, strict=True) if x[1].requires_grad]
    grads = gradients(problem.fn, out, cut(cotangent), [x for _, x, _ in named] + parameters)
    wanted = gradients(problem.fn, reference, cotangent, [x for _, _, x in named] + parameters)
    for (name, _, _), grad, want in zip(named, grads, wanted, strict=False):
        errors[f"d{name}"] = error_of(grad, cut(want, name), want, mesh)
    for grad, want in zip(grads[len(named) :], wanted[len(named) :], strict=True):
        want = whole(want)
        error = error_of(summed(grad, mesh), want, want, mesh)
        errors["dparameters"] = max(errors.get("dparameters", 0.0), error)
    return errors, out.dtype


def _reference(problem: _Problem, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The output of one device, for attention in float64."""
    plan, where = problem.plan, inputs[0].device
    layout, kv_layout = (contiguous(length, 1) for length in (plan.seq_len, plan.kv_len))
    whole = plan.replace(layout=layout, kv_layout=kv_layout, num_ranks=1, inner=1, exchange="all_gather")
    alone = whole.local(None, where)
    if not problem.attention:
        return problem.call(inputs, alone)
    # Dense for short sequences; otherwise the CPU kernel in float64, which is tested against the dense one.
    kernel = "reference" if plan.seq_len <= _DENSE_LIMIT or where.type != "cpu" else "sdpa"
    q, k, v = inputs
    return context_parallel_attention(q, k, v, alone, None, mask_name=problem.mask, kernel=kernel)


def _leaks(problem: _Problem, tokens: list[int], must: np.ndarray, may: np.ndarray) -> tuple[Cells, Cells]:
    """(row, token) pairs that change although the mask forbids it, and that do not although it demands it.

    A row may round otherwise where another one changes: kernels choose by the largest lse, and products by the place of
    their operands in memory. So a leak is a change beyond four roundings and one in 10^6 of the largest output.
    """
    plan, dim = problem.plan, problem.dim
    kept = ("position_ids", "attention_mask", *(["q"] if plan.kv_layout != plan.layout else []))

    def outputs(token: int | None) -> torch.Tensor:
        values = []
        for name, x in problem.inputs.items():
            changes = token is not None and name not in kept
            values.append(problem.cut(_perturbed(x, token, dim) if changes else x, name))
        return gather(plan, problem.local, problem.mesh, problem.call(values, problem.local), dim, 0, "q")

    def rows(changes: list[torch.Tensor]) -> np.ndarray:
        return torch.stack([x.movedim((0, dim), (0, 1)).flatten(2).any(-1) for x in changes], -1).cpu().numpy()

    def pairs(wrong: np.ndarray) -> Cells:
        return tuple((int(row), tokens[column]) for column, row in np.argwhere(wrong.any(0).T))

    with torch.no_grad():
        base = outputs(None)
        rounding = 4 * torch.finfo(base.dtype).eps * base.abs() + 1e-6 * base.abs().amax()
        probed = [outputs(token) for token in tokens]
        beyond = rows([~((x - base).abs() <= rounding) for x in probed])  # nan is beyond
        return pairs(beyond & ~may), pairs(~rows([x != base for x in probed]) & must)


def _attention_inputs(plan: Plan, dtype: torch.dtype, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    q_heads = plan.num_q_heads or math.ceil(4 / plan.inner) * plan.inner
    kv_heads, dim = plan.num_kv_heads or q_heads, plan.head_dim or 16
    v_dim = plan.v_head_dim or dim
    shapes = ((q_heads, plan.seq_len, dim), (kv_heads, plan.kv_len, dim), (kv_heads, plan.kv_len, v_dim))
    return tuple(torch.randn(plan.batch_size, *shape, generator=generator, device="cpu").to(dtype) for shape in shapes)


def _probe_tokens(plan: Plan, count: int) -> list[int]:
    """Keys at both ends of the ranks' runs, then evenly spread keys, without padding; at most `count`."""
    valid = np.arange(plan.kv_len) if plan.packing is None else np.flatnonzero(plan.packing.valid_kv)
    if not len(valid):
        raise ValueError("the plan's packing has no token to probe: all of it is padding")
    runs = np.concatenate([plan.kv_layout.runs(rank) for rank in range(plan.num_ranks)])
    edges = np.intersect1d(np.concatenate([runs[:, 0], runs[:, 1] - 1]), valid)
    edges = edges[:: max(1, -(-len(edges) // max(1, count // 2)))]
    spread = valid[np.linspace(0, len(valid) - 1, num=min(count, len(valid))).round().astype(int)]
    return list(dict.fromkeys([*edges.tolist(), *spread.tolist()]))[:count]


def _perturbed(x: torch.Tensor, token: Any, dim: int) -> torch.Tensor:
    """`x` with one token's input changed: another number, for integers another value that occurs."""
    at, x = torch.tensor([token], device=x.device), x.clone()
    old, low, high = x.index_select(dim, at), x.min(), x.max()
    if x.is_floating_point():
        return x.index_copy_(dim, at, 1.0 - old)
    return x.index_copy_(dim, at, torch.where(old == high, low, high) if low < high else old ^ 1)


def _reach(plan: Plan, masks: list[str], tokens: list[int], attention: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose output must depend on a token's input, and rows where it may; bool ``[batch, rows, len(tokens)]``."""
    m = functools.reduce(operator.or_, map(plan.mask, masks))
    rows = np.arange(m.q_len)
    direct = np.stack([((m.start <= token) & (token < m.end)).any(axis=1) for token in tokens], axis=-1)
    if plan.kv_layout != plan.layout:
        return direct, direct
    # The token's own row changes with its query, unless it reads at most one key (then the softmax is constant).
    own = np.stack([(rows == token) & ((m.area() > 1) | (not attention)) for token in tokens], axis=-1)
    direct = direct | own
    if attention:
        return direct, direct
    if m.q_len > _DENSE_LIMIT:
        raise ValueError(
            f"the leak probe of a model follows the mask over layers, which takes seq_len <= {_DENSE_LIMIT}, got "
            f"{m.q_len}; verify a shorter sequence, or the attention call alone"
        )
    # The number of layers is unknown, so a row may see all tokens that the mask reaches in any number of steps.
    dense, may, before = m.dense().astype(np.float32), direct, None
    while before is None or (may != before).any():
        before, may = may, may | (dense @ may.astype(np.float32) > 0)
    return direct, may


def parameters_of(fn: Callable[..., Any]) -> list[torch.Tensor]:
    """The parameters that require gradients; none of a function that is no module."""
    if not isinstance(fn, nn.Module):
        return []
    for module in fn.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root keeps whole parameters after a forward
    return [p for p in fn.parameters() if p.requires_grad]


def gradients(
    fn: Callable[..., Any], out: torch.Tensor, cotangent: torch.Tensor, of: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of `out` for leaves, zero where it does not depend on them; what ``.grad`` holds is put back."""
    held = [x.grad for x in of]
    for x in of:
        x.grad = None
    if isinstance(fn, nn.Module) and any(isinstance(module, FSDPModule) for module in fn.modules()):
        out.backward(cotangent.to(out.dtype))  # FSDP2 reduces in hooks of other tensors, which write to .grad
    elif out.requires_grad and len(of):  # runs no hook, such as an optimizer's in the backward
        for x, grad in zip(of, torch.autograd.grad(out, of, cotangent.to(out.dtype), allow_unused=True), strict=True):
            x.grad = grad
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in of]
    for x, before in zip(of, held, strict=True):
        x.grad = before
    return grads


def summed(grad: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """A parameter's gradient in float64, whole, and summed over the cp ranks."""
    if mesh is None:
        return whole(grad)
    if isinstance(grad, DTensor) and set(mesh.mesh.flatten().tolist()) <= set(grad.device_mesh.mesh.flatten().tolist()):
        return whole(grad) * mesh.size()  # FSDP2 averaged over these ranks
    return executor.all_reduce(whole(grad), "sum", mesh, "a parameter's gradient")


def whole(grad: torch.Tensor) -> torch.Tensor:
    """All of a gradient in float64."""
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).double()


def error_of(x: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh | None) -> float:
    """Largest error of a rank's `x` on all ranks, over the largest entry of the `whole` tensor."""
    scale = whole.detach().double().abs().amax().clamp(min=1e-30) if whole.numel() else torch.tensor(1.0)
    worst = (x.double() - reference.double()).abs().amax() if x.numel() else torch.zeros((), device=x.device).double()
    worst = worst.nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum over ranks may drop nan
    if mesh is not None:
        worst = executor.all_reduce(worst, "max", mesh, "an error")
    return float(worst / scale)

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
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention import failure
from spanwise.attention.attention import context_parallel_attention
from spanwise.attention.kernels.base import Chunk
from spanwise.attention.rank_plan import RankPlan
from spanwise.attention.tokens import gather, shard_for_rank
from spanwise.attention.verify_gradients import error_of, gradients, parameters_of, summed, whole
from spanwise.layouts.balancers import contiguous
from spanwise.layouts.packing import Side
from spanwise.planning.plan import Plan

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3.5e-2, torch.float16: 1e-2}
_DENSE_LIMIT = 4096
_PLAN_NAMES = ("plan", "block_mask", "attn_mask")
Cells = tuple[tuple[int, int], ...]
_NOT_PROBED = ("position_ids", "attention_mask")  # they are not what a token says


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
        lines.append(f"  {found}" if self.probed else "  leaks were not probed: there is no second document")
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
    device: torch.device | str | None = None,
    num_probes: int = 8,
    seed: int = 0,
    tolerance: float | None = None,
) -> VerifyReport:
    """Check a sharded attention call, or a whole model, against one device. Call it on every rank.

    Without `inputs`, `fn_or_model` is an attention call on BHSD shards, ``fn(q, k, v, plan)`` or
    ``fn(q, k, v, plan, mesh)``, or a `ContextParallel` module. It is compared with dense float64 attention under the
    plan's mask. Padding of the plan's packing must give zeros, and is not probed. In cross attention the probed tokens
    are keys.

    With `inputs`, it is a model ``fn(*input_shards, plan)``, or ``fn(**input_shards, plan=plan)`` for inputs by name.
    It returns ``[B, T, …]``, or an object with ``logits``, or a tuple that begins with it. It is compared with itself
    under a plan of one rank, and a token may reach a row over several layers.

    Args:
        plan: the plan to prove.
        mesh: the cp mesh, 2-D for a plan of two levels; None for a plan of one rank.
        inputs: whole tensors, equal on all ranks, in the order of the arguments or by name; floating ones get
            gradients. By name, what is no tensor passes through, and the probe leaves ``"position_ids"`` and
            ``"attention_mask"`` as they are.
        plan_name: argument of the model that takes the plan; default: "plan", "block_mask" or "attn_mask", whichever
            its signature names.
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
            tokens, or under a plan of cross attention; a model that never reached spanwise's attention with the plan.

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
    names = [mask_name] if attention or mask_name in plan.masks else sorted(plan.masks)
    must, may = _reach(plan, names, tokens, attention)
    where = torch.device(device if device is not None else "cpu" if mesh is None else mesh.device_type)
    generator = torch.Generator("cpu").manual_seed(seed)
    by_name, others = None, {}
    if isinstance(inputs, Mapping):
        by_name = tuple(key for key, x in inputs.items() if isinstance(x, torch.Tensor) and x.dim())
        others = {key: x for key, x in inputs.items() if key not in by_name}
        inputs = [inputs[key] for key in by_name]
    whole = _attention_inputs(plan, dtype, generator) if inputs is None else tuple(inputs)
    sides: list[Side] = ["q", "kv", "kv"] if attention else ["q" for _ in whole]
    problem = _Problem(
        fn_or_model, by_name, others, plan_name, plan, plan.local(mesh, where), mesh, mask_name,
        dim=(2 if attention else 1) if dim is None else dim,
        whole=tuple(x.detach().to(where) for x in whole),
        names=("q", "k", "v") if attention else by_name or tuple(f"inputs[{i}]" for i in range(len(whole))),
        sides=tuple(sides),
        attention=attention,
    )  # fmt: skip
    errors, dtype_out, asked = _parity(problem, generator)
    leaks, blind = _leaks(problem, tokens, must, may)
    if not attention:
        _check_reached(problem, asked, tokens, must, blind)
    limit = tolerance if tolerance is not None else _TOLERANCES[dtype_out]
    return VerifyReport(errors, limit, tuple(tokens), leaks, blind)


class _Watched(dict[str, tuple[Chunk, ...]]):
    """A rank plan's chunks that remember whether attention asked for them."""

    asked = False

    def __getitem__(self, name: str) -> tuple[Chunk, ...]:
        self.asked = True
        return super().__getitem__(name)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A call to verify: the function, its whole inputs, and this rank's part of the plan.

    The inputs go to `fn` by name where `by_name` has them; `others` are arguments by name that are not cut.
    """

    fn: Callable[..., Any]
    by_name: tuple[str, ...] | None
    others: dict[str, Any]
    plan_name: str | None
    plan: Plan
    local: RankPlan
    mesh: DeviceMesh | None
    mask: str
    dim: int
    whole: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    sides: tuple[Side, ...]
    attention: bool

    def call(self, values: Sequence[torch.Tensor], local: RankPlan) -> torch.Tensor:
        """The output for these inputs and this plan: the result, its logits, or its first part."""
        forward = self.fn.forward if isinstance(self.fn, nn.Module) else self.fn
        parameters = inspect.signature(forward).parameters
        named = {} if self.by_name is None else dict(zip(self.by_name, values, strict=True))
        plan_names = [name for name in _PLAN_NAMES if name in parameters]
        if self.plan_name is not None or self.by_name is not None:
            plan_names = [self.plan_name or (plan_names or ["plan"])[0]]
        given = named | self.others | dict.fromkeys(plan_names, local)
        if plan_names and "mesh" in parameters:
            given["mesh"] = None if local.num_ranks == 1 else self.mesh
        positional = [*(values if self.by_name is None else ()), *([] if plan_names else [local])]
        result = self.fn(*positional, **given)
        first = result[0] if isinstance(result, (tuple, list)) else None
        for found in (result, getattr(result, "logits", None), first):
            if isinstance(found, torch.Tensor):
                return found
        raise ValueError(
            f"verify compares one tensor: the function must return it, or an object with logits, or a tuple that "
            f"begins with it; got a {type(result).__name__}. Wrap the model in a function that returns the tensor"
        )

    def cut(self, x: torch.Tensor, side: Side = "q") -> torch.Tensor:
        """This rank's tokens of `x`."""
        return shard_for_rank(self.plan, self.local.rank, x, dim=self.dim, side=side)

    def gathered(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole output for this rank's inputs."""
        return gather(self.plan, self.local, self.mesh, self.call(values, self.local), self.dim, 0, "q")


def _parity(problem: _Problem, generator: torch.Generator) -> tuple[dict[str, float], torch.dtype, bool]:
    """Errors of the output and of all gradients against one device, the output's dtype, and whether attention ran."""
    mesh, cut = problem.mesh, problem.cut
    parameters = parameters_of(problem.fn)  # before the forward, in which FSDP2 puts others in their place

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point())

    shards = [leaf(cut(x, side)) for x, side in zip(problem.whole, problem.sides, strict=True)]
    watched = _Watched(problem.local.chunks)
    out = problem.call(shards, dataclasses.replace(problem.local, chunks=watched))
    asked = watched.asked  # False in compiled code, too
    references = [leaf(x.double() if problem.attention else x) for x in problem.whole]
    reference = _reference(problem, references)
    where = reference.device
    cotangent = torch.randn(reference.shape, generator=generator, dtype=torch.float64, device="cpu").to(where)
    errors = {"out": error_of(out.detach(), cut(reference.detach()), reference, mesh)}
    named = [x for x in zip(problem.names, problem.sides, shards, references, strict=True) if x[2].requires_grad]
    if not named and not parameters:
        return errors, out.dtype, asked
    grads = gradients(problem.fn, out, cut(cotangent), [x for _, _, x, _ in named] + parameters)
    wanted = gradients(problem.fn, reference, cotangent, [ref for _, _, _, ref in named] + parameters)
    for (name, side, _, _), grad, want in zip(named, grads, wanted, strict=False):
        errors[f"d{name}"] = error_of(grad, cut(want, side), want, mesh)
    for grad, want in zip(grads[len(named) :], wanted[len(named) :], strict=True):
        want = whole(want)
        error = error_of(summed(grad, mesh), want, want, mesh)
        errors["dparameters"] = max(errors.get("dparameters", 0.0), error)
    return errors, out.dtype, asked


def _reference(problem: _Problem, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The output of one device, for attention in float64."""
    plan, where = problem.plan, inputs[0].device
    layouts = [contiguous(length, 1) for length in (plan.seq_len, plan.kv_len)]
    whole = plan.replace(layout=layouts[0], kv_layout=layouts[1], num_ranks=1, inner=1, exchange="all_gather")
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
    cross = problem.plan.kv_layout != problem.plan.layout
    leaks, blind = list[tuple[int, int]](), list[tuple[int, int]]()
    whole = list(zip(problem.whole, problem.sides, problem.names, strict=True))

    def changed(x: torch.Tensor, side: Side, name: str, token: int) -> torch.Tensor:
        kept = (cross and side == "q") or name in _NOT_PROBED
        return problem.cut(x if kept else _perturbed(x, token, problem.dim), side)

    def rows(changes: torch.Tensor) -> np.ndarray:
        return changes.movedim((0, problem.dim), (0, 1)).flatten(2).any(-1).cpu().numpy()

    with torch.no_grad():
        base = problem.gathered([problem.cut(x, side) for x, side, _ in whole])
        rounding = 4 * torch.finfo(base.dtype).eps * base.abs() + 1e-6 * base.abs().amax()
        for column, token in enumerate(tokens):
            probed = problem.gathered([changed(*one, token) for one in whole])
            beyond, any_change = rows(~((probed - base).abs() <= rounding)), rows(probed != base)  # nan is beyond
            leaks += [(int(row), token) for row in np.nonzero((beyond & ~may[:, :, column]).any(0))[0]]
            blind += [(int(row), token) for row in np.nonzero((~any_change & must[:, :, column]).any(0))[0]]
    return tuple(leaks), tuple(blind)


def _check_reached(problem: _Problem, asked: bool, tokens: list[int], must: np.ndarray, blind: Cells) -> None:
    """``ValueError``, on every rank, if no rank's attention read the plan and no probe reached another rank's row."""
    if problem.mesh is not None:
        # Compiled code may not set the flag; there the probes decide.
        flag = torch.tensor(float(asked), device=problem.local.tokens.device)
        asked = bool(failure.all_reduce(flag, "max", problem.mesh, "a flag"))
    layout = problem.plan.layout
    owner = np.empty((layout.batch_size, layout.seq_len), np.int64)
    for rank, row in np.ndindex(layout.num_ranks, layout.batch_size):
        owner[row, layout.indices(rank, row)] = rank
    apart = (must & (owner[:, :, None] != owner[:, None, tokens])).any(axis=0)
    reached = any((int(row), tokens[column]) not in blind for row, column in np.argwhere(apart))
    if not asked and not reached:
        raise ValueError(
            "the model never reached spanwise's attention with the plan: nothing asked for its K/V, and no change of a "
            "token reached another rank's row. Pass the plan on to every attention call. parallelize_module only warns "
            "of a pattern that matches no module; ContextParallel.num_applied counts what the style was applied to"
        )


def _attention_inputs(plan: Plan, dtype: torch.dtype, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    q_heads = plan.num_q_heads or math.ceil(4 / plan.inner) * plan.inner
    kv_heads, dim = plan.num_kv_heads or q_heads, plan.head_dim or 16
    v_dim = plan.v_head_dim or dim
    shapes = ((q_heads, plan.seq_len, dim), (kv_heads, plan.kv_len, dim), (kv_heads, plan.kv_len, v_dim))
    return tuple(torch.randn(plan.batch_size, *shape, generator=generator, device="cpu").to(dtype) for shape in shapes)


def _probe_tokens(plan: Plan, count: int) -> list[int]:
    """Keys at both ends of the ranks' runs, then evenly spread keys, without padding; at most `count`."""
    layout = plan.kv_layout
    valid = np.arange(plan.kv_len) if plan.packing is None else np.flatnonzero(plan.packing.valid_kv)
    if not len(valid):
        raise ValueError("the plan's packing has no token to probe: all of it is padding")
    runs = np.concatenate([layout.runs(rank) for rank in range(plan.num_ranks)])
    first, last = np.searchsorted(valid, runs[:, 0]), np.searchsorted(valid, runs[:, 1]) - 1
    some = first <= last  # runs with a token that is not padding
    edges = np.unique(valid[np.concatenate([first[some], last[some]])]).tolist()
    spread = valid[np.linspace(0, len(valid) - 1, num=min(count, len(valid))).round().astype(int)].tolist()
    picked = edges if len(edges) <= count // 2 else [edges[i * len(edges) // (count // 2)] for i in range(count // 2)]
    return list(dict.fromkeys([*picked, *spread]))[:count]


def _perturbed(x: torch.Tensor, token: int, dim: int) -> torch.Tensor:
    """`x` with one token's input changed: another number, for integers another value that occurs."""
    x = x.clone()
    at = x.select(dim, token)
    if x.is_floating_point():
        at.copy_(1.0 - at)
        return x
    others = torch.unique(x)
    if len(others) == 1:
        at.copy_(torch.where(at > 0, at - 1, at + 1))
    else:
        at.copy_(others[(torch.searchsorted(others, at.contiguous()) + 1) % len(others)])
    return x


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

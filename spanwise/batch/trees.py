"""Edges of a tree on ranks: labels, weights and log-probabilities where a token may have several next tokens.

Each token but the first of a root is the target of one edge, from the token before it on its path. The rank that holds
the source of an edge has the hidden state that predicts the target. So values of targets (labels, weights, old
log-probabilities) are whole arrays, ``x[edges.targets]`` are those of a rank, and `unshard_edges` leads back.
"""

# K edges of this rank, N tokens of the tree

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention import executor
from spanwise.attention.compare import Compare, compare_backward, compare_call, compared, tells_refusals
from spanwise.attention.rank_plan import rank_on
from spanwise.layouts.thd_order import check_dim
from spanwise.layouts.token_tree import TokenTree
from spanwise.planning.documents import check_tree
from spanwise.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class TreeEdges:
    """The edges of a tree whose sources a rank holds, by source. Made by `shard_edges`.

    Attributes:
        sources: int64 ``[K]``, index of each edge's source among the rank's tokens: ``hidden[:, edges.sources]``.
        targets: int64 ``[K]``, token of the tree that the source predicts: ``labels[:, edges.targets]``.
        num_tokens: tokens of the tree.
        digest: uint8 ``[16]`` in host memory, of the tree and the plan; compared across the ranks in each call.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    num_tokens: int
    digest: torch.Tensor

    def to(self, device: torch.device | str) -> TreeEdges:
        """The same edges on a device; the host does not wait."""
        sources, targets = (x.to(device, non_blocking=True) for x in (self.sources, self.targets))
        return TreeEdges(sources, targets, self.num_tokens, self.digest)


def shard_edges(
    tree: TokenTree,
    plan: Plan,
    mesh: DeviceMesh | None = None,
    *,
    device: torch.device | str = "cpu",
) -> TreeEdges:
    """The edges whose sources this rank holds: its loss terms, one for each token that one of its tokens predicts.

    Args:
        plan: for the mask of the tree, ``tree.mask()``, or for parts of it; not a `RankPlan`.
        mesh: the cp mesh of the plan; None if it has one rank.
        device: of the result.

    Raises:
        ValueError: a plan for another number of tokens, for masks that read other tokens than the paths hold, or for
            batch rows that are laid out differently; a mesh that does not fit the plan.

    >>> import torch, spanwise
    >>> tree = spanwise.TokenTree([-1, 0, 0], [2, 1, 2])  # token 1 predicts the tokens 2 and 3
    >>> plan = spanwise.make_plan(tree.mask(), num_ranks=1)
    >>> edges = spanwise.shard_edges(tree, plan)
    >>> edges.sources.tolist(), edges.targets.tolist()
    ([0, 1, 1, 3], [1, 2, 3, 4])
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"shard_edges takes a Plan, which knows the layout, got a {type(plan).__name__}")
    check_tree(plan, tree)
    rows, tokens_T = plan.layout.batch_size, plan.layout.indices(rank_on(mesh, plan.num_ranks, plan.inner))
    if rows > 1:
        raise ValueError(f"the plan lays out {rows} batch rows differently; pack the trees with TokenTree.pack")
    parent_N = tree.parent_tokens()
    target_N = np.flatnonzero(parent_N >= 0)
    target_N = target_N[np.argsort(parent_N[target_N], kind="stable")]
    at = np.searchsorted(tokens_T, parent_N[target_N])  # a rank's tokens ascend
    own = np.append(tokens_T, -1)[at] == parent_N[target_N]
    sources, targets = torch.from_numpy(at[own]), torch.from_numpy(target_N[own])
    digest = hashlib.blake2b(plan.fingerprint.encode() + parent_N.tobytes(), digest_size=16).digest()
    return TreeEdges(sources, targets, tree.num_tokens, torch.tensor(list(digest), dtype=torch.uint8)).to(device)


@tells_refusals
def unshard_edges(edges: TreeEdges, mesh: DeviceMesh | None, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Values of the edges of all ranks by their targets, on every rank: ``[…, K, …]`` to ``[…, N, …]``.

    The first tokens of roots, which nothing predicts, get 0. ``result[path].sum()`` is the log-probability of a
    sequence. An all-reduce. The backward is the exact adjoint: the gradient of an edge is summed over all ranks, in
    float32 at least. If all ranks compute the same loss from the result, scale that loss by ``1 / mesh.size()``.

    Args:
        edges: this rank's, from `shard_edges`.
        mesh: the cp mesh of the plan; None if it has one rank.
        x: a value of each edge along `dim`.

    Raises:
        ValueError: another number of values than edges, or a complex tensor.
        spanwise.MismatchError: ranks make different calls.
        spanwise.ExchangeError: a rank is gone or too late.

    >>> import torch, spanwise
    >>> tree = spanwise.TokenTree([-1, 0, 0], [2, 1, 2])
    >>> edges = spanwise.shard_edges(tree, spanwise.make_plan(tree.mask(), num_ranks=1))
    >>> spanwise.unshard_edges(edges, None, torch.tensor([0.1, 0.2, 0.3, 0.4]))
    tensor([0.0000, 0.1000, 0.2000, 0.3000, 0.4000])
    """
    if not isinstance(x, torch.Tensor) or x.is_complex():
        raise ValueError(f"unshard_edges takes a real tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    dim = check_dim(x, dim)
    if x.shape[dim] != len(edges.targets):
        raise ValueError(f"dim {dim} must have a value for each of {len(edges.targets)} edges, got {tuple(x.shape)}")
    mesh = None if mesh is None or mesh.size() == 1 else mesh
    x_KF = x.movedim(dim, 0)
    call = None
    if mesh is not None:
        sizes = ("[tokens of the tree, other dims]", (edges.num_tokens, *x_KF.shape[1:]))
        call = compare_call("unshard_edges", {"dtype": x.dtype}, mesh, [x], sizes=sizes, plan=edges.digest, sums=True)
    whole_NF = x_KF.new_zeros(edges.num_tokens, *x_KF.shape[1:]).index_copy(0, edges.targets, x_KF)
    if mesh is not None:
        whole_NF = _SumBothWays.apply(whole_NF, mesh, call)
    return compare_backward((whole_NF,), call)[0].movedim(0, dim)


class _SumBothWays(torch.autograd.Function):
    """A sum over ranks; the backward sums the gradients of all ranks, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, compare: Compare | None) -> torch.Tensor:
        ctx.mesh, ctx.dtype = mesh, x.dtype
        (x,) = compared((x,), compare)
        return executor.all_reduce(x, "sum", mesh, "values of edges")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        return executor.all_reduce(grad, "sum", ctx.mesh, "gradients of edges").to(ctx.dtype), None, None

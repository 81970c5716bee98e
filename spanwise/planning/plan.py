"""Plan: the data of a plan, and one-line methods for what is computed from it where users look for it.

`make_plan` makes plans. The methods lead to `memory`, `predict`, `explain`, `files`, and up to `attention.rank_plan`
and `attention.tokens`; nothing is computed here.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import TYPE_CHECKING, Any

from spanwise.layouts.packing import Side
from spanwise.masks.arrays import Int64
from spanwise.planning import explain, files, memory, predict, requests
from spanwise.planning.plan_data import PlanData
from spanwise.planning.timeline import Timeline

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from spanwise.attention.rank_plan import RankPlan


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanData):
    """The part of every rank: who holds, computes and receives what. Made by `make_plan`.

    Immutable, picklable, equal when fingerprints are equal. The fields are those of `PlanData`.

    >>> import spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 300, 1000]), num_ranks=2, balancer="contiguous")
    >>> plan.runs(rank=0).tolist(), plan.recv_tokens().tolist()
    ([[0, 500]], [0, 200])
    """

    def recv_bytes(self, mask: str = "default") -> Int64:
        """Bytes that each rank receives in one forward, int64: K and V, and under Ulysses q and the output too.

        Padding that travels is included. Needs ``num_q_heads``, ``num_kv_heads`` and ``head_dim``.
        """
        return memory.received(self, mask)

    def resident_bytes(self, mask: str = "default") -> Int64:
        """Bytes that each rank holds at most for the exchange in a layer's forward, in addition to its shards; int64.

        K/V of others, as they come and in order, and buffers packed to leave; under Ulysses q and the output too. This
        is what eager code needs with kernel "sdpa", for a batch of `batch_size` rows, to the byte. Not included:
        results of kernels and of their merge, zeros put in padding, spare keys of "flex", and the copies that batch
        rows with masks of their own take where k and v are not ``[B, T, H, D]`` in memory.

        Needs what `recv_bytes` needs.
        """
        return memory.resident(self, mask)

    def saved_bytes(self, mask: str = "default") -> Int64:
        """The part of `resident_bytes` that a layer keeps for its backward, int64."""
        return memory.saved(self, mask)

    def predict(self) -> dict[str, float]:
        """Predicted seconds of attention in one step (forward and backward), all masks by weight, on `hardware`.

        Returns:
            ``compute_forward``, ``compute_backward``: of the busiest rank. ``exchange_forward``, ``exchange_backward``:
            of the collectives. ``exposed_forward``, ``exposed_backward``: time of a pass beyond the compute of the
            busiest rank. ``total``: of both passes, as simulated by :meth:`timeline`.

        Raises:
            ValueError: the plan was made without ``num_q_heads``, ``num_kv_heads`` and ``head_dim``.
        """
        return predict.predict(self)

    def timeline(self, mask: str = "default") -> Timeline:
        """When each rank computes and K/V travel in one layer that uses ``mask``, as predicted; needs as `predict`."""
        return predict.simulate(self, mask)

    def explain(self) -> str:
        """Work, traffic, predicted time and the reason of the choice, as text for a person."""
        return explain.explain(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` (numpy's npz; no pickled code)."""
        files.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], exchange: Any = None) -> Plan:
        """Read a plan that :meth:`save` wrote; ``ValueError`` if the file is not a plan, or was altered.

        Args:
            exchange: the exchange object, for a plan made with one that is not spanwise's.
        """
        return files.load(cls, path, requests.known_exchanges(exchange))

    def local(
        self, mesh: DeviceMesh | None, device: torch.device | str | None = None, *, kernel: Any = "auto"
    ) -> RankPlan:
        """This rank's tensors, as a frozen pytree; see :func:`spanwise.attention.rank_plan.local_plan`."""
        from spanwise.attention import rank_plan

        return rank_plan.local_plan(self, mesh, device, kernel=kernel)

    def shard(self, x: Any, rank: int, dim: int = 1, *, batch_dim: int | None = 0, side: Side = "q") -> Any:
        """``rank``'s shard of ``x``, a tensor or a pytree of tensors, without a mesh; see :func:`spanwise.shard`."""
        from spanwise.attention import tokens

        return tokens.shard_for_rank(self, rank, x, dim=dim, batch_dim=batch_dim, side=side)

    def replace(self, **changes: Any) -> Plan:
        """The plan with other fields; ``exchange`` is a name or an `Exchange`. Areas and traffic are kept if they may.

        >>> import spanwise
        >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(512), num_ranks=2, exchange="needed")
        >>> plan.replace(exchange="ring").exchange
        'ring'
        """
        if "exchange" in changes:
            changes["kv_exchange"] = requests.exchange_of(changes.pop("exchange"))
        return super().replace(**changes)

    def num_pieces(self, mask: str = "default") -> int:
        """Deprecated name of `num_chunks`."""
        warnings.warn("Plan.num_pieces is now Plan.num_chunks", DeprecationWarning, stacklevel=2)
        return self.num_chunks(mask)

    def __repr__(self) -> str:
        return (
            f"Plan(seq_len={self.seq_len}, num_ranks={self.num_ranks}, masks={sorted(self.masks)}, "
            f"balancer={self.balancer!r}, exchange={self.exchange!r}, fingerprint={self.fingerprint[:8]}…)"
        )

"""Plan: the data of a plan, with one-line methods where users look for them.

`make_plan` makes plans. The methods call functions of `memory`, `seconds`, `explain` and `files`, and of two modules
above this folder: `attention.rank_plan` and `attention.tokens`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from spanwise.layouts.packing import Side
from spanwise.masks.arrays import Int64
from spanwise.planning import explain, files, memory, seconds
from spanwise.planning.plan_data import PlanData
from spanwise.planning.seconds import Timeline

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from spanwise.attention.rank_plan import RankPlan


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanData):
    """The part of every rank: the tokens it holds, its work and its traffic. Made by `make_plan`.

    Immutable, picklable, equal when fingerprints are equal. The fields are those of `PlanData`.

    >>> import spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 300, 1000]), num_ranks=2, balancer="contiguous")
    >>> plan.runs(rank=0).tolist(), plan.recv_tokens().tolist()
    ([[0, 500]], [0, 200])
    """

    def recv_bytes(self, mask: str = "default") -> Int64:
        """Bytes that each rank receives in one forward, int64: K and V, and under Ulysses q and the output too.

        Padding that travels is included. Needs ``num_q_heads``, ``num_kv_heads`` and ``head_dim``.

        >>> import spanwise
        >>> mask = spanwise.SpanMask.sliding_window(1024, 100)
        >>> plan = spanwise.make_plan(
        ...     mask, 2, balancer="contiguous", exchange="needed", num_q_heads=8, num_kv_heads=2, head_dim=64
        ... )
        >>> plan.recv_bytes().tolist()  # 100 keys; K and V, 2 heads of 64, 2 bytes each
        [0, 51200]
        """
        return memory.received(self, mask)

    def resident_bytes(self, mask: str = "default") -> Int64:
        """Most bytes that each rank holds for the exchange in a layer's forward, in addition to its shards; int64.

        Counts K/V of other ranks, as received and in order, and send buffers; under Ulysses q and the output too. Exact
        to the byte for eager code with kernel "sdpa" and a batch of `batch_size` rows. Not included: results of
        kernels and of their merge, zeros put in padding, spare keys of "flex", and the copies that batch rows with
        different masks take where k and v are not ``[B, T, H, D]`` in memory. Of the results a layer keeps one output
        and one lse for its backward, however many chunks there are; compiled "flex" one output a chunk.

        Needs the same arguments of `make_plan` as `recv_bytes`.

        >>> import spanwise
        >>> mask = spanwise.SpanMask.causal(1024)
        >>> plan = spanwise.make_plan(mask, 2, balancer="contiguous", exchange="needed", num_q_heads=8, head_dim=64)
        >>> (plan.resident_bytes() / plan.recv_bytes().max()).tolist(), plan.saved_bytes().tolist()
        ([2.0, 2.0], [0, 1048576])
        """
        return memory.resident_and_saved(self, mask)[0]

    def saved_bytes(self, mask: str = "default") -> Int64:
        """Bytes of `resident_bytes` that a layer keeps for its backward, int64."""
        return memory.resident_and_saved(self, mask, "saved_bytes()")[1]

    def predict(self) -> dict[str, float]:
        """Predicted seconds of attention in one step (forward and backward), all masks by weight, on `hardware`.

        Returns:
            ``compute_forward``, ``compute_backward``: compute of the busiest rank. ``exchange_forward``,
            ``exchange_backward``: the collectives. ``exposed_forward``, ``exposed_backward``: time of a pass beyond the
            compute of the busiest rank. ``total``: both passes, simulated by :meth:`timeline`. With `recurrences` also
            ``recurrent``, all layers that carry a state and the moves between layouts; part of ``total``.

        Raises:
            ValueError: the plan was made without ``num_q_heads``, ``num_kv_heads`` and ``head_dim``.

        >>> import spanwise
        >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(4096), 2, num_q_heads=8, head_dim=64)
        >>> seconds = plan.predict()
        >>> 0 < seconds["compute_forward"] < seconds["compute_backward"] < seconds["total"]
        True
        """
        return seconds.predict(self)

    def timeline(self, mask: str = "default") -> Timeline:
        """Predicted times of compute and collectives of each rank in one layer that uses ``mask``.

        Needs the same arguments of `make_plan` as `predict`.

        >>> import spanwise
        >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(4096), 2, num_q_heads=8, head_dim=64)
        >>> plan.timeline().forward.names
        ['pack', 'local attention', 'attention, chunk 1']
        """
        return seconds.timeline(self, mask)

    def host_traffic(self, mask: str = "default", host_size: int | None = None) -> memory.HostTraffic:
        """K/V tokens that stay inside hosts and that cross between them in a forward, all ranks together.

        Args:
            host_size: ranks of a host; rank r is on host ``r // host_size``. Default: by the plan's `hardware`.

        Raises:
            ValueError: no `host_size`, and hardware without hosts smaller than the plan.

        >>> import spanwise
        >>> mask = spanwise.SpanMask.documents([0, 300, 512])
        >>> plan = spanwise.make_plan(mask, 4, balancer="contiguous", exchange="needed")
        >>> plan.host_traffic(host_size=2)
        HostTraffic(host_size=2, inside=212, between=256)
        """
        return memory.host_traffic(self, mask, host_size)

    def explain(self) -> str:
        """Work, traffic, predicted time and the reason of the choice, as text for a person.

        >>> import spanwise
        >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(1000), num_ranks=2, balancer="contiguous")
        >>> print(plan.explain().splitlines()[0])
        1,000 tokens on 2 ranks: 500 to 500 tokens a rank
        """
        return explain.explain(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` (numpy's npz; no pickled code).

        >>> import os, tempfile, spanwise
        >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(1000), num_ranks=2)
        >>> path = os.path.join(tempfile.mkdtemp(), "plan.npz")
        >>> plan.save(path)
        >>> spanwise.Plan.load(path) == plan
        True
        """
        files.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], exchange: Any = None) -> Plan:
        """Read a plan that :meth:`save` wrote; ``ValueError`` if the file is not a plan, or was altered.

        Args:
            exchange: the function that makes steps, if the plan was made with one of the caller.
        """
        return files.load(cls, path, exchange)

    def local(
        self, mesh: DeviceMesh | None, device: torch.device | str | None = None, *, kernel: Any = "auto"
    ) -> RankPlan:
        """This rank's tensors, as a frozen pytree; see :func:`spanwise.attention.rank_plan.local_plan`.

        >>> import spanwise
        >>> spanwise.make_plan(spanwise.SpanMask.causal(8), num_ranks=1).local(mesh=None).tokens.tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
        """
        from spanwise.attention import rank_plan

        return rank_plan.local_plan(self, mesh, device, kernel=kernel)

    def shard(self, x: Any, rank: int, dim: int = 1, *, batch_dim: int | None = 0, side: Side = "q") -> Any:
        """``rank``'s shard of ``x``, a tensor or a pytree of tensors, without a mesh; see :func:`spanwise.shard`.

        >>> import torch, spanwise
        >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(8), 2, balancer="head_tail", block_size=1)
        >>> plan.shard(torch.arange(8)[None], rank=0).tolist()
        [[0, 1, 6, 7]]
        """
        from spanwise.attention import tokens

        return tokens.shard_for_rank(self, rank, x, dim=dim, batch_dim=batch_dim, side=side)

    def __repr__(self) -> str:
        return (
            f"Plan(seq_len={self.seq_len}, num_ranks={self.num_ranks}, masks={sorted(self.masks)}, "
            f"balancer={self.balancer!r}, exchange={self.exchange!r}, fingerprint={self.fingerprint[:8]}…)"
        )

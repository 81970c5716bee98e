"""K/V that cross between hosts. Exact; pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spanwise.layouts import traffic
from spanwise.layouts.layout import Layout
from spanwise.masks.arrays import Int64
from spanwise.planning.plan_data import PlanData


class HostTraffic(NamedTuple):
    """K/V tokens that all ranks receive in a forward, by where they come from.

    Attributes:
        host_size: ranks of a host.
        inside: from ranks of the same host.
        between: from other hosts; a token counts for each rank that receives it.
        once: tokens that some rank of a host reads and none holds; each counts once a host.
    """

    host_size: int
    inside: int
    between: int
    once: int


def host_size(plan: PlanData) -> int | None:
    """Ranks of a host; None without hosts smaller than the plan."""
    return plan.hardware.groups_on_a_host(plan.num_ranks)


def host_traffic(plan: PlanData, mask: str, size: int | None = None) -> HostTraffic:
    """The counts of `Plan.host_traffic`."""
    size = size or host_size(plan)
    if size is None or size < 1:
        raise ValueError(
            f"the plan's hardware {plan.hardware.name!r} has no hosts smaller than {plan.num_ranks} ranks: give "
            f"host_size, or make the plan with hardware that has hosts, such as spanwise.H100"
        )
    tokens, host = plan.traffic(mask), np.arange(plan.num_ranks) // size
    inside = int(tokens[host[:, None] == host].sum())
    return HostTraffic(size, inside, int(tokens.sum()) - inside, _entering(plan, mask, host))


def _entering(plan: PlanData, mask: str, host: Int64) -> int:
    """Tokens that some rank of a host reads and none holds, summed over hosts."""

    def by_host(layout: Layout) -> Layout:
        pieces = [layout.pieces(row) for row in range(layout.batch_size)]
        tables = [np.column_stack([host[each[:, 0]], each[:, 1:]]) for each in pieces]
        return Layout(tables, int(host[-1]) + 1, layout.seq_len)

    held = by_host(plan.kv_layout)
    rows = traffic.needs(plan.mask(mask), by_host(plan.layout), held, plan.batch_size)
    return int(sum((runs[:, 1] - runs[:, 0]).sum() for row in rows for runs in row))

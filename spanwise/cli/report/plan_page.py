"""The report of a plan: `Plan.explain` and tables as text, a page with drawings too, and all figures as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from spanwise import units
from spanwise.cli.report.page import Bar, Block, Heading, Legend, Preformatted, Table, pairs, render_page
from spanwise.cli.report.pictures import MOST_RANKS, draw_mask, draw_timeline, sample_ranks
from spanwise.cli.report.svg import RANK_COLORS
from spanwise.planning.explain import describe_exchange
from spanwise.planning.plan import Plan

_TIMES = Legend(
    (
        ("local", "attention on own keys"), ("remote", "attention on received keys"), ("copy", "packing and summing"),
        ("exchange", "exchange"), ("waited", "waits for K/V, or for other ranks"),
    )
)  # fmt: skip
_COUNTED = (
    "Work and traffic are counted exactly from the mask and the layout; a pair is one query row reading one key. "
    "Seconds are predicted: floating-point operations over the attention rate, bytes over the links, in the order in "
    "which a layer runs them. Exposed: what a pass takes longer than the busiest rank computes."
)

#: Attributes of a plan that JSON holds as they are.
_OF_PLAN = (
    "fingerprint", "inner", "block_size", "balancer", "exchange", "stages", "reason", "num_q_heads", "num_kv_heads",
    "head_dim", "dtype",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
    """A plan of one sequence, its source in words, and the shell command that makes it."""

    plan: Plan
    source: str
    command: str

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.plan.cu_seqlens[0]) if self.plan.cu_seqlens else np.array([self.plan.seq_len])

    @property
    def heading(self) -> str:
        """The documents, and where they are from."""
        lengths = self.lengths
        found = f"{len(lengths):,} documents of {lengths.min():,} to {lengths.max():,} tokens, median "
        return f"{found}{np.median(lengths):,.0f}" if len(lengths) > 1 else "one document"

    def text(self) -> str:
        """What the command prints."""
        tables = [rank_table(self.plan, name) for name in self.plan.masks]
        first = f"{self.heading}; from {self.source}\n{self.plan.explain()}"
        return "\n\n".join([first, *map(str, tables), self.command])

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON, without the plan's arrays. Names hold the unit: seconds, bytes, tokens or pairs."""
        plan = self.plan
        return {
            "command": self.command,
            "source": self.source,
            "tokens": plan.seq_len,
            "documents": len(self.lengths),
            "document_tokens": self.lengths.tolist(),
            "ranks": plan.num_ranks,
            **{name: getattr(plan, name) for name in _OF_PLAN},
            "hardware": plan.hardware.to_dict(),
            "tokens_per_rank": plan.layout.tokens_per_rank.tolist(),
            "predicted_seconds": plan.predict(),
            "candidates": [{**dataclasses.asdict(one), "seconds": dict(one.seconds)} for one in plan.candidates],
            "masks": [_mask_figures(plan, name) for name in plan.masks],
        }

    def html(self) -> str:
        """The page."""
        plan = self.plan
        title = f"{plan.seq_len:,} tokens on {plan.num_ranks} ranks: {plan.balancer}, {describe_exchange(plan)}"
        blocks: list[Block] = [Heading(1, title), f"{self.heading}, from {self.source}.", Preformatted(plan.explain())]
        for index, name in enumerate(plan.masks):
            blocks += _mask(plan, name, str(index))
        return render_page(f"spanwise plan: {title}", [*blocks, _COUNTED, Preformatted(self.command)])


def rank_table(plan: Plan, name: str) -> Table:
    """Work and traffic of each rank under one mask."""
    work, local, recv_tokens, recv_bytes = (
        of(name) for of in (plan.work, plan.local_work, plan.recv_tokens, plan.recv_bytes)
    )
    sent, most = plan.traffic(name).sum(axis=0), max(int(work.max()), 1)
    shown = sample_ranks(work, MOST_RANKS)
    rows = [
        (
            str(rank), Bar(local[rank] / most, work[rank] / most), pairs(work[rank]),
            f"{local[rank] / work[rank]:.0%}" if work[rank] else "–", f"{recv_tokens[rank]:,.0f}",
            units.num_bytes(recv_bytes[rank]), f"{sent[rank]:,.0f}",
        )
        for rank in shown
    ]  # fmt: skip
    columns = ("rank", "pairs: own keys █, received ▒", "pairs", "on own keys", "K/V tokens received", "bytes",
               "sent tokens")  # fmt: skip
    mask = f"mask {name!r}, {plan.weights[name]:,g} layers: " if len(plan.masks) > 1 else ""
    title = f"{mask}{pairs(work.sum())} pairs, imbalance {plan.imbalance(name):.3f} (busiest over mean rank)"
    sampled = f"{len(shown)} of {len(work)} ranks, from the busiest to the idlest" if len(shown) < len(work) else ""
    return Table(title, columns, rows, note=sampled, left=2)


def _mask(plan: Plan, name: str, key: str) -> list[Block]:
    """What the page shows of one mask. `key` is in the ids of its drawings; a mask's name may hold blanks."""
    count = len(RANK_COLORS)
    colors = [
        (f"c{i}", f"rank {i}, {i + count} …" if i + count < plan.num_ranks else f"rank {i}") for i in range(count)
    ]
    held, saved = (units.num_bytes(int(of(name).max())) for of in (plan.resident_bytes, plan.saved_bytes))
    found: list[Block] = [
        Heading(2, f"Mask “{name}”: who computes what" if len(plan.masks) > 1 else "Who computes what"),
        Legend([*colors[: plan.num_ranks], ("muted", "pale: keys of another rank")]),
        draw_mask(key, plan, name),
        "Every cell is one query row and one key, sampled. The strips show which rank holds the tokens.",
        rank_table(plan, name),
        {"Held for the exchange": f"{held} a layer on the fullest rank; {saved} of it for the backward"},
    ]
    return [*found, Heading(3, "Predicted timeline of one layer"), _TIMES, draw_timeline(key, plan, name)]


def _mask_figures(plan: Plan, name: str) -> dict[str, Any]:
    arrays = {
        "work_pairs": plan.work(name), "local_pairs": plan.local_work(name), "needed_tokens": plan.needed_tokens(name),
        "recv_tokens": plan.recv_tokens(name), "recv_bytes": plan.recv_bytes(name),
        "resident_bytes": plan.resident_bytes(name), "saved_bytes": plan.saved_bytes(name),
        "traffic_tokens": plan.traffic(name),
    }  # fmt: skip
    return {
        "name": name,
        "layers": plan.weights[name],
        "pairs": int(plan.work(name).sum()),
        "imbalance": plan.imbalance(name),
        **{key: value.tolist() for key, value in arrays.items()},
        "timeline": [dataclasses.asdict(interval) for interval in plan.timeline(name).intervals],
    }

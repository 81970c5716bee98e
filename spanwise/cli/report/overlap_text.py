"""The report of optimized graphs on a terminal: orders compared, process groups, exposed collectives."""

from __future__ import annotations

from rich.table import Table

from spanwise.cli.report.overlap_figures import GraphFigures, Page
from spanwise.cli.report.terminal import console, report_table
from spanwise.cli.report.units import milliseconds, num_bytes, percent, seconds
from spanwise.overlap.explain.report import Collective, Figures, OrderFigures, summary

#: Meaning of the counts in tables of orders.
COUNTED = "of the launches that compute could hide at all; collectives that were merged are one launch"

#: Most rows of a table of exposed collectives.
MOST = 10


def show(page: Page) -> None:
    """Print the report."""
    out = console()
    for line in (page.what, f"on {page.hardware.name}; groups: {page.groups}"):
        out.print(line, highlight=False)
    for one in page.graphs:
        out.print()
        out.print(_order_table(one))
        if one.note:
            out.print(one.note, highlight=False)
        facts = summary(one.figures)
        for name in ("split", "bound", "hideable", "peak memory", "exposed for"):
            if name in facts:
                out.print(f"{name}: {facts[name]}", highlight=False)
        if one.figures.collectives:
            out.print(_group_table(one))
        if one.figures.most_exposed:
            out.print(_collective_table(one.figures))
    out.print(f"\n{page.command}", highlight=False)


def describe_counts(order: OrderFigures) -> str:
    """Hideable launches that are hidden, partly hidden, exposed."""
    return " / ".join(f"{order.counts[key]:,}" for key in ("hidden", "partly", "exposed"))


def describe_collective(one: Collective) -> str:
    """A collective by its node; a bucket by the number of its members."""
    return one.name if one.members == 1 else f"{one.operator} of {one.members}"


def _order_table(one: GraphFigures) -> Table:
    heads = ("makespan", "exposed", "bound", "above it", "hidden / partly / exposed", "launches", "peak memory", "took")
    title = f"{one.name[0].upper()}{one.name[1:]}, {one.nodes:,} nodes"
    table = report_table(title, ("order", *heads), ("order",), caption=f"Hidden, partly, exposed: {COUNTED}.")
    for order in one.orders:
        table.add_row(
            order.name,
            milliseconds(order.makespan),
            milliseconds(order.exposed),
            milliseconds(order.bound),
            percent(order.left / order.bound, 1) if order.bound else "–",
            f"{describe_counts(order)} of {order.hideable:,}",
            f"{order.launches:,}",
            num_bytes(order.peak_bytes),
            "" if order.seconds is None else seconds(order.seconds),
            style="bold" if order is one.figures.after else None,
        )
    return table


def _group_table(one: GraphFigures) -> Table:
    columns = ("group", "launches", "of", "take", "exposed", "hidden")
    table = report_table("Collectives by process group", columns, ("group",))
    for row in one.by_group():
        table.add_row(
            row["group"],
            f"{row['launches']:,}",
            f"{row['members']:,}",
            milliseconds(row["ms"]),
            milliseconds(row["exposed"]),
            percent(1 - row["exposed"] / row["ms"]) if row["ms"] else "–",
        )
    return table


def _collective_table(found: Figures) -> Table:
    most = found.most_exposed
    columns = ("collective", "group", "size", "takes", "exposed", "why")
    caption = f"{MOST} of {len(most):,} that are exposed" if len(most) > MOST else None
    table = report_table("Most exposed collectives", columns, ("collective", "group", "why"), caption=caption)
    for one in most[:MOST]:
        times = milliseconds(one.ms), milliseconds(one.exposed)
        table.add_row(describe_collective(one), one.group, num_bytes(one.num_bytes), *times, one.why)
    return table

"""Progress of a run: a display on a terminal, plain lines elsewhere. Only rank 0 prints."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display:
    """A context manager that shows steps; silent unless `enabled`."""

    def __init__(self, enabled: bool, steps: int, done: int = 0):
        self.console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self.steps = steps
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if enabled and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("train", total=steps, completed=done, text="")

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def line(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)

    def step(self, metrics: dict[str, Any]) -> None:
        """Show the last step of `metrics`."""
        done = metrics["steps"]
        text = (
            f"loss {metrics['losses'][-1]:.4f}  {metrics['tokens_per_second'][-1]:,.0f} tokens/s  "
            f"imbalance {metrics['imbalance'][-1]:.3f}  received {max(metrics['recv_tokens'][-1]):,} tokens  "
            f"documents {metrics['documents'][-1]}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=done, text=text)
        else:
            self.line(f"step {done:>{len(str(self.steps))}}/{self.steps}  {text}")

    def summary(self, metrics: dict[str, Any], out: str | None) -> None:
        """Print the table that ends a run."""
        losses, imbalance, rates, received = (  # steps of a lost metrics.json are None
            [value for value in metrics[name] if value is not None]
            for name in ("losses", "imbalance", "tokens_per_second", "recv_tokens")
        )
        if not (losses and imbalance and rates and received):
            return
        rates.sort()
        table = Table(title="spanwise train", show_header=False)
        rows = [
            ("ranks", f"{metrics['ranks']} (dp {metrics['dp']} × cp {metrics['cp']})"),
            ("steps", f"{metrics['steps']}"),
            ("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"),
        ]
        rows += [(f"held-out loss, step {e['step']}", f"{e['loss']:.4f}") for e in metrics["eval_losses"][-2:]]
        rows += [
            ("tokens/s, median", f"{rates[len(rates) // 2]:,.0f}"),
            ("imbalance, mean (max / mean work)", f"{sum(imbalance) / len(imbalance):.3f}"),
            (
                "K/V tokens received a step, largest rank",
                f"{sum(map(max, received)) / len(received):,.0f} a layer",
            ),
        ]
        if "reference_losses" in metrics:
            rows += [
                ("one device, steps compared", f"{len(metrics['reference_losses'])}"),
                ("largest loss difference", f"{metrics['max_loss_error']:.2e}"),
                ("largest gradient difference", f"{metrics['max_grad_error']:.2e}"),
                ("the same as one device", _verdict(metrics)),
            ]
        if out is not None:
            rows.append(("written to", out))
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def _verdict(metrics: dict[str, Any]) -> str:
    limits = metrics["proof"]["tolerance"]
    return (
        f"{'proved' if metrics['proved'] else 'FAILED'}: loss within {limits['loss']:g} nats; of every tensor "
        f"max |g − g_ref| within {limits['gradient']:g} × max |g_ref|, which counts as at least {limits['floor']:g} "
        "of the model's largest"
    )

"""The commands of the command line: verify, fuzz, plan, calibrate, overlap and bench."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from spanwise.cli.bench import kernels, layout, memory, packed, plan
from spanwise.cli.calibrate import CalibrateOptions, calibrate
from spanwise.cli.command import command
from spanwise.cli.fuzz.command import FuzzOptions, fuzz
from spanwise.cli.overlap import OverlapOptions, overlap
from spanwise.cli.plan import PlanOptions
from spanwise.cli.plan import plan as plan_command
from spanwise.cli.verify import VerifyConfig, verify

app = typer.Typer(
    help="Context parallelism for PyTorch, planned from the attention mask.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("verify")(command(VerifyConfig, verify))
app.command("fuzz")(command(FuzzOptions, fuzz))
app.command("plan")(command(PlanOptions, plan_command))
app.command("calibrate")(command(CalibrateOptions, calibrate, torchrun=True))
app.command("overlap")(command(OverlapOptions, overlap))

_OUT = Annotated[
    Path | None, typer.Option(help="File for the JSON; of all benchmarks together, a folder.", show_default="none")
]
_QUICK = Annotated[bool, typer.Option("--quick", help="Smaller sizes and fewer repeats.")]

bench = typer.Typer(help="Measure, print a table, and write JSON.", rich_markup_mode=None)
app.add_typer(bench, name="bench")


#: Each benchmark and its help, in the order in which ``spanwise bench`` runs them.
BENCHMARKS = {
    kernels: "Attention on the CPU against torch's own: time forward and backward, and memory.",
    plan: "Planning times, and each balancer's work and traffic.",
    layout: "Balance and traffic of every balancer on documents, windows, prefixes and video.",
    memory: "K/V that each exchange holds and keeps, by sequence length: planned, and measured next to it.",
    packed: "Packed documents as they are against documents padded to twice the ranks: time, padding and traffic.",
}


def _benchmark(module: ModuleType) -> Callable[..., None]:
    def run(out: _OUT = None, quick: _QUICK = False) -> None:
        module.run(out, quick)

    return run


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


for _module, _text in BENCHMARKS.items():
    bench.command(_name(_module), help=_text)(_benchmark(_module))


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context, out: _OUT = None, quick: _QUICK = False) -> None:
    """Measure, print a table, and write JSON; without a name, everything there is."""
    if context.invoked_subcommand is None:
        for module in BENCHMARKS:
            module.run(out and out / f"{_name(module)}.json", quick)
    elif out is not None or quick:
        raise typer.BadParameter("--out and --quick go after the benchmark's name")

"""The commands plan, overlap, calibrate and verify. A command is imported when it is named, so that --help is quick."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

#: The options' class of each command, in the module of its name, and its line of the help.
COMMANDS = {
    "plan": ("PlanOptions", "Plan one sequence and predict its step. Runs anywhere."),
    "overlap": ("OverlapOptions", "Hide the communication of a training step; simulated."),
    "calibrate": ("CalibrateOptions", "Measure this machine and its links."),
    "verify": ("VerifyConfig", "Compare attention under a plan with one device, on local ranks."),
}


class Commands(TyperGroup):
    """The commands, each made from its module when it is named."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        from spanwise.cli.command import command

        module = importlib.import_module(f"spanwise.cli.{cmd_name}")
        options, run = getattr(module, COMMANDS[cmd_name][0]), getattr(module, cmd_name)
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        one.command(cmd_name)(command(options, run, torchrun=cmd_name == "calibrate"))
        return typer.main.get_command(one)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def spanwise() -> None:
    """Context parallelism for PyTorch, planned from the attention mask."""

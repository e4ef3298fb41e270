"""The command line: `rlsdk COMMAND ...`. Each command's module is imported when it is called, and not before."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

import rlsdk
from rlsdk.interfaces import ConfigError, PluginError, RlsdkError, UnsupportedCapabilityError

COMMANDS: Mapping[str, str] = {
    "train": "Reinforcement learning; without arguments, the quickstart.",
    "sft": "Supervised training on reference answers.",
    "eval": "Accuracy of a checkpoint or model folder.",
    "generate": "Responses of a checkpoint or model folder.",
    "report": "One HTML page about a run.",
    "plugins": "What is installed, and why something cannot be used.",
}
"""Command to its line in `rlsdk --help`. Module `rlsdk.cli.COMMAND` has a function `run` with the arguments that typer
is to parse, or a typer `app` of subcommands."""
CONFIGURED = frozenset({"train", "sft"})
"""Commands whose flags are the fields of a run's configuration: their `run(args)` gets the arguments as typed."""
HELP_FLAGS = frozenset({"--help", "-h"})
TRACEBACK_FLAG = "--traceback"
TRACEBACK_VARIABLE = "RLSDK_TRACEBACK"
EXIT_CONFIG = 2
EXIT_FAILURE = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves the process with its exit code.

    0: done. 2: a configuration or plugin that cannot be used, nothing was started. 1: anything else.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    wants_traceback = TRACEBACK_FLAG in arguments or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != TRACEBACK_FLAG]
    try:
        _app()(args=arguments or ["--help"], prog_name="rlsdk")
    except RlsdkError as error:
        if wants_traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        if error.__cause__ is not None and not wants_traceback:
            print(f"({TRACEBACK_VARIABLE}=1 shows where it came from)", file=sys.stderr)
        refused = isinstance(error, ConfigError | PluginError | UnsupportedCapabilityError)
        sys.exit(EXIT_CONFIG if refused else EXIT_FAILURE)


def _app() -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(help=rlsdk.__doc__)(_global_options)
    everything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, help_line in COMMANDS.items():
        app.command(name, help=help_line, context_settings=everything)(_forward(name))
    return app


def _forward(name: str) -> Callable[[typer.Context], None]:
    """A command that hands everything after its name to `rlsdk.cli.NAME`."""

    def command(context: typer.Context) -> None:
        if name in CONFIGURED and HELP_FLAGS.intersection(context.args):
            print(importlib.import_module("rlsdk.cli.fields").command_help(name, COMMANDS[name]))
            return
        module = importlib.import_module(f"rlsdk.cli.{name}")
        if name in CONFIGURED:
            module.run(context.args)
            return
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            app.command(name, help=COMMANDS[name])(module.run)
        app(args=context.args, prog_name=f"rlsdk {name}")

    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rlsdk {rlsdk.__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option(TRACEBACK_FLAG, help=f"With an error, its traceback; as {TRACEBACK_VARIABLE}=1.")
    ] = False,
) -> None:
    """Options before the command; `main` reads `--traceback` itself, wherever it stands."""

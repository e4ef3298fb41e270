"""The program and its groups of commands; the other modules of this package add the commands."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import rlsdk


def group(hint: str) -> typer.Typer:
    """Creates a group of commands. `hint` tells what an unknown command `{name}` probably meant."""

    class Hinted(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args and args[0] not in self.commands and not get_close_matches(args[0], self.commands):
                known = ", ".join(sorted(self.commands))
                ctx.fail(f"No such command {args[0]!r}; commands: {known}. {hint.format(name=args[0])}.")
            return super().resolve_command(ctx, args)

    return typer.Typer(rich_markup_mode=None, no_args_is_help=True, cls=Hinted)


class Answering(TyperGroup):
    """The program's commands; one that another trainer has is answered with ours."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            from rlsdk.config.loading.foreign_names import COMMANDS

            if args[0] in COMMANDS:
                ctx.fail(f"No such command {args[0]!r}. Here: {COMMANDS[args[0]]}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Answering,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=rlsdk.__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
)
plugins_app = group("`rlsdk plugins info {name}` shows what a plugin of that name can do")
app.add_typer(plugins_app, name="plugins", help="What is installed, and why something cannot be used.")

algorithms_app = group("`rlsdk algorithms show {name}` prints the parts of the recipe of that name")
app.add_typer(algorithms_app, name="algorithms", help="Recipes for `--algorithm NAME`, and their parts.")

config_app = group("`rlsdk train --help` explains every field")
app.add_typer(config_app, name="config", help="The configuration itself.")

environments_app = group("`rlsdk environments check FILE.py:{name}` checks a class")
app.add_typer(environments_app, name="environments", help="Environments: tasks with tools, that a model plays.")

reward_app = group("A run takes a reward by `--reward {name}`, and `rlsdk reward serve {name}` serves it over HTTP")
app.add_typer(reward_app, name="reward", help="Rewards as services.")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rlsdk {rlsdk.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Print tracebacks of errors; same as RLSDK_TRACEBACK=1.")
    ] = False,
) -> None:
    """Declares `--traceback` for the help only; `main` reads it at any position."""

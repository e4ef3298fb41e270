"""The program and its groups of commands; the modules beside this one add the commands."""

from __future__ import annotations

from typing import Annotated

import typer

import rlsdk

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=rlsdk.__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
)
plugins_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
app.add_typer(plugins_app, name="plugins", help="What is installed, and why something cannot be used.")

algorithms_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
app.add_typer(algorithms_app, name="algorithms", help="Recipes for `--algorithm NAME`, and their parts.")

config_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
app.add_typer(config_app, name="config", help="The configuration itself.")

reward_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
app.add_typer(reward_app, name="reward", help="Rewards as services.")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rlsdk {rlsdk.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="With an error, its traceback; as RLSDK_TRACEBACK=1.")
    ] = False,
) -> None:
    """`main` reads `--traceback` itself, wherever it stands."""

"""Commands about environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsdk.cli.commands.apps import environments_app


@environments_app.command("check", help="Check an environment on the CPU, without a model: all its requirements.")
def check_environment(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:CLASS", help="Class of the environment, pkg.mod:Class, or NAME:REST of a plugin."
        ),
    ],
    data: Annotated[str | None, typer.Option(help="Its rows, as `--data` of a run; default: one empty row.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to check with.")] = 16,
    option: Annotated[list[str] | None, typer.Option(help="Option of its class, NAME=VALUE; may be repeated.")] = None,
    only: Annotated[list[int] | None, typer.Option(help="Number of a requirement to check; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of the calls that are drawn.")] = 0,
) -> None:
    from rlsdk.cli.environment_tools.check import run

    run(target, data=data, num_rows=rows, options=option or [], only=only or [], seed=seed)


@environments_app.command("new", help="Write an environment to begin with, which holds every requirement.")
def new_environment(file: Annotated[Path, typer.Argument(help="New Python file, such as my_env.py.")]) -> None:
    from rlsdk.cli.environment_tools.new import new_environment as run

    run(file)

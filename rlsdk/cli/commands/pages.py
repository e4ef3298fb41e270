"""Commands that show runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsdk.cli.commands.apps import app


@app.command(help="One HTML page about a run.")
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]) -> None:
    from rlsdk.cli.pages.report import run

    run(run_dir)


@app.command(help="One HTML page about several runs.")
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of two runs or more.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("comparison.html"),
) -> None:
    from rlsdk.cli.pages.compare import run

    run(run_dirs, output)


@app.command(help="A line about a run, which its pages show.")
def note(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, which may be running.")],
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="One line; without it, the notes are listed.", show_default=False),
    ] = None,
) -> None:
    from rlsdk.cli.pages.note import run

    run(run_dir, text or [])


@app.command(help="The page of a run, live, for a browser on this machine.")
def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    opens: Annotated[bool, typer.Option("--open", help="Also open the page in this machine's browser.")] = False,
) -> None:
    from rlsdk.cli.pages.watch import run

    run(run_dir, port, opens=opens)

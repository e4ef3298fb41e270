"""Commands about plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsdk.cli.commands.apps import plugins_app


@plugins_app.command("list", help="List every backend and component that was found, usable or not.")
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    from rlsdk.cli.plugin_tools.listing import list_plugins as run

    run(as_json=as_json)


@plugins_app.command("info", help="Capabilities, options and tested engine versions.")
def plugin_info(
    name: Annotated[str, typer.Argument(help="Name of a backend, component, plugin or distribution.")],
) -> None:
    from rlsdk.cli.plugin_tools.listing import show_plugin

    show_plugin(name)


@plugins_app.command("check", help="Run the conformance suite of a backend.")
def check_plugin(
    name: Annotated[str, typer.Argument(help="Name of a backend.")],
    kind: Annotated[
        str | None, typer.Option(help="train or rollout, if backends of both kinds share the name.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="Backend option NAME=VALUE; may be repeated.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Suite setting NAME=VALUE, such as tp_size=2 or tolerance=2e-5; may be repeated."),
    ] = None,
    only: Annotated[str, typer.Option(help="Requirements to run, like pytest's -k.")] = "",
    basic: Annotated[
        bool, typer.Option("--basic", help="Run only the basic requirements, a third of the suite in a few seconds.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Also write the report to this JSON file; an interrupted check writes none."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show pytest's own output too.")] = False,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that share the suite; default: two for a whole suite on a CPU, else one."),
    ] = None,
) -> None:
    from rlsdk.cli.plugin_tools.check import run

    run(
        name,
        kind=kind,
        options=option or [],
        settings=setting or [],
        only=only,
        basic=basic,
        report=report,
        verbose=verbose,
        processes=processes,
    )


@plugins_app.command("new", help="Create a distribution from a template that passes its tests.")
def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of the backend or component: lower-case letters, digits, dashes.")],
    kind: Annotated[str, typer.Option(help="train, rollout, sharding, reward, algorithm or tracker.")],
    folder: Annotated[Path | None, typer.Option(help="New folder; default: rlsdk-NAME.")] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="With --kind train: an engine of several ranks.")] = False,
) -> None:
    from rlsdk.cli.plugin_tools.new import new_plugin as run

    run(name, kind, folder, ranks=ranks)


@plugins_app.command("install", help="Install a plugin, optionally into its own environment.")
def install_plugin(
    name: Annotated[str, typer.Argument(help="Backend's name, distribution (rlsdk-acme>=1.2), wheel or folder.")],
    isolated: Annotated[
        bool,
        typer.Option("--isolated", help="Into a new environment: for engines with conflicting version pins."),
    ] = False,
    editable: Annotated[
        bool, typer.Option("--editable", "-e", help="NAME is a folder: install in editable mode.")
    ] = False,
    more: Annotated[list[str] | None, typer.Option("--with", help="Additional requirement; may be repeated.")] = None,
    core: Annotated[
        str | None, typer.Option(help="Where to install rlsdk itself from; default: the source of this installation.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto: which of the plugin's recipes is used.")] = "auto",
    python: Annotated[Path | None, typer.Option(help="Interpreter to make the environment with.")] = None,
    environment: Annotated[
        Path | None, typer.Option(help="Existing environment that has the plugin: only tested and recorded.")
    ] = None,
    allow_direct: Annotated[bool, typer.Option("--allow-direct", help="Also accept URLs.")] = False,
) -> None:
    from rlsdk.virtualenvs.install import Choices, install

    chosen = Choices(
        editable=editable,
        more=more or [],
        core=core,
        device=device,
        python=python,
        environment=environment,
        allow_direct=allow_direct,
    )
    install(name, chosen, isolated=isolated)


@plugins_app.command("remove", help="Remove a plugin, with its own environment if it has one.")
def remove_plugin(name: Annotated[str, typer.Argument(help="As given to install.")]) -> None:
    from rlsdk.virtualenvs.install import remove

    remove(name)

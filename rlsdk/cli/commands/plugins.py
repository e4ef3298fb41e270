"""Commands about plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsdk.cli.commands.apps import plugins_app


@plugins_app.command("list", help="Every backend and component that was found, usable or not.")
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document in place of the table.")] = False,
) -> None:
    from rlsdk.cli.plugins import list_plugins as run

    run(as_json=as_json)


@plugins_app.command("info", help="Capabilities, options and tested engine versions.")
def plugin_info(
    name: Annotated[str, typer.Argument(help="Of a backend, component, plugin or distribution.")],
) -> None:
    from rlsdk.cli.plugins import show_plugin

    show_plugin(name)


@plugins_app.command("check", help="The conformance suite of a backend: what it claims, measured.")
def check_plugin(
    name: Annotated[str, typer.Argument(help="Of a backend.")],
    kind: Annotated[
        str | None, typer.Option(help="train or rollout, where backends of both kinds share the name.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="Of the backend's own: NAME=VALUE; may be repeated.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of the suite: NAME=VALUE, as tp_size=2, tolerance=2e-5; may be repeated."),
    ] = None,
    only: Annotated[str, typer.Option(help="Requirements to run, as pytest's -k.")] = "",
    report: Annotated[
        Path | None,
        typer.Option(help="Also write the report into this JSON file; a check that is cut short writes none."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show pytest's own output too.")] = False,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="That run the suite together; unset: two for a whole suite on a CPU, else one."),
    ] = None,
) -> None:
    from rlsdk.cli.check import run

    run(
        name,
        kind=kind,
        options=option or [],
        settings=setting or [],
        only=only,
        report=report,
        verbose=verbose,
        processes=processes,
    )


@plugins_app.command("new", help="A new distribution from a template that passes its tests.")
def new_plugin(
    name: Annotated[str, typer.Argument(help="Of the backend or component: lower-case letters, digits, dashes.")],
    kind: Annotated[str, typer.Option(help="train, rollout, sharding, reward, algorithm or tracker.")],
    folder: Annotated[Path | None, typer.Option(help="New folder; unset: rlsdk-NAME.")] = None,
) -> None:
    from rlsdk.cli.new import new_plugin as run

    run(name, kind, folder)


@plugins_app.command("install", help="Installs a plugin, also into an environment of its own.")
def install_plugin(
    name: Annotated[str, typer.Argument(help="Backend's name, distribution (rlsdk-acme>=1.2), wheel or folder.")],
    isolated: Annotated[
        bool, typer.Option("--isolated", help="For engines whose pins clash with what is installed here.")
    ] = False,
    editable: Annotated[bool, typer.Option("--editable", "-e", help="NAME is a folder, used where it is.")] = False,
    more: Annotated[list[str] | None, typer.Option("--with", help="Further requirement; may be repeated.")] = None,
    core: Annotated[
        str | None, typer.Option(help="Where rlsdk itself comes from; unset: from where this one came.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto: which of the plugin's recipes is used.")] = "auto",
    python: Annotated[Path | None, typer.Option(help="Interpreter to make the environment with.")] = None,
    environment: Annotated[
        Path | None, typer.Option(help="One that is there, with the plugin in it: only tested and recorded.")
    ] = None,
    allow_direct: Annotated[bool, typer.Option("--allow-direct", help="Also take URLs.")] = False,
) -> None:
    from rlsdk.cli.install import Choices, install

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


@plugins_app.command("remove", help="Removes a plugin, with its environment if it has one of its own.")
def remove_plugin(name: Annotated[str, typer.Argument(help="As given to install.")]) -> None:
    from rlsdk.cli.install import remove

    remove(name)

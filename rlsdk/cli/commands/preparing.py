"""Commands before a run: check the machine, plan the run, write and explain the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsdk.cli.commands.apps import algorithms_app, app, config_app
from rlsdk.cli.commands.arguments import FIELDS, TrustRun, with_trust
from rlsdk.cli.fields_command import FieldsCommand


@app.command(help="Write a commented YAML file; asks for missing values.")
def init(
    file: Annotated[Path, typer.Argument(help="New file.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="Folder, or name on the hub.")] = None,
    data: Annotated[str | None, typer.Option(help="File, folder, org/name on the hub, SOURCE:REST.")] = None,
    reward: Annotated[str | None, typer.Option(help="Name, or file.py:fn.")] = None,
    algorithm: Annotated[str, typer.Option(help="Name from `rlsdk algorithms list`.")] = "grpo",
    devices: Annotated[int | None, typer.Option(min=1, help="GPUs on each node.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    cpu: Annotated[bool, typer.Option("--cpu", help="For a machine without a GPU.")] = False,
    train_backend: Annotated[str | None, typer.Option(help="Default: the first installed one.")] = None,
    rollout_backend: Annotated[str | None, typer.Option(help="Default: the first installed one.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    from rlsdk.cli.preparation.init import run

    given = {
        "model": model, "data": data, "reward": reward, "algorithm": algorithm, "nodes": nodes,
        "devices": 1 if cpu and devices is None else devices, "gpu": False if cpu else None,
        "train_backend": train_backend, "rollout_backend": rollout_backend,
    }  # fmt: skip
    run(file, given, force=force)


@app.command(help="Turn a script of TRL, verl or OpenRLHF into a run file.")
def migrate(
    script: Annotated[Path, typer.Argument(metavar="FILE", help="train.py, run.sh or config.yaml.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="Run file to write.")] = Path("run.yaml"),
    plans: Annotated[bool, typer.Option("--plan", help="Also plan the run, with the file as it was written.")] = False,
    devices: Annotated[int | None, typer.Option(min=1, help="Number of devices, if the script does not say.")] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="NAME[:NODESxDEVICES]", help="For --plan; default: h100 for several devices.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    from rlsdk.cli.preparation.migrate import run

    run(script, to, plans=plans, devices=devices, hardware=hardware, force=force)


@app.command(
    cls=FieldsCommand,
    context_settings=FIELDS,
    help="Show placement and memory of a run; uses no device.",
)
def plan(
    context: typer.Context,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME[:NODESxDEVICES]", help="h100, 80GiB, cpu, ...; without it, this machine."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of a run whose measured times are used.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Instead of the plan, simulate the best split of devices for each staleness: a synchronous run's "
            "folder, or decode_ms=8,decode_us_per_sample=40,train_tokens_per_s=4000,sync_s=3,median=2000,p99=30000.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    trust_run: TrustRun = False,
) -> None:
    arguments = with_trust(context.args, trust_run)
    if schedule is not None:
        from rlsdk.cli.preparation.plan_schedule import run as simulate

        simulate(arguments, schedule, as_json=as_json)
        return
    from rlsdk.cli.preparation.plan import run

    run(arguments, hardware=hardware, calibration=calibration, as_json=as_json)


@app.command(help="What is wrong with this machine, and how to fix it.")
def doctor(
    run_dir: Annotated[Path, typer.Option(help="Folder for runs: checks its disk space.")] = Path("runs"),
    ray_address: Annotated[str | None, typer.Option(help="Also check this running Ray cluster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    from rlsdk.cli.preparation.doctor import run

    run(run_dir, ray_address, as_json=as_json)


@app.command("make-model", help="A small random model, to try things out offline.")
def make_model(
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    architecture: Annotated[str, typer.Option(help="qwen2, qwen3, llama or mistral.")] = "qwen2",
    hidden: Annotated[int, typer.Option(help="Width; a multiple of 64.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 2,
    context: Annotated[int, typer.Option(min=16, help="Maximum number of prompt and response tokens.")] = 2048,
) -> None:
    from rlsdk.cli.preparation.small_model import make

    make(folder, architecture=architecture, hidden=hidden, layers=layers, context=context)


@config_app.command("schema", help="JSON schema of a run's YAML file, for editors.")
def config_schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: print.")] = None,
) -> None:
    from rlsdk.cli.preparation.schema import schema

    schema(output)


@algorithms_app.command("list", help="List all recipes, one line each.")
def list_algorithms() -> None:
    from rlsdk.cli.preparation.algorithms import list_recipes

    list_recipes()


@algorithms_app.command("show", help="Show what a recipe sets, and where each part is registered.")
def show_algorithm(name: Annotated[str, typer.Argument(help="Name from `rlsdk algorithms list`.")]) -> None:
    from rlsdk.cli.preparation.algorithms import show_recipe

    show_recipe(name)

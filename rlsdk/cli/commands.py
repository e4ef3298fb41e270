"""Wiring: the commands, their arguments and their one-line help. What a command does is imported when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import rlsdk
from rlsdk.cli.completion import FieldsCommand

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=rlsdk.__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
)
plugins_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
app.add_typer(plugins_app, name="plugins", help="What is installed, and why something cannot be used.")

algorithms_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
app.add_typer(algorithms_app, name="algorithms", help="Recipes for `--algorithm NAME`, and the parts they expand into.")

config_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
app.add_typer(config_app, name="config", help="The configuration itself.")

reward_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
app.add_typer(reward_app, name="reward", help="Rewards as services.")

FIELDS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that take the fields of a run's configuration as flags, and hand them on as typed."""
ONLY_FIELDS = {**FIELDS, "help_option_names": []}
HELP_FLAGS = frozenset({"--help", "-h"})

ModelPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="Run, checkpoint or model folder; fields follow: --rollout.top_p 0.9")
]

Checkpoint = Annotated[
    str | None, typer.Option(help="Of a run: best (by checkpoint.best), newest, or a step; unset: newest.")
]

TrustRun = Annotated[
    bool, typer.Option("--trust-run", help="Also run the code that the run's own config.yaml names: see SECURITY.md.")
]


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


@app.command(
    cls=FieldsCommand, context_settings=ONLY_FIELDS, help="Reinforcement learning; without arguments, the quickstart."
)
def train(context: typer.Context) -> None:
    if not _explained(context.args, "train", "Reinforcement learning; without arguments, the quickstart."):
        from rlsdk.cli.train import run

        run(context.args)


@app.command(cls=FieldsCommand, context_settings=ONLY_FIELDS, help="Supervised training on reference answers.")
def sft(context: typer.Context) -> None:
    if not _explained(context.args, "sft", "Supervised training on reference answers."):
        from rlsdk.cli.sft import run

        run(context.args)


@app.command(
    "reward-model", cls=FieldsCommand, context_settings=ONLY_FIELDS, help="A model of scores, from pairs of answers."
)
def reward_model(context: typer.Context) -> None:
    if not _explained(context.args, "reward-model", "A model of scores, from pairs of answers (Bradley-Terry)."):
        from rlsdk.cli.pairs import run
        from rlsdk.config import PairTraining

        run(PairTraining.REWARD_MODEL, context.args)


@app.command(
    cls=FieldsCommand,
    context_settings=ONLY_FIELDS,
    help="Direct preference optimization: a policy, from pairs of answers.",
)
def dpo(context: typer.Context) -> None:
    if not _explained(context.args, "dpo", "Direct preference optimization: a policy, from pairs of answers."):
        from rlsdk.cli.pairs import run
        from rlsdk.config import PairTraining

        run(PairTraining.DPO, context.args)


@app.command("eval", cls=FieldsCommand, context_settings=FIELDS, help="Figures of a checkpoint or model folder.")
def evaluate(
    context: typer.Context,
    path: ModelPath,
    evaluation_set: Annotated[
        list[str] | None, typer.Option("--set", help="Of eval.sets, or sampled or greedy; may be repeated.")
    ] = None,
    checkpoint: Checkpoint = None,
    output: Annotated[Path | None, typer.Option(help="Also write the figures into this JSON file.")] = None,
    samples: Annotated[Path | None, typer.Option(help="Also write every sample into this folder.")] = None,
    trust_run: TrustRun = False,
) -> None:
    from rlsdk.cli.inference import evaluate as run

    arguments = _with_trust(context.args, trust_run)
    run(path, arguments, sets=evaluation_set or [], checkpoint=checkpoint, output=output, samples=samples)


@app.command(cls=FieldsCommand, context_settings=FIELDS, help="Responses of a checkpoint or model folder.")
def generate(
    context: typer.Context,
    path: ModelPath,
    prompt: Annotated[list[str] | None, typer.Option(help="Text of a prompt; may be repeated.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Without --prompt: so many prompts of the data.")] = 5,
    n: Annotated[int, typer.Option("-n", "--samples-per-prompt", min=1, help="Responses to each prompt.")] = 1,
    checkpoint: Checkpoint = None,
    trust_run: TrustRun = False,
) -> None:
    from rlsdk.cli.inference import generate as run

    run(path, prompt or [], num_prompts, n, checkpoint, _with_trust(context.args, trust_run))


@reward_app.command("serve", context_settings=FIELDS, help="Serve a reward over HTTP, for `--reward URL` of a run.")
def serve_reward(
    context: typer.Context,
    reward: Annotated[str, typer.Argument(help="Name, file.py:fn, or label in --config; fields of `rewards` follow.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8700,
    token_env: Annotated[str | None, typer.Option(help="Environment variable with the token of clients.")] = None,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Of one request.")] = 64 << 20,
    max_samples: Annotated[int, typer.Option(min=1, help="In one request.")] = 1024,
    max_requests: Annotated[int, typer.Option(min=1, help="Under way at once.")] = 16,
) -> None:
    from rlsdk.cli.reward import serve
    from rlsdk.rewards.serving import ServeOptions

    options = ServeOptions(
        host=host, port=port, max_request_bytes=max_request_bytes, max_samples=max_samples, max_requests=max_requests
    )
    serve(reward, context.args, options, token_env)


@app.command(help="One HTML page about a run.")
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]) -> None:
    from rlsdk.cli.report import run

    run(run_dir)


@config_app.command("schema", help="JSON schema of a run's YAML file, for editors.")
def config_schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; unset: printed.")] = None,
) -> None:
    from rlsdk.cli.config import schema

    schema(output)


@app.command(help="Write a commented YAML file for a model, data and a machine; asks for what no flag gives.")
def init(
    file: Annotated[Path, typer.Argument(help="New file.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="Folder, or name on the hub.")] = None,
    data: Annotated[str | None, typer.Option(help="File, folder, org/name on the hub, reasoning_gym:TASK.")] = None,
    reward: Annotated[str | None, typer.Option(help="Name, or file.py:fn.")] = None,
    algorithm: Annotated[str, typer.Option(help="Of `rlsdk algorithms list`.")] = "grpo",
    devices: Annotated[int | None, typer.Option(min=1, help="GPUs on each node.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    cpu: Annotated[bool, typer.Option("--cpu", help="For a machine without a GPU.")] = False,
    train_backend: Annotated[str | None, typer.Option(help="Unset: the first one that is installed.")] = None,
    rollout_backend: Annotated[str | None, typer.Option(help="Unset: the first one that is installed.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file where it is there.")] = False,
) -> None:
    from rlsdk.cli.init import run

    given = {
        "model": model, "data": data, "reward": reward, "algorithm": algorithm, "nodes": nodes,
        "devices": 1 if cpu and devices is None else devices, "gpu": False if cpu else None,
        "train_backend": train_backend, "rollout_backend": rollout_backend,
    }  # fmt: skip
    run(file, given, force=force)


@app.command(help="One HTML page about several runs: curves, figures, settings that differ.")
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of two runs or more.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File that is written.")] = Path("comparison.html"),
) -> None:
    from rlsdk.cli.compare import run

    run(run_dirs, output)


@app.command(help="The page of a run while it goes on, for a browser on this machine.")
def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    opens: Annotated[bool, typer.Option("--open", help="Also open the page in this machine's browser.")] = False,
) -> None:
    from rlsdk.cli.watch import run

    run(run_dir, port, opens=opens)


@app.command(help="A run's model to the Hugging Face hub, with its card.")
def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run, checkpoint or model folder.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="org/name on the hub; made where it is not there.")],
    checkpoint: Checkpoint = None,
    licence: Annotated[str | None, typer.Option("--license", help="Of the model: apache-2.0, mit, ...")] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Who can see a new repository.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be sent.")] = False,
) -> None:
    from rlsdk.cli.push import run

    run(path, repo, checkpoint=checkpoint, licence=licence, private=private, dry_run=dry_run)


@app.command(help="Train again on what a run's journal recorded, and hold the updates against the run's.")
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with schedule.journal all.")],
    trust_run: TrustRun = False,
) -> None:
    from rlsdk.cli.replay import run

    run(run_dir, _with_trust([], trust_run))


@app.command(context_settings=FIELDS, help="Kill processes of a run, and count what that costs; fields as for train.")
def chaos(
    context: typer.Context,
    kill: Annotated[
        list[str] | None,
        typer.Option(help="ROLE@MOMENT, as rollout@update; may be repeated. Unset: every one, in a drawn order."),
    ] = None,
    faults: Annotated[int, typer.Option(min=0, help="How many in all; 0: each once.")] = 0,
    seed: Annotated[int, typer.Option(help="Draws the order, the step and the process.")] = 0,
    folder: Annotated[Path, typer.Option(help="New folder for the runs and chaos.json.")] = Path("chaos"),
) -> None:
    from rlsdk.cli.chaos import run

    run(context.args, kill or [], faults, seed, folder)


@app.command("make-model", help="A small random model with a byte tokenizer, to try things out offline.")
def make_model(
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    architecture: Annotated[str, typer.Option(help="qwen2, qwen3, llama or mistral.")] = "qwen2",
    hidden: Annotated[int, typer.Option(help="Width; a multiple of 64.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 2,
    context: Annotated[int, typer.Option(min=16, help="Most tokens of prompt and response.")] = 2048,
) -> None:
    from rlsdk.cli.model import make

    make(folder, architecture=architecture, hidden=hidden, layers=layers, context=context)


@app.command(
    cls=FieldsCommand,
    context_settings=FIELDS,
    help="What `rlsdk train` with the same arguments would be; takes no device.",
)
def plan(
    context: typer.Context,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME[:NODESxDEVICES]", help="h100, 80GiB, cpu, ...; without it, this machine."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of a run whose phases' seconds the times come from.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="In place of the plan, the best split of devices for each staleness, simulated: a synchronous run's "
            "folder, or decode_ms=8,decode_us_per_sample=40,train_tokens_per_s=4000,sync_s=3,median=2000,p99=30000.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document in place of tables.")] = False,
    trust_run: TrustRun = False,
) -> None:
    arguments = _with_trust(context.args, trust_run)
    if schedule is not None:
        from rlsdk.cli.plan_schedule import run as simulate

        simulate(arguments, schedule, as_json=as_json)
        return
    from rlsdk.cli.plan import run

    run(arguments, hardware=hardware, calibration=calibration, as_json=as_json)


@app.command(help="What is wrong with this machine and its environment, and the command that mends it.")
def doctor(
    run_dir: Annotated[Path, typer.Option(help="Folder that runs are written to: is there room?")] = Path("runs"),
    ray_address: Annotated[str | None, typer.Option(help="Also look at this running Ray cluster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document in place of text.")] = False,
) -> None:
    from rlsdk.cli.doctor import run

    run(run_dir, ray_address, as_json=as_json)


@plugins_app.command("list", help="Every backend, component and plugin that was found, usable or not.")
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
) -> None:
    from rlsdk.cli.check import run

    run(name, kind=kind, options=option or [], settings=setting or [], only=only, report=report, verbose=verbose)


@plugins_app.command("new", help="A complete distribution to begin with, that passes its tests as it is.")
def new_plugin(
    name: Annotated[str, typer.Argument(help="Of the backend or component: lower-case letters, digits, dashes.")],
    kind: Annotated[str, typer.Option(help="train, rollout, sharding, reward, algorithm or tracker.")],
    folder: Annotated[Path | None, typer.Option(help="New folder; unset: rlsdk-NAME.")] = None,
) -> None:
    from rlsdk.cli.new import new_plugin as run

    run(name, kind, folder)


@plugins_app.command("install", help="Installs a plugin, with --isolated into an environment of its own.")
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


@algorithms_app.command("list", help="Names of all recipes, each with one line.")
def list_algorithms() -> None:
    from rlsdk.cli.algorithms import list_recipes

    list_recipes()


@algorithms_app.command("show", help="What a recipe sets, and where each part is registered.")
def show_algorithm(name: Annotated[str, typer.Argument(help="Of `rlsdk algorithms list`.")]) -> None:
    from rlsdk.cli.algorithms import show_recipe

    show_recipe(name)


def _with_trust(arguments: Sequence[str], trust_run: bool) -> list[str]:
    """The fields as typed, with the flag that typer has taken out."""
    return [*arguments, "--trust-run"] if trust_run else list(arguments)


def _explained(arguments: Sequence[str], command: str, summary: str) -> bool:
    """Prints the help of a command that takes fields, if it is asked for."""
    if not HELP_FLAGS.intersection(arguments):
        return False
    from rlsdk.cli.fields import command_help

    print(command_help(command, summary))
    return True

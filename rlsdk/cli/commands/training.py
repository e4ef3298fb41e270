"""Commands that train: `train`, `sft`, `distill`, `reward-model`, `dpo`, `kto`, `process-reward`; and `replay`,
`inspect`, `chaos`, which verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsdk.cli.commands.apps import app
from rlsdk.cli.commands.arguments import FIELDS, ONLY_FIELDS, TrustRun, with_trust
from rlsdk.cli.fields_command import FieldsCommand


@app.command(
    cls=FieldsCommand, context_settings=ONLY_FIELDS, help="Reinforcement learning; without arguments, the quickstart."
)
def train(context: typer.Context) -> None:
    from rlsdk.cli.training.train import run

    run(context.args)


@app.command(cls=FieldsCommand, context_settings=ONLY_FIELDS, help="Supervised training on reference answers.")
def sft(context: typer.Context) -> None:
    from rlsdk.cli.training.sft import run

    run(context.args)


@app.command(
    cls=FieldsCommand,
    context_settings=ONLY_FIELDS,
    help="Learn a teacher's probabilities of given answers.",
)
def distill(context: typer.Context) -> None:
    from rlsdk.cli.training.sft import run
    from rlsdk.config.checks.training import Training

    run(context.args, Training.DISTILL)


@app.command(
    "reward-model", cls=FieldsCommand, context_settings=ONLY_FIELDS, help="Train a reward model from pairs of answers."
)
def reward_model(context: typer.Context) -> None:
    from rlsdk.cli.training.pairs import run
    from rlsdk.config import PairTraining

    run(PairTraining.REWARD_MODEL, context.args)


@app.command(
    cls=FieldsCommand,
    context_settings=ONLY_FIELDS,
    help="Direct preference optimization, from pairs of answers.",
)
def dpo(context: typer.Context) -> None:
    from rlsdk.cli.training.pairs import run
    from rlsdk.config import PairTraining

    run(PairTraining.DPO, context.args)


@app.command(
    cls=FieldsCommand,
    context_settings=ONLY_FIELDS,
    help="KTO, from answers that are labelled one by one.",
)
def kto(context: typer.Context) -> None:
    from rlsdk.cli.training.pairs import run
    from rlsdk.config import PairTraining

    run(PairTraining.KTO, context.args)


@app.command(
    "process-reward",
    cls=FieldsCommand,
    context_settings=ONLY_FIELDS,
    help="Train a process reward model from labelled steps.",
)
def process_reward(context: typer.Context) -> None:
    from rlsdk.cli.training.pairs import run
    from rlsdk.config import PairTraining

    run(PairTraining.PROCESS_REWARD, context.args)


@app.command(help="Repeat a run's updates from its journal, and compare them.")
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with schedule.journal all.")],
    episodes: Annotated[
        bool, typer.Option("--episodes", help="Play its episodes again instead, with the recorded turns; tools run.")
    ] = False,
    trust_run: TrustRun = False,
) -> None:
    from rlsdk.cli.training.replay import run, run_episodes

    (run_episodes if episodes else run)(run_dir, with_trust([], trust_run))


@app.command(help="Where every token of a run went, from its journal.")
def inspect(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    step: Annotated[int | None, typer.Option(min=1, help="The samples of this step.")] = None,
    episode: Annotated[
        str | None, typer.Option(metavar="GROUP/SAMPLE", help="One sample as it was sampled, such as 12/0.")
    ] = None,
) -> None:
    from rlsdk.cli.training.inspect import run

    run(run_dir, step, episode)


@app.command(cls=FieldsCommand, context_settings=FIELDS, help="Kill processes of a run, and count what is lost.")
def chaos(
    context: typer.Context,
    kill: Annotated[
        list[str] | None,
        typer.Option(help="ROLE@MOMENT, such as rollout@update; may be repeated. Default: all, in random order."),
    ] = None,
    faults: Annotated[int, typer.Option(min=0, help="Number of faults; 0: each once.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the order, the steps and the processes.")] = 0,
    folder: Annotated[
        Path,
        typer.Option(help="Folder of the runs: new, or of an earlier call with the same arguments."),
    ] = Path("chaos"),
    per_run: Annotated[
        int, typer.Option(min=0, help="Faults per run, one after the other; 0: one for every three steps.")
    ] = 0,
    minutes: Annotated[float, typer.Option(min=0.0, help="No new fault after this many minutes; 0: no limit.")] = 0.0,
) -> None:
    from rlsdk.cli.training.chaos import run

    run(context.args, kill or [], faults, seed, folder, per_run, minutes)

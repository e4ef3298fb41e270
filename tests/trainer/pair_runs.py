"""Training from pairs on real reference engines in this process, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlsdk.config import PairTraining, RunConfig, pair_roles
from rlsdk.config.checks.training import Training
from rlsdk.registry import Registry
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.placement import roles
from rlsdk.trainer.roles.session import Session, start_roles
from rlsdk.trainer.runs.build_supervised import pair_stage, read_pairs
from rlsdk.trainer.runs.run_inputs import RunInputs, build_run_inputs
from rlsdk.trainer.stages.export import export_policy
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.stages.preferences import PairStage
from rlsdk.trainer.tracking.events import RunView

TIMED = ("time/", "throughput/")


class Recorder(RunView):
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.steps: list[Mapping[str, float]] = []
        self.evals: list[Mapping[str, float]] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append({name: value for name, value in metrics.items() if not name.startswith(TIMED)})

    def pairs_step(self, label: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(
            {name.partition("/")[2]: value for name, value in metrics.items() if not name.endswith("step_s")}
        )

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evals.append({name: value for name, value in metrics.items() if not name.startswith("time/")})


@dataclass(frozen=True)
class Ran:
    """A stage that was run, and what it said."""

    stage: PairStage
    session: Session
    view: Recorder
    trainer: Trainer


def ready(config: RunConfig, kind: PairTraining, registry: Registry) -> Session:
    turns = DeviceTurns()
    table = pair_roles(config, kind, roles(config, "cpu", needed=kind.role_names(config)))
    groups = start_roles(table, lambda role: start_in_process(role, registry), turns)
    return Session(roles=groups, turns=turns, cluster=InProcessStore())


def inputs_of(kind: PairTraining, config: RunConfig, registry: Registry, folder: Path, view: RunView) -> RunInputs:
    training = Training(kind.value)
    return build_run_inputs(
        config, registry, folder, view, rewarded=False, of_pairs=training.reads_pairs, of_steps=training.reads_steps
    )


def run(
    config: RunConfig,
    kind: PairTraining,
    registry: Registry,
    folder: Path,
    *,
    stop: Callable[[PairStage], bool] = lambda stage: False,
    export: Path | None = None,
) -> Ran:
    """To its end, from the newest checkpoint of the folder where there is one."""
    folder.mkdir(exist_ok=True)
    view, session = Recorder(), ready(config, kind, registry)
    with closing(inputs_of(kind, config, registry, folder, view)) as run_inputs:
        stage = pair_stage(kind, run_inputs, read_pairs(kind, run_inputs), session)
        trainer = Trainer(
            stage, session, tokenizer=run_inputs.tokenizer, config_text="", keep_checkpoints=2,
            stop=lambda: stop(stage),
        )  # fmt: skip
        with closing(stage):
            if (newest := trainer.store.newest()) is not None:
                trainer.restore(newest)
            trainer.fit()
        if export is not None:
            export_policy(session, run_inputs.tokenizer, export)
    return Ran(stage, session, view, trainer)

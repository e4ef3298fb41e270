"""Commands of rlsdk without a cluster: the same configuration, trainer and engines, all of them in this process.

    python -m benchmarks.recipes.in_process train --config run.yaml --model m1 --trainer.run_dir r --trainer.run_name a

Takes half the processor time of a run of half a minute, and comes to the same numbers. `train` has no warm start.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rlsdk.api.resolve import resolve
from rlsdk.api.settings import Settings
from rlsdk.config import dump_config
from rlsdk.config.checks.training import Training
from rlsdk.config.sections.role_kinds import ACTOR, ROLLOUT
from rlsdk.registry import Registry
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.roles.device_turns import DeviceTurns, shared_pools
from rlsdk.trainer.roles.session import Session, sharding_manager, start_roles
from rlsdk.trainer.runs.build_rl import rl_stage
from rlsdk.trainer.runs.build_supervised import pair_stage, read_pairs, sft_stage
from rlsdk.trainer.runs.prepare import PreparedRun
from rlsdk.trainer.runs.run_inputs import RunInputs, build_run_inputs
from rlsdk.trainer.runs.start import export_model
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.stages.stage import Stage
from rlsdk.trainer.tracking.events import RunView


def main(training: Training, arguments: Sequence[str]) -> None:
    """One command; metrics go into the run's folder, and what is no reinforcement learning leaves `model/` there."""
    resolved = resolve(Settings(flags=arguments), training, device="cpu")
    config, registry = resolved.config, resolved.registry
    run = Path(config.trainer.run_dir) / str(config.trainer.run_name)
    run.mkdir(parents=True)
    session = start(resolved)
    rewarded, supervised = training is Training.RL, training is Training.SFT
    made = build_run_inputs(config, registry, run, RunView(), rewarded=rewarded, supervised=supervised)
    with closing(made) as run_inputs:
        stage = stage_of(training, registry, run_inputs, session)
        with closing(stage):
            text = dump_config(config)
            Trainer(stage, session, tokenizer=run_inputs.tokenizer, config_text=text, keep_checkpoints=1).fit()
        if training is not Training.RL:
            export_model(session, run_inputs.tokenizer, run / "model")


def start(run: PreparedRun) -> Session:
    """The roles, and the way of the weights where samples are made."""
    config, registry = run.config, run.registry
    turns = DeviceTurns(shared=shared_pools(run.placement))
    make = functools.partial(start_in_process, registry=registry, seed=config.trainer.seed)
    groups, store = start_roles(run.table, make, turns), InProcessStore()
    if ROLLOUT not in groups:
        return Session(roles=groups, turns=turns, cluster=store)
    wait_s = config.deadlines.sync_s
    manager = sharding_manager(config.sharding, registry, groups[ACTOR], groups[ROLLOUT], timeout_s=wait_s)
    return Session(roles=groups, turns=turns, cluster=store, manager=manager)


def stage_of(training: Training, registry: Registry, run_inputs: RunInputs, session: Session) -> Stage:
    if training is Training.RL:
        return rl_stage(run_inputs.config, registry, run_inputs, session)
    if training.pairs is None:
        return sft_stage(run_inputs.config, run_inputs, session)
    return pair_stage(training.pairs, run_inputs, read_pairs(training.pairs, run_inputs), session)


def run(arguments: Sequence[str]) -> None:
    """A command as it is typed, its name first."""
    main(Training(arguments[0]), arguments[1:])


if __name__ == "__main__":
    run(sys.argv[1:])

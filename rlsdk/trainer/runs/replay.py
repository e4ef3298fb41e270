"""A whole replay, from the configuration of a run to its last step (`rlsdk replay`)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.config import RunConfig
from rlsdk.config.sections.role_kinds import ROLLOUT
from rlsdk.interfaces import ConfigError
from rlsdk.rollouts import Group
from rlsdk.rollouts.journal.journal import FOLDER
from rlsdk.trainer.checkpoints.run_folder import run_lock
from rlsdk.trainer.generation.recorded_groups import RecordedGroups, ReplayedStep, recorded_groups, replay
from rlsdk.trainer.learner.learner import PolicyLearner
from rlsdk.trainer.learner.metrics import StepClock
from rlsdk.trainer.learner.state import TrainerState
from rlsdk.trainer.roles.session import Session, start_roles
from rlsdk.trainer.runs.build_rl import algorithm_of, draw_of, learner_options, prompts_of, text_of, vocabulary_of
from rlsdk.trainer.runs.prepare import PreparedRun
from rlsdk.trainer.runs.run_inputs import RunInputs
from rlsdk.trainer.runs.start import SessionStart, opened
from rlsdk.trainer.stages.rl import learn_from, update_figures
from rlsdk.trainer.tracking.stopping import StopFlag

if TYPE_CHECKING:
    from rlsdk.registry import Registry
    from rlsdk.trainer.tracking.events import RunView


@contextmanager
def run_replay(run: PreparedRun, view: RunView, *, run_dir: Path) -> Iterator[tuple[int, Iterator[ReplayedStep]]]:
    """Returns the number of steps, and an iterator that repeats them. Starts no rollout engine and writes nothing.

    Raises:
        ConfigError: the run began with supervised training, which the journal does not contain.
        CheckpointError: the journal does not cover a whole run.
    """
    config = run.config
    if config.sft.is_asked:
        raise ConfigError(
            "sft: the run began with supervised training, which its journal does not hold; only a run that begins with "
            "reinforcement learning can be replayed"
        )
    config = config.model_copy(update={"tracking": config.tracking.model_copy(update={"trackers": ()})})
    run = run.without([ROLLOUT]).with_config(config)
    with run_lock(run_dir):
        start = SessionStart.of(run, view, run_dir=run_dir, stop=StopFlag())
        # The supervised loss term (ptx) trains on answers, which are read only if samples are graded.
        with opened(start, rewarded=config.algorithm.ptx.coef > 0) as (run_inputs, cluster):
            turns = start.turns()
            make = functools.partial(start.start_role, cluster=cluster)
            session = Session(roles=start_roles(start.table, make, turns), turns=turns, cluster=cluster)
            groups, learn = replay_parts(run_inputs.config, run.registry, run_inputs, session)
            yield len(groups.steps), replay(groups, learn)


def replay_parts(
    config: RunConfig, registry: Registry, run_inputs: RunInputs, session: Session
) -> tuple[RecordedGroups, Callable[[Sequence[Group]], Mapping[str, float]]]:
    """Returns the recorded groups of a run, and a function that trains on them; the session needs no rollout engine.

    Raises:
        CheckpointError: the journal does not cover a whole run.
    """
    algorithm = algorithm_of(config, registry, run_inputs)
    folder = run_inputs.output.run_dir / FOLDER
    prompts, draw, texts = prompts_of(config, run_inputs), draw_of(algorithm, run_inputs), text_of(run_inputs)
    found = recorded_groups(folder, prompts, draw, texts, vocabulary_of(session, run_inputs))
    state = TrainerState()
    options = replace(learner_options(config, run_inputs, session), parity_threshold=math.inf)
    learner = PolicyLearner(session, algorithm, options, state, run_inputs.output.view)
    steps = itertools.count()

    def learn(groups: Sequence[Group]) -> Mapping[str, float]:
        learned = learn_from(groups, learner, state, next(steps), config.rollout.temperature, StepClock())
        return update_figures(learned)

    return found, learn

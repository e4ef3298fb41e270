"""A machine that is taken away in the middle of a rollout: what samples have is kept, and they go on behind it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from test_loop import Recorder, config_of, model, registry, run, trainer_of
from test_staleness import APART, engines_of

from rlsdk.registry import Registry
from rlsdk.rollouts.journal.recorded import account
from rlsdk.rollouts.journal.segments import records
from rlsdk.trainer.stages.loop import Trainer
from rlsdk.trainer.stages.rl import RlStage
from rlsdk.trainer.tracking.stopping import StopFlag

__all__ = ["model", "registry"]


DEADLINE_S = 240.0
"""On a busy machine what older weights began is a matter of half a minute, of which a third may be taken."""


def preempted(trainer: Trainer, stage: RlStage, stop: StopFlag, step: int, decoded: int) -> None:
    """Trains, and is preempted when so many tokens were decoded behind a step."""

    def watch() -> None:
        engine = engines_of(stage)[0]
        while stage.step < step:
            time.sleep(0.001)
        before = engine.num_decoded()
        while engine.num_decoded() < before + decoded:
            time.sleep(0.001)
        stop.preempt()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    with stop.interrupting(stage.preempt, DEADLINE_S):
        trainer.fit()
    watching.join(60)
    assert not watching.is_alive()


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_samples_had_when_the_machine_was_taken_away_is_not_sampled_again(
    staleness: int, model: str, registry: Registry, tmp_path: Path
) -> None:
    extra = [*APART, "--schedule.max_staleness", str(staleness)] if staleness else []
    config = config_of(
        model, registry, 3, *extra, "--rollout.max_response_tokens", "40", "--rollout.max_running_samples", "1",
        "--schedule.journal", "all", "--trainer.save_every_steps", "100", "--faults.preempt_s", str(DEADLINE_S),
    )  # fmt: skip
    whole = run(config, registry, tmp_path / "whole")
    first, rest, stop, folder = Recorder(), Recorder(), StopFlag(), tmp_path / "preempted"
    with trainer_of(config, registry, folder, first, stop=stop) as (trainer, stage, _):
        trainer.preempted = lambda: stop.is_preempted
        decoder = engines_of(stage)[0].decoder
        step = decoder.step
        decoder.step = lambda version: (time.sleep(0.005), step(version))[1]
        preempted(trainer, stage, stop, step=1, decoded=60)
        saved = trainer.store.newest()
    assert saved is not None
    assert saved.name == f"step_{len(first.steps):08d}"
    kept = [line for line in records(folder / "journal") if line["event"] == "unfinished"]
    made = sum(line["event"] == "sample" for line in records(folder / "journal"))
    assert kept or staleness, "nothing was under way"
    with trainer_of(config, registry, folder, rest) as (trainer, stage, _):
        trainer.restore(saved)
        trainer.fit()
        decoded = engines_of(stage)[0].num_decoded()
    assert sorted(account(folder / "journal").values()) == sorted(f"trained in step {at // 4 + 1}" for at in range(12))
    assert sum(line["event"] == "sample" for line in records(folder / "journal")) == 48
    steps = [*first.steps, *rest.steps]
    assert len(steps) == len(whole.steps)
    for mine, theirs in zip(steps, whole.steps, strict=True):
        assert mine == {name: pytest.approx(value, abs=2e-5) for name, value in theirs.items()}
    assert decoded < 40 * (48 - made) or staleness, "what was kept was sampled again"

"""A real run whose machine is taken away, and which loses a daemon of Ray after that: the same command ends it, with
every prompt trained once and the numbers of the undisturbed run."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import descendants
from test_faults import TWO_REPLICAS, running
from test_schedule import TASK, in_one_process, measured

from rlsdk.rollouts.journal.recorded import account
from rlsdk.rollouts.journal.segments import records
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore, damage

STEPS = 6
EXTRA = ["--schedule.max_staleness", "1", "--trainer.steps", str(STEPS), "--rollout.max_response_tokens", "24"]
DEADLINE_S = 30.0


def test_sigterm_ends_a_run_with_75_and_a_raylet_that_dies_later_changes_no_number(model: str, tmp_path: Path) -> None:
    extra = [*EXTRA, "--faults.preempt_s", str(DEADLINE_S)]
    with running(model, "struck", tmp_path, *extra) as run:
        run.wait_for(lambda: run.has_sample_of(9), "a sample of step 3")
        began = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        code = run.process.wait(DEADLINE_S + 90)
        took_s = time.monotonic() - began
    assert code == 75, run.text()
    assert took_s < DEADLINE_S + 40, "the deadline, and what Ray needs to end"
    assert "stopping for SIGTERM: what runs is stopped, kept and saved" in run.text()
    newest = CheckpointStore(run.run / "checkpoints", keep=3).newest()
    assert newest is not None
    assert damage(newest) == []
    before = Counter(line["event"] for line in records(run.run / "journal"))
    assert before["sample"] < 16 * STEPS
    with running(model, "struck", tmp_path, *extra) as run:
        run.wait_for(lambda: run.has_sample_of(17), "a sample of step 5")
        raylet = next(one for one in descendants(run.process.pid) if one.name() == "raylet")
        raylet.kill()
        run.process.wait(240)
    said = run.text()
    assert run.process.returncode == 0, said
    assert said.count("resumed from") == 2
    assert "the session was lost and is started again from its newest whole checkpoint" in said
    prompts = [(at, f"trained in step {at // 4 + 1}") for at in range(4 * STEPS)]
    assert sorted(account(run.run / "journal").items()) == prompts
    assert sum(line["event"] == "sample" for line in records(run.run / "journal")) == 16 * STEPS, "made twice"
    view, found = in_one_process(model, [*TASK, *TWO_REPLICAS, *EXTRA], tmp_path / "whole"), run.metrics()
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, whole in enumerate(view.steps, 1):
        (mine,) = measured([{name: found[step][name] for name in whole}])
        (theirs,) = measured([dict(whole)])
        # The first part of a sample that was cut is computed in one go: the last digits of its log-probs differ.
        assert mine == {name: pytest.approx(value, rel=1e-3, abs=2e-5) for name, value in theirs.items()}

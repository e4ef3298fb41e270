"""What chaos sees of a run: its moments, its processes, and what a fault has cost. Real faults are in tests/e2e."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rlsdk.api.chaos import ChaosRun, Fault, Outcome, _account, differences
from rlsdk.cli.chaos import table_of
from rlsdk.interfaces import ConfigError


def chaos_run(folder: Path, name: str, events: list[dict[str, object]]) -> ChaosRun:
    run = ChaosRun([], folder, name, {"rollout": "rollout", "actor": "actor"})
    (run.run_dir / "journal").mkdir(parents=True)
    text = "".join(json.dumps(event) + "\n" for event in events)
    (run.run_dir / "journal" / "segment_000000_step_00000000.jsonl").write_text(text)
    run.output.write_text("")
    return run


START = {"event": "start", "step": 1, "groups": [0, 1]}
TRAIN = {"event": "train", "step": 1, "groups": [0, 1]}
UPDATE = {"event": "update", "step": 1, "groups": [0, 1], "rejected": [], "figures": {}}
PUBLISH = {"event": "publish", "step": 0}


@pytest.mark.parametrize(
    ("events", "moments"),
    [
        ([], set()),
        ([PUBLISH], set()),
        ([PUBLISH, START], {"rollout"}),
        ([PUBLISH, START, TRAIN], {"update"}),
        ([PUBLISH, START, TRAIN, UPDATE], {"sync"}),
        ([PUBLISH, START, TRAIN, UPDATE, {**PUBLISH, "step": 1}], set()),
    ],
)
def test_the_journal_says_which_moment_it_is(
    events: list[dict[str, object]], moments: set[str], tmp_path: Path
) -> None:
    run = chaos_run(tmp_path, "run", events)
    assert run.moments() == moments
    (run.run_dir / "checkpoints" / ".step_00000001.tmp").mkdir(parents=True)
    assert run.moments() == moments | {"save"}
    run.output.write_text("warning: replica 1 was lost and is started again (1 of 3 in a row)\n")
    assert "restart" in run.moments()
    run.output.write_text(run.text() + "replica 1 serves again after 3 s\n")
    assert "restart" not in run.moments()


def test_a_process_is_known_by_the_file_of_its_output(tmp_path: Path) -> None:
    run = chaos_run(tmp_path, "run", [])
    (run.run_dir / "logs").mkdir()
    with (run.run_dir / "logs" / "rollout-1.log").open("w") as log:
        sleep = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
        run.process = subprocess.Popen([sys.executable, "-c", sleep], stdout=log)
        try:
            assert run.wait(lambda: run.processes("rollout"), 10)
            assert run.processes("actor") == []
            assert [process.pid for process in run.processes("controller")] == [run.process.pid]
        finally:
            (left,) = run.end()  # what its parent did not take with it is told, and ended
        assert left.startswith("left behind: ")


def test_a_grader_is_at_work_between_what_it_reads_and_what_it_writes(tmp_path: Path) -> None:
    run = chaos_run(tmp_path, "run", [])
    # As a grader does: it says that it is ready, then answers each line; the second one never.
    grade = "import sys, time; print('ready', flush=True); sys.stdin.readline(); print('done', flush=True)"
    command = [sys.executable, "-u", "-c", f"'rlsdk.rewards'; {grade}; sys.stdin.readline(); time.sleep(60)"]
    parent = f"import subprocess; subprocess.run({command!r})"
    run.process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tasks, answers = run.process.stdin, run.process.stdout
    assert tasks is not None
    assert answers is not None
    try:
        for ends in (True, False):
            assert answers.readline()
            assert not run.is_in("reward")
            tasks.write(b"task\n")
            tasks.flush()
            if not ends:
                assert run.wait(lambda: run.is_in("reward"), 10)
    finally:
        run.end()
        tasks.close()
        answers.close()


def test_what_a_fault_cost_is_counted_from_the_journal(tmp_path: Path) -> None:
    second = {**UPDATE, "step": 2, "groups": [2, 3]}
    whole = chaos_run(tmp_path, "whole", [START, {**START, "groups": [2, 3]}, UPDATE, second])
    run = chaos_run(tmp_path, "run", [START, UPDATE, UPDATE, {**second, "groups": [1, 2]}])
    for one, loss in ((whole, 1.0), (run, 1.5)):
        lines = [{"step": 1, "policy/loss": loss, "time/step_s": loss}]
        (one.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = Outcome(fault="actor@update", step=1, struck=True)
    _account(run, whole, outcome)
    assert (outcome.prompts_lost, outcome.trained_twice, outcome.steps_again) == (1, 1, 1)
    assert outcome.difference == pytest.approx(1 / 3)
    assert list(differences(whole.run_dir, whole.run_dir)) == []
    (run.run_dir / "metrics.jsonl").write_text("")
    assert math.inf in list(differences(run.run_dir, whole.run_dir))
    table = table_of([outcome, Outcome(fault="gcs@save", step=1)])
    assert [list(column.cells) for column in table.columns][:5] == [
        ["actor", "gcs"], ["update", "save"], ["1", "-"], ["1", "-"], ["1", "-"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [("rolout@save", r"did you mean 'rollout'"), ("actor@lunch", r"moment of \['rollout', 'reward'")],
)
def test_a_fault_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Fault.parse(text, ["actor", "rollout"])
    assert str(Fault.parse("actor@save", ["actor"])) == "actor@save"

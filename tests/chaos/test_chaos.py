"""What chaos sees of a run: its moments, its processes, and what a fault has cost. Real faults are in tests/e2e."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlsdk.chaos import run as chaos_runs
from rlsdk.chaos.account import Outcome, account, changed_metrics, differences, promises_equal_numbers
from rlsdk.chaos.campaign import earlier, least_struck, save, undisturbed
from rlsdk.chaos.faults import Fault, strike
from rlsdk.chaos.run import ChaosRun, JournalTail
from rlsdk.cli.training.chaos import check_files, table_of
from rlsdk.config import RunConfig, dump_config
from rlsdk.config.derived.auto_values import with_dtype
from rlsdk.interfaces import ConfigError
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.segments import segments
from rlsdk.trainer.checkpoints.run_folder import run_lock


@pytest.fixture(autouse=True)
def nothing_leaves_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What outlives its command here does so on purpose."""
    monkeypatch.setattr(chaos_runs, "LEAVE_S", 1.0)


def chaos_run(folder: Path, name: str, events: list[dict[str, Any]]) -> ChaosRun:
    run = ChaosRun([], folder, name, {"rollout": "rollout", "actor": "actor"})
    journal = Journal(run.run_dir / "journal", made_by={}, keep="all")
    journal.open(0)
    for event in events:
        journal.write(**event)
    journal.close()
    (run.run_dir / "config.yaml").write_text(CONFIG)
    run.output.write_text("")
    return run


CONFIG = dump_config(with_dtype(RunConfig(), "cpu"))
"""As a run writes it: a field that a test makes up is not there."""
START: dict[str, Any] = {"event": "start", "step": 1, "groups": [0, 1]}
TRAIN: dict[str, Any] = {"event": "train", "step": 1, "groups": [0, 1]}
UPDATE: dict[str, Any] = {"event": "update", "step": 1, "groups": [0, 1], "rejected": [], "figures": {}}
PUBLISH: dict[str, Any] = {"event": "publish", "step": 0}


def test_a_configuration_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    check_files(["--trust-run", "--config", str(tmp_path / "file"), "--steps", "3"])
    with pytest.raises(ConfigError, match="is a pipe, which can be read only once"):
        check_files(["--config", str(tmp_path / "file"), "--config", str(tmp_path / "pipe")])


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
def test_the_journal_says_which_moment_it_is(events: list[dict[str, Any]], moments: set[str], tmp_path: Path) -> None:
    run = chaos_run(tmp_path, "run", events)
    assert run.moments() == moments
    (run.run_dir / "checkpoints" / ".step_00000001.tmp").mkdir(parents=True)
    assert run.moments() == moments | {"save"}
    run.output.write_text("warning: replica 1 was lost and is started again (1 of 3 in a row)\n")
    assert "restart" in run.moments()
    run.output.write_text(run.text() + "replica 1 serves again after 3 s\n")
    assert "restart" not in run.moments()


def test_an_episode_is_played_from_its_first_turn_to_its_end(tmp_path: Path) -> None:
    def of(event: str, sample: int) -> dict[str, Any]:
        return {"event": event, "group": 0, "name": "", "sample": sample, "key": ""}

    begins = {"event": "open", "begins": True}
    run = chaos_run(tmp_path, "run", [])
    journal = Journal(run.run_dir / "journal", made_by={}, keep="all")
    journal.open(0)
    for event, is_playing in (
        (of("turn", 0), True), (of("turn", 1), True), (of("sample", 0), True), (of("sample", 1), False),
        (of("turn", 2), True), (begins, False), (of("turn", 2), True), (of("sample", 2), False),
    ):  # fmt: skip
        journal.write(**event)
        assert run.is_in("turn") is is_playing, event


def test_the_process_of_a_command_is_known_by_its_task(tmp_path: Path) -> None:
    run = chaos_run(tmp_path, "run", [])
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    start = (
        "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True, "
        "env={**os.environ, 'RLSDK_TASK': 'task.json'})"
    )
    run.process = subprocess.Popen([sys.executable, "-c", start, child])
    run.commands = 1
    try:
        assert run.wait(lambda: run.processes("agent") and len(run.family) == 2, 50)
        assert [process.ppid() for process in run.processes("agent")] == [run.process.pid]
    finally:
        run.end()


def test_a_process_is_known_by_the_file_of_its_output(tmp_path: Path) -> None:
    run = chaos_run(tmp_path, "run", [])
    (run.run_dir / "logs").mkdir()
    with (run.run_dir / "logs" / "rollout-1.log").open("w") as log:
        sleep = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
        run.process = subprocess.Popen([sys.executable, "-c", sleep], stdout=log)
        run.commands = 1
        try:
            assert run.wait(lambda: run.processes("rollout"), 50)
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
    run.commands = 1
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
                assert run.wait(lambda: run.is_in("reward"), 50)
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
    account(run, whole, [outcome, Outcome(fault="gcs@save")])
    assert (outcome.prompts_lost, outcome.trained_twice, outcome.steps_again) == (1, 1, 1)
    assert outcome.difference == pytest.approx(1 / 3)
    assert outcome.cost == "1 prompts lost; 1 trained twice; step 1: other metrics: policy/loss"
    assert differences(whole.run_dir, whole.run_dir) == {}
    (run.run_dir / "metrics.jsonl").write_text("")
    assert differences(run.run_dir, whole.run_dir) == {1: math.inf}
    assert changed_metrics(run.run_dir, whole.run_dir) == {1: ["policy/loss"]}
    (run.run_dir / "metrics.jsonl").write_text('{"step": 1, "policy/loss": 1.000001}\n')
    assert changed_metrics(run.run_dir, whole.run_dir) == {}
    for promised, other in (("drain", "recompute"), ("single_turn", "tools"), ("float32", "bfloat16")):
        assert promised in CONFIG
        (run.run_dir / "config.yaml").write_text(CONFIG.replace(promised, other))
        assert not promises_equal_numbers(run.run_dir)
    table = table_of([outcome, Outcome(fault="gcs@save", step=1)])
    assert [list(column.cells) for column in table.columns][:5] == [
        ["actor", "gcs"], ["update", "save"], ["1", "-"], ["1", "-"], ["1", "-"],
    ]  # fmt: skip


def test_each_step_counts_to_the_fault_before_it(tmp_path: Path) -> None:
    updates = [{**UPDATE, "step": step, "groups": [step]} for step in range(1, 9)]
    whole = chaos_run(tmp_path, "whole", updates)
    again = [*updates[:3], *updates[2:5], *updates[3:5], {**updates[5], "groups": [2]}, *updates[7:]]
    run = chaos_run(tmp_path, "run", again)
    (whole.run_dir / "metrics.jsonl").write_text("")
    first, second = (
        Outcome(fault="actor@update", struck=True, step=3, updates=3),
        Outcome(fault="gcs@save", struck=True, step=5, updates=6),
    )
    account(run, whole, [first, Outcome(fault="raylet@save"), second])
    assert (first.steps_again, second.steps_again) == (1, 2)
    assert (first.prompts_lost, second.prompts_lost) == (0, 2)  # those of steps 6 and 7
    assert (first.trained_twice, second.trained_twice) == (0, 1)
    assert not first.cost
    assert second.cost == "2 prompts lost; 1 trained twice"


def test_a_journal_is_read_from_where_it_was_left(tmp_path: Path) -> None:
    def events() -> list[tuple[object, object]]:
        return [(line["event"], line["step"]) for line in tail.update()]

    folder, tail = tmp_path / "journal", JournalTail(tmp_path / "journal")
    assert events() == []
    journal = Journal(folder, made_by={}, keep="all")
    journal.open(0)
    journal.write(**START)
    journal.write("sample", group=0, name="", sample=0, arrays=[np.arange(9, dtype="<i4")])
    first = segments(folder)[0].path
    journal.write(**TRAIN)
    whole = first.read_bytes()
    first.write_bytes(whole[:-20])
    assert events() == [("open", 0), ("start", 1)]
    first.write_bytes(whole)
    journal.open(1)
    journal.write(**UPDATE)
    journal.close()
    assert events() == [("open", 0), ("start", 1), ("train", 1), ("open", 1), ("update", 1)]
    for file in folder.iterdir():
        file.unlink()
    again = Journal(folder, made_by={}, keep="all")  # a run that began anew
    again.open(0)
    again.close()
    assert events() == [("open", 0)]


TRAINER = """
import json, pathlib, sys, time
from rlsdk.rollouts.journal.journal import Journal
from rlsdk.rollouts.journal.segments import records
folder, loses = pathlib.Path(sys.argv[1]), sys.argv[2:]
(folder / "journal").mkdir(parents=True, exist_ok=True)
done = max((line["step"] for line in records(folder / "journal") if line["event"] == "update"), default=0)
journal = Journal(folder / "journal", made_by={}, keep="all")
journal.open(done)
with (folder / "metrics.jsonl").open("a") as metrics:
    def write(event, step, groups=()):
        journal.write(event, step=step, groups=list(groups), rejected=[])
    for step in range(done + 1, 21):
        groups = () if done and loses else (2 * step, 2 * step + 1)
        write("start", step, groups)
        write("train", step, groups)
        time.sleep(0.05)
        print(json.dumps({"step": step, "policy/loss": 1 / step}), file=metrics, flush=True)
        write("update", step, groups)
        write("publish", step)
print("resumed from" if done else "")
"""
"""What a run leaves behind, without what makes it; one that loses prompts does so when it was given again."""


@pytest.mark.parametrize("loses", [False, True])
def test_one_run_is_struck_again_as_soon_as_it_got_on(loses: bool, tmp_path: Path) -> None:
    def trainer(name: str, *more: str) -> ChaosRun:
        run = ChaosRun([], tmp_path, name, {})
        run._command = [sys.executable, "-c", TRAINER, str(run.run_dir), *more]
        return run

    whole = trainer("whole")
    whole.start()
    assert whole.process.wait(60) == 0
    waiting = deque(Fault(role="controller", moment=moment) for moment in ("update", "update", "update", "save"))
    run, told = trainer("run", *["loses"] * loses), list[str]()
    cost_so_far = list[int]()

    def report(so_far: Sequence[Outcome]) -> None:
        told.append(so_far[-1].fault)
        cost_so_far.append(sum(outcome.prompts_lost for outcome in so_far))

    found = strike(run, waiting, whole, random.Random(3), report=report)
    assert told == [outcome.fault for outcome in found]
    assert bool(cost_so_far[1]) == loses  # known before the run is over; what is still to come is not lost
    assert not waiting
    assert [outcome.struck for outcome in found] == [True, True, True, False]  # nothing is saved
    assert [outcome.commands for outcome in found] == [2, 2, 2, 1]
    assert all(outcome.recover_s is not None for outcome in found[:3])
    assert all(outcome.difference == 0 for outcome in found[:3])
    lost = sum(outcome.prompts_lost for outcome in found)
    assert bool(lost) == loses == any(outcome.cost for outcome in found)


def test_a_table_grows_by_what_was_struck_least(tmp_path: Path) -> None:
    folder, arguments = tmp_path / "chaos", ["--trainer.steps", "6"]
    assert earlier(arguments, folder) == []
    struck = [Outcome(fault=str(fault)) for fault in least_struck(["actor"], [], random.Random(1))[:7]]
    save(arguments, folder, struck)
    assert earlier(arguments, folder) == struck
    following = least_struck(["actor"], struck, random.Random(2))
    assert {str(fault) for fault in following[-7:]} == {outcome.fault for outcome in struck}
    with pytest.raises(ConfigError, match="other arguments"):
        earlier(["--trainer.steps", "7"], folder)
    (folder / "chaos.json").unlink()
    (folder / "faults_1.txt").touch()
    with pytest.raises(ConfigError, match="not empty"):
        earlier(arguments, folder)


CUT = """
import subprocess, sys, time
from pathlib import Path
from rlsdk.chaos import campaign
from rlsdk.chaos import run as chaos_run
from rlsdk.cli.training.chaos import end_on_signals

chaos_run.LEAVE_S = 2.0

class Run(campaign.ChaosRun):
    def __init__(self, *args):
        super().__init__(*args)
        self._command = [sys.executable, "-c", sys.argv[2], str(self.run_dir)]

class Slow(subprocess.Popen):  # as on a busy machine, where the run is on its way before this process goes on
    def _execute_child(self, *args, **kwargs):
        super()._execute_child(*args, **kwargs)
        while not (folder / "whole" / "pids").exists():
            time.sleep(0.01)
        time.sleep(0.3)

chaos_run.subprocess.Popen = Slow
campaign.ChaosRun = Run
folder = Path(sys.argv[1])
assert campaign.earlier([], folder) == []
end_on_signals()
campaign.undisturbed([], folder, {}, lambda text: print(text, flush=True))
"""
LONG = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
draft = folder / "draft"
draft.write_text(f"{os.getpid()} {left.pid}")
draft.rename(folder / "pids")
time.sleep(300)
"""
"""A run that leaves a process behind, which does not end with it."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cut_in_the_undisturbed_run_ends_it_and_it_is_made_anew(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "chaos"
    pids = folder / "whole" / "pids"
    for _ in range(2):  # the second call finds what the first one left
        before = pids.read_text() if pids.exists() else ""
        family = list[psutil.Process]()
        parts = [sys.executable, "-c", CUT, str(folder), LONG]
        command = subprocess.Popen(parts, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert command.stdout is not None
            with command.stdout as said:
                assert said.readline().startswith("first a run without faults")
            while not pids.exists() or pids.read_text() == before:
                assert command.poll() is None
                time.sleep(0.01)
            run, left = family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
            command.send_signal(number)
            run.wait(30)
            # As a terminal's Ctrl-C, which is followed by what `benchmarks.campaign.cells` does, or a second one.
            for again in (signal.SIGTERM, signal.SIGINT):
                command.send_signal(again)
                time.sleep(0.1)
            assert command.wait(30)
            # Its new parent may not have asked for its end yet.
            assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
        finally:
            command.kill()
            command.wait()
            for process in family:
                with suppress(psutil.Error):
                    process.kill()


def test_a_run_that_still_goes_on_is_not_removed(tmp_path: Path) -> None:
    assert earlier([], tmp_path) == []
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole.txt").touch()
    assert earlier([], tmp_path) == []
    with run_lock(tmp_path / "whole"), pytest.raises(ConfigError, match="another process is writing"):
        undisturbed([], tmp_path, {})
    (tmp_path / "whole.txt").unlink()
    with pytest.raises(ConfigError, match="not empty"):
        earlier([], tmp_path)


def test_a_folder_that_lost_its_undisturbed_run_says_what_to_do(tmp_path: Path) -> None:
    folder, arguments = tmp_path / "chaos", ["--trainer.steps", "6"]
    assert earlier(arguments, folder) == []
    save(arguments, folder, [Outcome(fault="actor@save")])
    with pytest.raises(ConfigError, match=r"whole' has no update of a step.* rlsdk chaos --folder .*_2"):
        undisturbed(arguments, folder, {"actor": "train"})


@pytest.mark.parametrize(
    ("text", "said"),
    [("rolout@save", r"did you mean 'rollout'"), ("actor@lunch", r"moment of \['rollout', 'reward'")],
)
def test_a_fault_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Fault.parse(text, ["actor", "rollout"])
    assert str(Fault.parse("actor@save", ["actor"])) == "actor@save"

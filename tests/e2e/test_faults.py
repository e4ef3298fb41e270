"""Processes of a real run that are killed: it goes on by itself, and its numbers are those of the undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from conftest import assert_gone, command, descendants, environment, rlsdk, wait_for
from test_schedule import TASK, in_one_process, measured

from rlsdk.rollouts.journal.recorded import account
from rlsdk.rollouts.journal.segments import records

TWO_REPLICAS = [
    "--placement.preset", "disaggregated", "--placement.devices_per_node", "3", "--placement.devices", "{rollout: 2}",
    "--rollout.max_running_samples", "1", "--schedule.journal", "all", "--trainer.save_every_steps", "1",
    "--eval.every_steps", "null",
]  # fmt: skip
"""One sample is decoded at a time: which ones share a decoding step depends on when replicas come and go."""


class Running:
    """A command that runs, and the processes of it that do the work."""

    def __init__(self, arguments: Sequence[str], name: str, cwd: Path) -> None:
        self.run = cwd / "runs" / name
        self.output = cwd / f"{name}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command(*arguments, "--trainer.run_name", name), cwd=cwd, env=environment(), stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def worker(self, name: str) -> psutil.Process | None:
        """The process that hosts the roles of a device, `POOL-DEVICE`, while it lives."""
        return next((one for one in descendants(self.process.pid) if self.name_of(one) == name), None)

    def name_of(self, process: psutil.Process) -> str | None:
        """`POOL-DEVICE` of a worker of this run that lives; None: it is none."""
        with suppress(OSError, psutil.Error):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.parent == self.run / "logs" and process.status() != psutil.STATUS_ZOMBIE:
                return log.stem
        return None

    def kill(self, name: str, number: int = signal.SIGKILL) -> psutil.Process:
        process = self.worker(name)
        assert process is not None, f"no {name}: {self.text()}"
        process.send_signal(number)
        return process

    def has_sample_of(self, group: int) -> bool:
        """A sample of this group was made."""
        return any(line["event"] == "sample" and line["group"] == group for line in records(self.run / "journal"))

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        wait_for(lambda: self.process.poll() is not None or condition(), what)
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def metrics(self) -> dict[int, dict[str, float]]:
        found = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line for line in found if "policy/loss" in line}


@contextmanager
def running(model: str, name: str, cwd: Path, *extra: str) -> Iterator[Running]:
    with watched(Running(["train", "--model", model, *TASK, *TWO_REPLICAS, *extra], name, cwd)) as run:
        yield run


@contextmanager
def watched(run: Running) -> Iterator[Running]:
    """Ends with it whatever it started, and sees that nothing of it is left."""
    try:
        yield run
    finally:
        others = descendants(run.process.pid)
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait()
        assert_gone(others)


def test_replicas_and_a_training_rank_that_are_killed_change_no_number(model: str, tmp_path: Path) -> None:
    """One replica in the second step, whose samples the other takes over; the other in the third, when at most one is
    left that may not be back; the training rank in the fourth, with which the session is lost."""
    with running(model, "killed", tmp_path) as run:
        run.wait_for(lambda: run.has_sample_of(5), "a sample of step 2")
        run.kill("rollout-1")
        run.wait_for(lambda: run.has_sample_of(9), "a sample of step 3")
        run.kill("rollout-0")
        run.wait_for(lambda: run.has_sample_of(13), "a sample of step 4")
        run.kill("actor-0")
        run.process.wait(240)
    said = run.text()
    assert run.process.returncode == 0, said
    assert "replica 1 was lost and is started again (1 of 3 in a row)" in said
    assert "replica 0 was lost and is started again (1 of 3 in a row)" in said
    assert "serves again after" in said
    assert re.search(r"session was lost and is started again from its newest .* \(\d of 3 in a row\): actor", said)
    assert "resumed from" in said
    assert_undisturbed(run, model, 4, [])


def test_a_replica_that_hangs_and_one_that_is_late_change_no_number(model: str, tmp_path: Path) -> None:
    """SIGSTOP: the process lives, answers nothing, and ignores SIGTERM. One replica is woken after a while and keeps
    its samples; later the other one never is: past the deadline it is killed, and its samples are made again."""
    extra = ["--trainer.steps", "3", "--deadlines.rollout_s", "15"]
    with running(model, "hung", tmp_path, *extra) as run:
        run.wait_for(lambda: run.has_sample_of(1), "a sample of step 1")
        late = run.kill("rollout-0", signal.SIGSTOP)
        time.sleep(4.0)
        late.send_signal(signal.SIGCONT)
        run.wait_for(lambda: run.has_sample_of(5), "a sample of step 2")
        hung = run.kill("rollout-1", signal.SIGSTOP)
        run.process.wait(240)
        assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
    said = run.text()
    assert run.process.returncode == 0, said
    assert late.pid != hung.pid
    assert "replica 0 was lost" not in said
    assert "replica 1 was lost and is started again (1 of 3 in a row)" in said
    assert_undisturbed(run, model, 3, extra)


def test_one_step_off_a_killed_controller_replica_and_training_rank_change_no_number(
    model: str, tmp_path: Path
) -> None:
    """The controller with groups of the third step half made, the same command again; then a replica while the step
    before trains, and the training rank while groups of two steps are under way. The journal replays it."""
    extra = ["--schedule.max_staleness", "1", "--trainer.steps", "6"]
    with running(model, "killed", tmp_path, *extra) as run:
        checkpoint = run.run / "checkpoints" / "step_00000001"
        run.wait_for(lambda: run.has_sample_of(9) and checkpoint.is_dir(), "a group of step 3")
        run.process.kill()
    assert sum(line["event"] == "sample" for line in records(run.run / "journal")) < 96
    with running(model, "killed", tmp_path, *extra) as run:
        run.wait_for(lambda: run.has_sample_of(13), "a sample of step 4")
        run.kill("rollout-1")
        run.wait_for(lambda: run.has_sample_of(17), "a sample of step 5")
        run.kill("actor-0")
        run.process.wait(240)
    said = run.text()
    assert run.process.returncode == 0, said
    assert said.count("resumed from") == 2
    assert "replica 1 was lost and is started again (1 of 3 in a row)" in said
    assert re.search(r"session was lost and is started again from its newest .* \(1 of 3 in a row\): actor", said)
    assert_undisturbed(run, model, 6, extra)
    assert "the same updates" in rlsdk("replay", str(run.run), "--trust-run", cwd=tmp_path)


def assert_undisturbed(run: Running, model: str, steps: int, extra: Sequence[str]) -> None:
    """Every prompt was trained once, no sample was made twice, and all numbers are those of a run without faults."""
    prompts = [(at, f"trained in step {at // 4 + 1}") for at in range(4 * steps)]
    assert sorted(account(run.run / "journal").items()) == prompts
    assert sum(line["event"] == "sample" for line in records(run.run / "journal")) == 16 * steps
    view = in_one_process(model, [*TASK, *TWO_REPLICAS, *extra], run.run.parent / "whole")
    found = run.metrics()
    assert sorted(found) == list(range(1, steps + 1))
    for step, whole in enumerate(view.steps, 1):
        mine = {name: found[step][name] for name in whole}
        assert measured([mine]) == measured([dict(whole)])

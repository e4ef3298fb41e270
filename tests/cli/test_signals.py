"""How a run is asked to stop, and what its exit code says."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlsdk.api.signals import stop_on_signal

RUN = """
import signal, sys, time
from pathlib import Path
from rlsdk.views.console import ConsoleView
from rlsdk.api.signals import stop_on_signal

asked = []
with ConsoleView() as view, stop_on_signal(lambda: asked.append(1), view.notice) as stopped:
    view.notice("ready")
    start = time.monotonic()
    while time.monotonic() - start < 20 and not asked:
        view.notice("a step is done")
        time.sleep(0.02)
    for _ in range(20):
        view.notice("the last step goes on")
        time.sleep(0.02)
    view.saved(1, Path("checkpoint"))
    Path(sys.argv[1]).write_text("saved")
sys.exit(stopped.exit_code)
"""


def heard() -> None:
    """Signals that whoever runs the tests ignores, as `nohup` and background jobs do, are heard again."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_each_way_to_stop_saves_first_and_says_which_it_was(number: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "saved")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        said = process.stdout.read()
    assert process.returncode == code
    assert "stopping: the step is finished and saved first" in said
    assert (tmp_path / "saved").exists()


PREEMPTED = """
import sys, time
from pathlib import Path
from rlsdk.api.signals import stop_on_signal
from rlsdk.trainer.tracking.stopping import StopFlag

stop = StopFlag()
with stop_on_signal(stop.set, lambda text: print(text, flush=True), preempt=stop.preempt) as stopped:
    with stop.interrupting(lambda: print("rollout is given up", flush=True), float(sys.argv[2])):
        print("ready", flush=True)
        time.sleep(float(sys.argv[3]))  # an update that runs
        Path(sys.argv[1]).write_text("saved")
sys.exit(stopped.exit_code)
"""


@pytest.mark.parametrize(("update_s", "is_saved"), [(4.0, True), (120.0, False)])
def test_a_machine_that_is_taken_away_gets_its_step_saved_within_the_deadline_or_is_left(
    update_s: float, is_saved: bool, tmp_path: Path
) -> None:
    """An update that ends within the deadline is saved; one that does not is left, with the same exit code."""
    deadline_s = 60.0 if is_saved else 1.0
    command = [sys.executable, "-c", PREEMPTED, str(tmp_path / "saved"), str(deadline_s), str(update_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
        assert process.wait(30) == 75
    assert "rollout is given up" in said
    assert "stopping for SIGTERM" in said
    assert (tmp_path / "saved").exists() == is_saved


def test_before_a_step_has_begun_the_first_one_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    """A real start, interrupted behind its first line: Ray and the workers are coming up then."""
    command = [sys.executable, "-m", "rlsdk.cli", "train", "--placement.device", "cpu"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heard
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("run ") for line in lines)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        said = "".join(lines)
    assert process.returncode == 130
    assert said.count("\n") <= 2, said
    assert "stopping: nothing was trained yet" in said
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_interrupted_while_it_is_read_says_nothing(tmp_path: Path) -> None:
    script = """
import importlib.abc, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "rlsdk.cli.commands":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from rlsdk.cli import main
main(["train"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN.replace("range(20)", "range(2000)"), str(tmp_path / "saved")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        assert process.stdout is not None
        while "stopping" not in process.stdout.readline():
            if process.poll() is None and not (tmp_path / "asked").exists():
                (tmp_path / "asked").touch()
                process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert not (tmp_path / "saved").exists()


def test_a_terminal_that_closes_ends_it_after_saving(tmp_path: Path) -> None:
    """Whatever it prints then goes nowhere."""
    pid, terminal = pty.fork()
    if pid == 0:
        heard()
        os.execv(sys.executable, [sys.executable, "-c", RUN, str(tmp_path / "saved")])
    said = b""
    while b"a step is done" not in said:
        said += os.read(terminal, 1024)
    os.close(terminal)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 75
    assert (tmp_path / "saved").exists()


def test_nohup_is_respected(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-c", RUN, str(tmp_path / "saved")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        assert not (tmp_path / "saved").exists()
        process.kill()


def test_a_signal_within_the_import_system_waits_until_its_lock_is_free() -> None:
    """Ctrl-C once struck in `_get_module_lock.cb`: its `SystemExit` was swallowed while that held the lock of all
    imports, and the run waited for good."""
    finished: list[bool] = []
    scope = {"signal": signal, "finished": finished}
    code = "def callback():\n    signal.raise_signal(signal.SIGINT)\n    finished.append(True)\n"
    exec(compile(code, "<frozen importlib._bootstrap>", "exec"), scope)
    with pytest.raises(SystemExit) as left:
        interrupted_in(scope["callback"])
    assert left.value.code == 130
    assert finished == [True]


def interrupted_in(callback: Any) -> None:
    with stop_on_signal(lambda: None, lambda text: None, has_begun=lambda: False):
        callback()
        time.sleep(5)

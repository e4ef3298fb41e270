"""No process and no folder outlives the program that started it, however that program ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

DRIVER = """
import os, signal, sys, time
import psutil
from rlsdk.cluster import Cluster, preset_placement
from rlsdk.cluster.ray_cluster import local

def changed(*_):
    raise TypeError("Ray's inside has changed")

if sys.argv[1] == "raise, on another Ray":
    local._start_lean_node = changed
with Cluster.start(preset_placement("colocate_all", ["actor"], devices_per_node=1), timeout_s=60) as cluster:
    group = cluster.create_group("actor", "cluster_hosts:FragileHost")
    started = psutil.Process(group.run("spawn")[0])
    print("ready", cluster._local.folder, started.ppid(), started.pid, flush=True)
    if sys.argv[1] == "raise, its worker dead":
        sys.stdin.readline()
        worker = started.parent()
        worker.kill()
        worker.wait(10)
    if sys.argv[1].startswith("raise"):
        raise RuntimeError("the run failed")
    if sys.argv[1] == "lose a daemon":
        psutil.Process(int(sys.stdin.readline())).kill()
    group.run("hang_on", 0, 120.0)
"""


class Driver:
    """A program that runs a local cluster with a busy worker, seen from outside."""

    def __init__(self, ending: str) -> None:
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, ending],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        _, folder, worker, started = self.process.stdout.readline().split()
        self.folder = Path(folder)
        self.worker, self.started = psutil.Process(int(worker)), psutil.Process(int(started))
        """The one worker, and what its engine started."""
        self.family: list[psutil.Process] = []
        if self.process.poll() is None:
            self.family = psutil.Process(self.process.pid).children(recursive=True)

    def lasting(self) -> list[psutil.Process]:
        """Processes that live as long as the cluster. Others come and go: Ray's idle workers and looks at the hardware,
        and what any of them has just forked, under its parent's name and command."""
        daemons = [self.own(word) for word in ("/gcs_server", "/raylet", "ray_cluster/watchdog.py")]
        return [*daemons, self.worker, self.started]

    def own(self, word: str) -> psutil.Process:
        """The one child of the program whose command has this word: its daemons and watchdog. What a daemon has just
        forked has its parent's name and command for a moment."""
        found = []
        for process in self.family:
            with suppress(psutil.NoSuchProcess):
                if process.ppid() == self.process.pid and any(word in part for part in process.cmdline()[:4]):
                    found.append(process)
        [process] = found
        return process

    def stop(self) -> None:
        """Stops the program, all of its threads: while one still runs, a signal that follows would end it."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(_state(task) not in ("T", "X") for task in tasks.iterdir()):
            time.sleep(0.01)

    def end(self) -> None:
        """Leaves nothing behind, also where a test has failed: the program may be stopped, its watchdog dead."""
        self.process.kill()
        self.process.communicate()
        _, alive = psutil.wait_procs(self.family, timeout=30)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()

    def survivors(self) -> list[str]:
        """Descendants that do not go away."""
        _, alive = psutil.wait_procs(self.family, timeout=60)
        found = []
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                found += [" ".join(process.cmdline())] if process.status() != psutil.STATUS_ZOMBIE else []
        return found


def _state(task: Path) -> str:
    """State of a thread (proc(5)): T is stopped, X gone."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


Start = Callable[[str], Driver]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts programs that end with the test, however that ends."""
    started: list[Driver] = []

    def start(ending: str) -> Driver:
        started.append(Driver(ending))
        return started[-1]

    yield start
    for driver in started:
        driver.end()


@pytest.mark.parametrize("ending", ["raise", "raise, on another Ray", "raise, its worker dead"])
def test_a_program_that_fails_leaves_nothing(ending: str, start: Start) -> None:
    driver = start(ending)
    _, errors = driver.process.communicate("go on\n", timeout=60)
    assert driver.process.returncode == 1
    assert "RuntimeError: the run failed" in errors
    assert driver.survivors() == []
    assert not driver.folder.exists()


def test_a_program_that_is_terminated_leaves_nothing(start: Start) -> None:
    driver = start("wait")
    driver.process.terminate()
    driver.process.communicate(timeout=60)
    assert driver.process.returncode != 0
    assert driver.survivors() == []
    assert not driver.folder.exists()


def test_keys_do_not_reach_the_workers_and_kill_9_of_the_program_leaves_nothing(start: Start) -> None:
    driver = start("wait")
    lasting = driver.lasting()
    assert driver.started.name() == "sleep", "what an engine started counts, too"
    of_the_program = [process for process in lasting if os.getpgid(process.pid) == driver.process.pid]
    assert of_the_program == [], "keys are for the program's process group"
    driver.stop()
    os.killpg(driver.process.pid, signal.SIGINT)
    os.killpg(driver.process.pid, signal.SIGHUP)
    time.sleep(0.5)
    assert [process for process in lasting if not process.is_running()] == []
    assert driver.process.poll() is None
    driver.process.kill()
    driver.process.communicate(timeout=60)
    assert driver.survivors() == []
    assert not driver.folder.exists()


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_run_whose_daemon_dies_says_so_and_ends_within_seconds(name: str, start: Start) -> None:
    driver = start("lose a daemon")
    daemon = driver.own(f"/{name}").pid
    began = time.monotonic()
    _, errors = driver.process.communicate(f"{daemon}\n", timeout=60)
    assert time.monotonic() - began < 45, "15 s, and what a busy machine takes"
    assert driver.process.returncode == 1
    assert re.search(rf"WorkerError: .*{name}, pid {daemon}, killed by signal 9", errors), errors[-800:]
    assert driver.survivors() == []
    assert not driver.folder.exists()


def test_program_and_watchdog_killed_at_once_leave_nothing(start: Start) -> None:
    driver = start("wait")
    driver.own("ray_cluster/watchdog.py").kill()
    driver.process.kill()
    driver.process.communicate(timeout=60)
    assert driver.survivors() == []
    assert not driver.folder.exists()

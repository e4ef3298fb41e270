"""One run of `rlsdk train` in a process, for fault injection: its moments, its processes, and its journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from rlsdk.rollouts.journal.segments import Place, Segment

PROCESSES = ("controller", "grader", "raylet", "gcs")
"""Processes that can be killed in addition to those of roles."""
AGENT = "agent"
"""The process of an agent's command, in runs with `rollout.command`."""
LOOK_S = 0.002
PROCESSES_S = 0.1
"""Seconds between two scans of processes, which take longer than reading new records of the journal."""
END_S = 600.0
"""Seconds for a run to end, or to reach a moment."""
LEAVE_S = 20.0
"""Seconds for the processes of a finished command to end."""
_BACK = ("serves again", "resumed from", "lost for good")


class JournalTail:
    """Reads new records of a journal, and keeps those of events: samples and turns are most of its bytes."""

    def __init__(self, folder: Path) -> None:
        """Reads nothing yet."""
        self._folder = folder
        self._read: dict[Path, Place] = {}
        self.records: list[Mapping[str, Any]] = []
        """All whole records of events so far, in the order of writing."""
        self.playing: set[tuple[int, str, int]] = set()
        """Episodes that have a turn and are not finished: group, name and index."""

    def update(self) -> list[Mapping[str, Any]]:
        """Reads new records; returns all."""
        from rlsdk.rollouts.journal.segments import segments

        found = segments(self._folder)
        with suppress(FileNotFoundError):
            sizes = {segment.path: segment.path.stat().st_size for segment in found}
            if any(sizes.get(path, 0) < place.offset for path, place in self._read.items()):  # a run was restarted
                self._read, self.records, self.playing = {}, [], set()
            for segment in found:
                place = self._read.get(segment.path)
                if place is None or sizes[segment.path] > place.offset:
                    self._take(segment, place)
        return self.records

    def _take(self, segment: Segment, since: Place | None) -> None:
        from rlsdk.rollouts.journal.segments import read_segment

        for record, place in read_segment(segment, since):
            self._read[segment.path] = place
            match record["event"]:
                case "turn":
                    self.playing.add((record["group"], record["name"], record["sample"]))
                case "sample":
                    self.playing.discard((record["group"], record["name"], record["sample"]))
                case "open" if record["begins"]:
                    self.playing.clear()  # of the process before it
                    self.records.append(record)
                case _:
                    self.records.append(record)


class ChaosRun:
    """One run of `rlsdk train`, in a process for fault injection."""

    def __init__(self, arguments: Sequence[str], folder: Path, name: str, pools: Mapping[str, str]) -> None:
        """`pools`: pool of each role, which is part of the names of its processes' log files."""
        self.run_dir = folder / name
        self.output = folder / f"{name}.txt"
        self._command = [
            sys.executable, "-P", "-m", "rlsdk.cli", "train", *arguments, "--trainer.run_dir", str(folder),
            "--trainer.run_name", name, "--schedule.journal", "all", "--trainer.resume", "auto",
        ]  # fmt: skip
        self._pools = pools
        self._tail = JournalTail(self.run_dir / "journal")
        self.family: set[psutil.Process] = set()
        self._looked_at = 0.0
        self._found: dict[str, tuple[float, list[psutil.Process]]] = {}
        """Role -> (time of the scan, processes found)."""
        self.commands = 0
        self._ended: list[tuple[float, set[psutil.Process]]] = []
        """For each command that ended: the time, and the processes that it had started."""
        self._characters: dict[int, tuple[int, int]] = {}
        """Process id of each grader -> characters read and written at the last check."""
        self._grading: set[int] = set()

    def start(self) -> None:
        """Starts the run, or resumes an existing one."""
        if self.commands:
            self._ended.append((time.monotonic(), self.family))
            self.family, self._found = set(), {}
        with self.output.open("a", encoding="utf-8") as output, _delayed_signals():
            self.process = subprocess.Popen(self._command, stdout=output, stderr=output, start_new_session=True)
            self.commands += 1

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def journal(self) -> list[Mapping[str, Any]]:
        """Lines of the journal, except those of samples and turns."""
        return self._tail.update()

    def updates(self) -> list[int]:
        """Steps in the order in which they were trained, repeated ones included."""
        return [int(record["step"]) for record in self.journal() if record["event"] == "update"]

    def moments(self) -> set[str]:
        """Moments that the run is in now, except `reward`."""
        found, journal = set(), self.journal()
        steps: dict[str, list[int]] = {"train": [], "update": [-1], "publish": [-1]}
        started, trained = set[int](), set[int]()
        for record in journal:
            event = record["event"]
            if event in steps:
                steps[event].append(int(record["step"]))
            if event == "start":
                started.update(record["groups"])
            elif event == "train":
                trained.update(record["groups"])
        found |= {"rollout"} if started - trained else set()
        found |= {"update"} if len(steps["train"]) > len(steps["update"]) - 1 else set()
        found |= {"turn"} if self._tail.playing else set()
        found |= {"sync"} if steps["update"][-1] > steps["publish"][-1] else set()
        found |= {"save"} if any((self.run_dir / "checkpoints").glob(".step_*.tmp")) else set()
        text = self.text()
        begun, back = text.rfind("is started again"), max(map(text.rfind, _BACK))
        return found | ({"restart"} if begun > back else set())

    def is_in(self, moment: str) -> bool:
        return self._is_grading() if moment == "reward" else moment in self.moments()

    def _is_grading(self) -> bool:
        """Whether a grader has read a task and written nothing since."""
        graders = self.processes("grader")
        for grader in graders:
            with suppress(psutil.Error):
                counts = grader.io_counters()
                now = (counts.read_chars, counts.write_chars)
                read, written = self._characters.setdefault(grader.pid, now)
                self._characters[grader.pid] = now
                if now[1] > written:
                    self._grading.discard(grader.pid)
                elif now[0] > read:
                    self._grading.add(grader.pid)
        return any(grader.pid in self._grading for grader in graders)

    def processes(self, role: str) -> list[psutil.Process]:
        """Processes of a role, or of another kind in `PROCESSES`."""
        if role == "controller":
            return [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        checked_at, found = self._found.get(role, (0.0, []))
        if time.monotonic() - checked_at > PROCESSES_S:
            self._look()
            found = [process for process in self.family if self._is_there(process, role)]
            self._found[role] = time.monotonic(), found
        return found

    def _is_there(self, process: psutil.Process, role: str) -> bool:
        with suppress(psutil.Error, OSError):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE and self._is(process, role)
        return False

    def _look(self) -> None:
        """Finds the processes that this command has started so far."""
        if time.monotonic() - self._looked_at > PROCESSES_S:
            with suppress(psutil.Error):
                self.family.update(psutil.Process(self.process.pid).children(recursive=True))
            self._looked_at = time.monotonic()

    def _is(self, process: psutil.Process, role: str) -> bool:
        if role == "grader":
            return any("rlsdk.rewards" in part for part in process.cmdline())
        if role == AGENT:
            return os.getpgid(process.pid) == process.pid and "RLSDK_TASK" in process.environ()
        if role in PROCESSES:
            return process.name() == {"gcs": "gcs_server"}.get(role, role)
        output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        return output.parent == self.run_dir / "logs" and output.stem.startswith(f"{self._pools[role]}-")

    def wait(self, condition: Callable[[], object], timeout_s: float = END_S) -> bool:
        """Waits until a condition is true; False if the run ended, or it took too long."""
        end = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
        return True

    def outlived(self) -> list[str]:
        """Processes that outlived their command by 20 s or more; ends them."""
        found, now = [], time.monotonic()
        for ended, processes in list(self._ended):
            if now - ended >= LEAVE_S:
                self._ended.remove((ended, processes))
                found += _end_all(processes)
        return found

    def end(self) -> list[str]:
        """Ends all remaining processes; returns those that outlived their command by 20 s."""
        if not self.commands:
            return []
        self._look()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        family = self.family.union(*(processes for _, processes in self._ended))
        psutil.wait_procs(list(family), timeout=LEAVE_S)
        return _end_all(family)


@contextmanager
def _delayed_signals() -> Iterator[None]:
    """Delays SIGINT and SIGTERM until the end of the block: an exception while a process starts would lose its id and
    leave it running."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    here = threading.current_thread() is threading.main_thread()  # only it can set and run handlers
    handled = {number: handler for number, handler in before.items() if here and callable(handler)}
    for number in handled:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for first in arrived[:1]:
            signal.raise_signal(first)


def _end_all(processes: Iterable[psutil.Process]) -> list[str]:
    """Ends these processes; returns a description of those that still ran."""
    left = []
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"left behind: {' '.join(process.cmdline())[:80]}")
                process.kill()
    return left

"""`rlsdk init` at a real terminal: it asks, a person types, and the file is one that `rlsdk plan` takes."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlsdk.config import load_config
from rlsdk.registry import Registry

SECONDS = 60.0
INIT = [sys.executable, "-m", "rlsdk.cli", "init"]


class Terminal:
    """A child process whose terminal this is."""

    def __init__(self, process: subprocess.Popen[bytes], handle: int) -> None:
        self.process, self._handle = process, handle
        self.text = ""
        """All that was shown."""
        self._seen = 0

    def expect(self, words: str) -> None:
        """Waits until the words are shown, behind those of the call before."""
        end = time.monotonic() + SECONDS
        while (at := self.text.find(words, self._seen)) < 0:
            assert time.monotonic() < end, f"{words!r} is not in {self.text!r}"
            assert self._read(), f"{words!r} is not in {self.text!r}"
        self._seen = at + len(words)

    def type(self, line: str) -> None:
        os.write(self._handle, line.encode())

    def press_ctrl_c(self) -> None:
        """Like a person who sees the question: when the process waits for keys. A signal that comes between the
        question's print and that wait is noticed at the next key only (so it is in Python's own `input`)."""
        end = time.monotonic() + SECONDS
        while not self._waits_for_keys():
            assert time.monotonic() < end, "the process never waits for a key"
            time.sleep(0.01)
        self.type("\x03")

    def leave(self) -> int:
        """Exit code, when all was read."""
        while self._read():
            pass
        return self.process.wait(SECONDS)

    def _waits_for_keys(self) -> bool:
        """Whether the main thread slept each time that it was looked at."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        for _ in range(10):
            if stat.read_text().rpartition(")")[2].split()[0] != "S":
                return False
            time.sleep(0.01)
        return True

    def _read(self) -> bool:
        """Whether there may be more."""
        ready, _, _ = select.select([self._handle], [], [], SECONDS)
        if not ready:
            return False
        try:
            part = os.read(self._handle, 65536)
        except OSError:  # what Linux says when the other end is closed
            return False
        self.text += part.decode(errors="replace").replace("\r\n", "\n")
        return bool(part)


@contextmanager
def terminal(folder: Path, *arguments: str) -> Iterator[Terminal]:
    """`rlsdk init` in a folder, in a session of its own so that a typed Ctrl-C reaches it."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        import fcntl
        import termios

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs the tests in the background has it ignored
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*INIT, *arguments], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
        os.close(ours)


def test_it_asks_and_writes_a_file_that_plan_takes(tmp_path: Path) -> None:
    with terminal(tmp_path, "my run.yaml") as shown:
        for question, answer in (
            ("model: ", "org/model\n"), ("data: ", "rows.jsonl\n"), ("reward: ", "\n"), ("GPUs on each machine", "0\n"),
        ):  # fmt: skip
            shown.expect(question)
            shown.type(answer)
        assert shown.leave() == 0, shown.text
    assert "wrote my run.yaml" in shown.text
    assert "rlsdk plan --config 'my run.yaml'" in shown.text
    config = load_config([tmp_path / "my run.yaml"], registry=Registry.discover())
    assert (config.model.path, config.data.train, config.rewards[0].name) == ("org/model", "rows.jsonl", "gsm8k")
    assert config.placement.device == "cpu"


def test_a_reward_that_is_misspelt_is_asked_for_again(tmp_path: Path) -> None:
    with terminal(tmp_path, "--model", "m", "--data", "d.jsonl", "--cpu") as shown:
        shown.expect("reward: ")
        shown.type("gsm9k\n")
        shown.expect("did you mean 'gsm8k'")
        shown.expect("reward: ")
        shown.type("gsm8k\n")
        assert shown.leave() == 0, shown.text
    assert "name: gsm8k" in (tmp_path / "run.yaml").read_text()


def test_ctrl_c_leaves_nothing_and_no_traceback(tmp_path: Path) -> None:
    with terminal(tmp_path) as shown:
        shown.expect("model: ")
        shown.type("org/model\n")
        shown.expect("data: ")
        shown.press_ctrl_c()
        assert shown.leave() == 130, shown.text
    assert "Traceback" not in shown.text
    assert "nothing was written" in shown.text
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_input_leaves_nothing_and_names_the_flags(tmp_path: Path) -> None:
    with terminal(tmp_path) as shown:
        shown.expect("model: ")
        shown.type("\x04")
        assert shown.leave() == 2, shown.text
    assert "Traceback" not in shown.text
    assert re.search(r"add --model \.\.\. --data \.\.\. --reward \.\.\.", shown.text)
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_it_names_the_flags_that_are_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*INIT, "--model", "m"], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2
    assert "add --data ... --reward ..." in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []

"""Reward functions for the tests, good and bad; loaded by path, in a grading process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlsdk.interfaces import RewardSample
from rlsdk.rewards import prepared_by
from rlsdk.rewards.grading.protocol import encode_value

READY: list[int] = []


def length(sample: RewardSample) -> float:
    return float(len(sample.response))


def answer_is_right(sample: RewardSample, *, right: float = 1.0) -> float:
    return right if sample.response == sample.answer else 0.0


def echo_fields(sample: RewardSample) -> float:
    fields = (sample.prompt, sample.response, sample.answer, sample.row["n"], sample.row["deep"], sample.truncated)
    as_sent = fields == ("p\ud83d é", "r\x00\n", None, 7, {"x": [None, 1.5]}, True)
    return float(as_sent and sample.extra == {"given": "é", "turns": [1, None]})


def interrupt() -> None:
    """A signal as from a terminal, also where the whole test run was started in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def misbehave(sample: RewardSample) -> Any:
    """Does what the response says; anything else is graded 0.5."""
    actions: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "nan": lambda: math.nan,
        "inf": lambda: -math.inf,
        "text": lambda: "1.0",
        "list": lambda: [1.0],
        "huge": lambda: 10**400,
        "1e35": lambda: 1e35,
        "true": lambda: True,
        "raise": lambda: 1 // 0,
        "exit": lambda: sys.exit(3),
        "interrupt": interrupt,
        "deep": lambda: misbehave(sample),
        "os_exit": lambda: os._exit(3),
        "segfault": lambda: ctypes.string_at(0),
        "loop": loop,
        "sleep": lambda: time.sleep(1000),
        "power": lambda: 10**10**10,
        "memory": lambda: len(bytearray(4 << 30)),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "close_all": lambda: os.closerange(0, 100),
    }
    if sample.response in actions:
        return actions[sample.response]()
    side_effects: dict[str, Callable[[], Any]] = {
        "print": lambda: print("x" * 20_000_000),
        "close_stdout": lambda: (sys.stdout.close(), os.close(1)),  # type: ignore[func-returns-value]
        "write_fd": lambda: os.write(1, b"\x03\x08\x00\x00\x00garbage!"),
        "alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 0.1),
        "wait": lambda: time.sleep(0.3),
    }
    side_effects.get(sample.response, int)()
    return 0.5


def changes_the_row(sample: RewardSample) -> float:
    """The number of earlier calls that left their mark in the row."""
    row = cast("dict[str, Any]", sample.row)
    row["deep"].append(1)
    row["seen"] = row.get("seen", 0) + 1
    return float(len(row["deep"]) + row["seen"])


def forks(sample: RewardSample) -> float:
    """Comes back twice, in two processes, when told to; each time with its own value."""
    if sample.response == "fork" and os.fork() == 0:
        return 99.0
    return float(len(sample.response))


def dies_once(sample: RewardSample) -> float:
    """Is killed or stopped the first time that it sees the prompt's file missing, as from outside."""
    note = Path(sample.prompt)
    if sample.response in ("SIGKILL", "SIGTERM", "SIGSTOP") and not note.exists():
        note.write_text("once")
        os.kill(os.getpid(), signal.Signals[sample.response])
    return float(len(sample.response))


def writes_everywhere(sample: RewardSample) -> float:
    """Puts a forged record, and rubbish, into every pipe that it finds."""
    if sample.response == "forge":
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, encode_value(77.0, item=1) + encode_value(77.0))
    return float(len(sample.response))


def slow(sample: RewardSample) -> float:
    time.sleep(0.05)
    return float(len(sample.response))


def loop() -> None:
    while True:
        pass


def prints(sample: RewardSample) -> float:
    print("printed", sample.response)
    print("on stderr", sample.response, file=sys.stderr)
    return 1.0


def alarm_works(sample: RewardSample) -> float:
    """As math-verify has it: a signal handler can be set on the main thread only."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        loop()
    except TimeoutError:
        return 1.0
    return 0.0


def leaves_a_child(sample: RewardSample) -> float:
    """Starts a process that outlives the call, writes its number where the prompt says, and hangs if told to."""
    child = subprocess.Popen(["sleep", "300"])
    with open(sample.prompt, "a", encoding="utf-8") as stream:
        stream.write(f"{os.getpid()} {child.pid}\n")
    if sample.response == "hang":
        return float(len(str(10**10**10)))
    return 1.0


@prepared_by(lambda: READY.append(1))
def prepared(sample: RewardSample) -> float:
    return float(len(READY))


def all_lengths(samples: Sequence[RewardSample]) -> list[float]:
    return [float(len(sample.response)) for sample in samples]


def group_size(samples: Sequence[RewardSample]) -> list[float]:
    return [float(len(samples))] * len(samples)


def all_misbehave(samples: Sequence[RewardSample]) -> list[Any]:
    return [misbehave(sample) for sample in samples]


def forgets_one(samples: Sequence[RewardSample]) -> list[float]:
    return [1.0 for sample in samples if sample.response != "forgotten"]


def ranked(samples: Sequence[RewardSample]) -> Any:
    """Compares its samples; the responses of the first say what it returns, and what goes wrong."""
    how, scores = samples[0].response, [float(len(samples))] * len(samples)
    forms: dict[str, Any] = {
        "one": scores[:1], "more": [*scores, 1.0], "endless": itertools.repeat(1.0), "set": {1.0, 2.0},
        "dict": dict.fromkeys(range(4), 1.0), "text": "1" * len(samples), "bytes": bytes(len(samples)),
        "number": 1.0, "nothing": None, "generator": iter(scores), "array": np.array(scores),
        "column": np.array([scores]).T[:, 0], "unshowable": [*scores[:-1], Unshowable()],
    }  # fmt: skip
    return forms[how]


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class RudeError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    def __eq__(self, other: object) -> bool:
        raise KeyboardInterrupt

    __hash__ = None  # type: ignore[assignment]


def leaves_a_file(sample: RewardSample) -> float:
    Path(tempfile.gettempdir(), "left").write_text("x")
    return 1.0


def rude(sample: RewardSample) -> float:
    """Errors that cannot be described, and texts that cannot be encoded."""
    if sample.response == "rude":
        raise RudeError from RudeError()
    if sample.response == "surrogate":
        raise ValueError("\ud800 in the text")
    if sample.response == "huge":
        return 1e300
    if sample.response == "nan":
        return float("nan")
    return float(len(sample.response))


BATCHED: tuple[Any, ...] = (all_lengths, group_size, all_misbehave, forgets_one, ranked)
for function in BATCHED:
    function.batched = True

not_a_function = 3


def evaluates(sample: RewardSample) -> Any:
    """What many a user's reward does: it runs what the model wrote."""
    return float(eval(sample.response, {"sample": sample}))


def spies(sample: RewardSample) -> float:
    """Does what the response says, and raises what comes of it."""
    target = sample.prompt
    actions: dict[str, Callable[[], Any]] = {
        "environment": lambda: len(os.environ.get("RLSDK_TEST_SECRET", "")),
        "own environment": lambda: float(b"RLSDK_TEST_SECRET" in Path("/proc/self/environ").read_bytes()),
        "parent's environment": lambda: float(b"=" in Path(f"/proc/{os.getppid()}/environ").read_bytes()),
        "parent's memory": lambda: Path(f"/proc/{os.getppid()}/mem").read_bytes(),
        "parent's files": lambda: os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY),
        "signal": lambda: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0),
        "socket": lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
        "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
        "unix": lambda: socket.socket(socket.AF_UNIX).connect(target),
        "name": lambda: urllib.request.urlopen("http://example.invalid/", timeout=1),
        "write": lambda: Path(target).write_text("x"),
        "append": lambda: os.write(os.open(target, os.O_WRONLY | os.O_APPEND), b"x"),
        "remove": lambda: os.unlink(target),
        "mkdir": lambda: os.mkdir(f"{target}.d"),
        "rename": lambda: os.rename(target, f"{target}.r"),
        "link": lambda: os.symlink("/etc/passwd", f"{target}.l"),
        "chmod": lambda: subprocess.run(["touch", f"{target}.t"], check=True),
        "temporary": lambda: os.write(tempfile.mkstemp()[0], b"x"),
        "null": lambda: os.write(os.open(os.devnull, os.O_WRONLY), b"x"),
        "program": lambda: len(subprocess.run(["echo", "ok"], capture_output=True, check=True).stdout),
        "huge file": lambda: os.truncate(tempfile.mkstemp()[1], 1 << 40),
        "user": os.getuid,
        "group": os.getgid,
        "late import": lambda: len(importlib.import_module("colorsys").__name__),
        "interpreter": lambda: (
            subprocess.run(
                [sys.executable, "-c", "import colorsys, os; print(os.getuid())"], capture_output=True, check=True
            ).stdout
        ),
        "mode": lambda: os.chmod(target, 0o777),
        "rights": lambda: int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16) & ~4,
        "core": lambda: resource.getrlimit(resource.RLIMIT_CORE)[0],
        "open files": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "size of files": lambda: resource.getrlimit(resource.RLIMIT_FSIZE)[1],
        "processes": lambda: resource.getrlimit(resource.RLIMIT_NPROC)[1],
        "no new privileges": lambda: int(Path("/proc/self/status").read_text().split("NoNewPrivs:")[1].split()[0]),
    }
    return float(actions[sample.response]() or 0.0)

"""The grading process: loads the reward functions, then grades what it is sent, one item after the other.

Everything that a user's function may do wrong happens here: it may raise, print, leave, hang, or eat memory. Functions
run on the main thread, so time-outs that use signals work inside them.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import json
import math
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.rewards.definitions import FailureKind
from rlsdk.rewards.load import load_function
from rlsdk.rewards.protocol import Tag, encode_record, encode_value, read_message, write_all

LOG_BYTES = 4 << 20
"""Of what reward functions print: the rest of the process's output is dropped."""
MAX_VALUE = 1e30
"""A larger reward is nonsense, and its sums would leave float32."""
_MESSAGE_CHARS = 400

Outcome: TypeAlias = tuple[Tag, float | Mapping[str, Any]]
"""A value, or a failure's kind and message."""


def main(requests: int, records: int, lifeline: int) -> None:
    """Serves until the controller closes its end. The three are file descriptors of pipes."""
    die_with_parent(lifeline)
    first = read_message(requests)
    if first is None:
        return
    setup, _ = first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    clean_up = _cleaner(setup["log_path"])
    clean_up()
    try:
        functions = _load(setup["rewards"])
    except ConfigError as error:
        write_all(records, encode_record(Tag.REFUSED, {"message": str(error)}))
        return
    limit_memory(setup["limits"]["memory_mb"])
    gc.collect()
    gc.freeze()  # what is loaded now stays: collections during grading need not look at it
    batched = [bool(getattr(function, "batched", False)) for function, _ in functions]
    write_all(records, encode_record(Tag.READY, {"batched": batched}))
    calls = [_with_options(function, options) for function, options in functions]
    os.register_at_fork(after_in_child=lambda: _close(requests, records))
    process = os.getpid()
    while (message := read_message(requests)) is not None:
        _grade(_Task(*message), calls, batched, _Channel(records, process), clean_up)


def _close(*fds: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def die_with_parent(lifeline: int) -> None:
    """Has this process and all that it started killed when the last write end of the pipe `lifeline` is closed.

    On Linux the kernel does it, so it works while a C function holds the interpreter; elsewhere a thread does.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it was closed before the kernel was told
            os._exit(1)
        return

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def limit_memory(memory_mb: int) -> None:
    """Bounds the address space to what is in use now plus `memory_mb` MiB. Only Linux tells what is in use."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = used + (memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def to_outcome(value: object) -> Outcome:
    """What a reward function gave: a value, or why it is none."""
    if value is None:
        return _failed(FailureKind.NONE, "the function gave None; does it end without `return`?")
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return _failed(
            FailureKind.TYPE, f"the function gave a {type(value).__name__}, expected a number: {value!r:.80}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception as error:
        return _failed(FailureKind.TYPE, f"a {type(value).__name__} that is no number: {error}")
    if not math.isfinite(number) or abs(number) > MAX_VALUE:
        return _failed(FailureKind.NAN, f"the function gave {number}")
    return Tag.VALUE, number


def _load(rewards: Sequence[Mapping[str, Any]]) -> list[tuple[Callable[..., Any], Mapping[str, Any]]]:
    functions = [(load_function(reward["target"], reward["options"]), reward["options"]) for reward in rewards]
    for (function, _), reward in zip(functions, rewards, strict=True):
        prepare = getattr(function, "prepare", None)
        try:
            if callable(prepare):
                prepare()
        except Exception as error:
            raise ConfigError(f"reward {reward['target']!r} cannot be prepared: {_describe(error)}") from error
    return functions


def _with_options(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    return (lambda sample: function(sample, **options)) if options else function


class _Channel:
    """The way back to the controller, for this process only: what forks and comes back here ends at once."""

    def __init__(self, records: int, process: int) -> None:
        self._records = records
        self._process = process

    def write(self, data: bytes) -> None:
        if os.getpid() != self._process:
            os._exit(0)
        write_all(self._records, data)


class _Task:
    """One message: its items, and the samples as fresh objects for every call."""

    def __init__(self, header: Mapping[str, Any], contexts: Sequence[bytes]) -> None:
        self.nonce = bytes.fromhex(header["nonce"])
        self.together: bool = header["together"]
        self.items: list[tuple[int, int]] = header["items"]
        self._samples = header["samples"]
        self._contexts = contexts

    def sample(self, at: int) -> RewardSample:
        """A sample with a row of its own: a function that changes it changes nobody else's."""
        context, response, truncated = self._samples[at]
        prompt, answer, row = json.loads(self._contexts[context])
        return RewardSample(prompt=prompt, answer=answer, row=row, response=response, truncated=truncated)


def _grade(
    task: _Task,
    calls: Sequence[Callable[[Any], Any]],
    batched: Sequence[bool],
    channel: _Channel,
    clean_up: Callable[[], None],
) -> None:
    """Grades the items of one message in order. After a MemoryError the process ends: who knows what it still holds."""
    if task.together:
        together = _call_together(calls[task.items[0][0]], task)
        clean_up()
        channel.write(together or encode_record(Tag.SINGLY, nonce=task.nonce))
        if together:
            return
    for index, (reward, at) in enumerate(task.items):
        (tag, content), intact = _call_one(calls[reward], task.sample(at), batched[reward])
        clean_up()
        channel.write(_record(tag, content, task.nonce, index))
        if not intact:
            os._exit(0)
    channel.write(encode_record(Tag.DONE, nonce=task.nonce))


def _call_one(call: Callable[[Any], Any], sample: RewardSample, batched: bool) -> tuple[Outcome, bool]:
    """What came of one item, and whether the process may go on."""
    try:
        return to_outcome(call([sample])[0] if batched else call(sample)), True
    except MemoryError as error:
        return _failed(FailureKind.MEMORY, _describe(error)), False
    except BaseException as error:  # sys.exit() and the like cost the sample, not the process
        return _failed(FailureKind.EXCEPTION, _describe(error)), True


def _call_together(call: Callable[[Any], Any], task: _Task) -> bytes | None:
    """The records of all samples and the final one; None when the call failed as a whole."""
    try:
        values = list(call([task.sample(at) for _, at in task.items]))
        if len(values) != len(task.items):
            return None
        records = [_record(*to_outcome(value), task.nonce, index) for index, value in enumerate(values)]
        return b"".join([*records, encode_record(Tag.DONE, nonce=task.nonce)])
    except BaseException:  # tried again one by one, where the culprit shows
        return None


def _record(tag: Tag, content: float | Mapping[str, Any], nonce: bytes, item: int) -> bytes:
    if isinstance(content, float):
        return encode_value(content, nonce=nonce, item=item)
    return encode_record(tag, content, nonce=nonce, item=item)


def _failed(kind: FailureKind, message: str) -> Outcome:
    return Tag.FAILED, {"kind": kind.value, "message": message[:_MESSAGE_CHARS]}


def _describe(error: BaseException) -> str:
    """Type, message, and the innermost place in the code that raised it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = f" ({Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno})" if at is not None else ""
    return text[: _MESSAGE_CHARS - len(place)] + place


def _cleaner(log_path: str | None) -> Callable[[], None]:
    """What undoes the things one call may leave behind for the next: a running alarm, closed or replaced output."""
    output = _Output(log_path)
    null = os.open(os.devnull, os.O_RDWR)

    def clean_up() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout = sys.stderr = output
        for fd in (1, 2):
            try:
                os.fstat(fd)
            except OSError:
                os.dup2(null, fd)

    return clean_up


class _Output(io.TextIOWrapper):
    """Where `print` goes: the log file, as far as there is one and it is not full. Cannot be closed."""

    def __init__(self, path: str | None) -> None:
        raw = open(path or os.devnull, "ab", buffering=0)  # noqa: SIM115 - lives as long as the process
        super().__init__(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", write_through=True)
        self._left = LOG_BYTES if path else 0

    def write(self, text: str) -> int:
        part, self._left = text[: max(self._left, 0)], self._left - len(text)
        if part:
            with contextlib.suppress(OSError):  # a full disk is not the reward's fault
                super().write(part)
                self.flush()
        return len(text)

    def close(self) -> None:
        """Stays open: what one function closes, the next one prints to."""

"""The grading process: loads the reward functions, then grades items one after another.

Everything that can go wrong in a user's function happens here: it may raise, print, exit, hang, or exhaust memory.
Functions run on the main thread, so that time-outs based on signals work in them. The functions are trusted, but their
inputs are not. So `rlsdk.confinement` removes the rights of the process, and `isolation` runs functions that execute
text in forks.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import json
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.confinement.measures import confine_after_imports, confine_before_imports, limit_memory
from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.interfaces.spelling import PythonCall, set_reader
from rlsdk.rewards.functions.byte_code import import_ahead
from rlsdk.rewards.functions.load import load_function
from rlsdk.rewards.functions.text_evaluation import evaluates_text
from rlsdk.rewards.grading.hints import hint
from rlsdk.rewards.grading.isolation import call_in_fork, describe_status, why_attributes_change
from rlsdk.rewards.grading.protocol import Tag, encode_graded, encode_record, encode_value, read_message, write_all
from rlsdk.rewards.grading.sources import own_sources
from rlsdk.rewards.scores.definitions import FailureKind
from rlsdk.rewards.scores.outcomes import Failed, NonsenseError, Outcome, failed, to_outcome, values_in_order
from rlsdk.system.printable import described

LOG_FULL = "\n[the log is full: further output of rewards is discarded]\n"
_MESSAGE_CHARS = 400


def main(requests: int, records: int, lifeline: int) -> None:
    """Serves until the controller closes its end. The arguments are file descriptors of pipes."""
    die_with_parent(lifeline)
    first = read_message(requests)
    if first is None:
        return
    setup, _ = first
    if setup["reader"] is not None:
        set_reader(PythonCall(**setup["reader"]))
    limits = RewardLimits(**setup["limits"])
    _use_scratch(setup["scratch"])
    output = _Output(setup["log_path"], int(limits.log_mb * (1 << 20)))
    clean_up = _cleaner(output)
    clean_up()
    confinement = confine_before_imports(allow_network=limits.allow_network)
    try:
        functions = _load(setup["rewards"], limits)
    except ConfigError as error:
        write_all(records, encode_record(Tag.REFUSED, {"message": str(error)}))
        return
    sources = own_sources()
    confine_after_imports(
        confinement,
        setup["scratch"],
        _files(functions),
        allow_network=limits.allow_network,
        allow_writes=limits.allow_writes,
    )
    limit_memory(limits.memory_mb)
    gc.collect()
    gc.freeze()  # loaded objects stay alive, so garbage collection during grading can skip them
    rewards = [_Reward(function, options, limits, output.fileno()) for function, options in functions]
    if any(reward.in_fork for reward in rewards) and not limits.allow_writes:
        confinement.note("no changes of permissions by functions that run text", why_attributes_change())
    body = {
        "batched": [reward.batched for reward in rewards],
        "reads_tokens": [reward.reads_tokens for reward in rewards],
        "in_fork": [reward.in_fork for reward in rewards],
        "held": confinement.held,
        "missing": confinement.missing,
        "sources": sources,
    }
    write_all(records, encode_record(Tag.READY, body))
    open_fds = [requests, records]
    os.register_at_fork(after_in_child=lambda: _close(open_fds))
    channel = _Channel(records, os.getpid(), limits)
    while (message := read_message(requests)) is not None:
        _grade(_Task(*message), rewards, channel, clean_up)


def _close(fds: list[int]) -> None:
    """Closes each descriptor only once, because a fork of a fork may reuse its number for another file."""
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


def _use_scratch(scratch: str) -> None:
    """Puts temporary files into the folder that the process may write; they are removed when the process ends."""
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = scratch


def _files(functions: Sequence[tuple[Callable[..., Any], Mapping[str, Any]]]) -> list[str]:
    modules = [sys.modules.get(getattr(function, "__module__", "")) for function, _ in functions]
    return [str(file) for module in modules if (file := getattr(module, "__file__", None))]


def die_with_parent(lifeline: int) -> None:
    """Kills this process and all its descendants when the last write end of the pipe `lifeline` is closed.

    On Linux the kernel does it, so it works while a C function holds the interpreter; elsewhere a thread does.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        poller = select.poll()  # `select` takes no descriptor of 1024 and above, which a large controller has
        poller.register(lifeline, select.POLLIN)
        if poller.poll(0):  # it was closed before the kernel was set up
            os._exit(1)
        return

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _load(
    rewards: Sequence[Mapping[str, Any]], limits: RewardLimits
) -> list[tuple[Callable[..., Any], Mapping[str, Any]]]:
    functions = [(_load_one(reward, limits), reward["options"]) for reward in rewards]
    for (function, _), reward in zip(functions, rewards, strict=True):
        prepare = getattr(function, "prepare", None)
        try:
            if callable(prepare):
                prepare()
        except Exception as error:
            why = f"{_describe(error)}{hint(error, limits)}"
            raise ConfigError(f"reward {reward['target']!r} cannot be prepared: {why}") from error
    return functions


def _load_one(reward: Mapping[str, Any], limits: RewardLimits) -> Callable[..., Any]:
    try:
        function = load_function(reward["target"], reward["options"])
    except ConfigError as error:
        raise ConfigError(f"{error}{hint(error, limits)}") from error
    import_ahead(function)
    return function


class _Reward:
    """One reward function; its failures affect only their own sample."""

    def __init__(
        self, function: Callable[..., Any], options: Mapping[str, Any], limits: RewardLimits, log: int
    ) -> None:
        self.batched = bool(getattr(function, "batched", False))
        self.reads_tokens = bool(getattr(function, "reads_tokens", False))
        self.in_fork = limits.isolation == "always" or (
            limits.isolation == "auto" and evaluates_text(function) is not None
        )
        """Whether every call runs in its own fork."""
        self._function, self._options, self._limits, self._log = function, options, limits, log

    def one(self, sample: RewardSample) -> tuple[Outcome, bool]:
        """Returns the outcome of one sample, and whether the process may continue."""
        if not self.in_fork:
            return self._one(sample)
        outcomes, status = call_in_fork(lambda: [self._one(sample)[0]], 1, self._log, self._limits)
        return (outcomes[0] if outcomes and not isinstance(outcomes, str) else describe_status(status)), True

    def together(self, samples: Sequence[RewardSample]) -> Sequence[Outcome] | str:
        """Returns the outcomes of all samples from one call; if the call raised, a text that says what."""
        if not self.in_fork:
            return self._together(samples)
        outcomes, status = call_in_fork(lambda: self._together(samples), len(samples), self._log, self._limits)
        return describe_status(status).message if outcomes is None else outcomes

    def _one(self, sample: RewardSample) -> tuple[Outcome, bool]:
        try:
            if self.batched:
                return self._outcomes([sample])[0], True
            return to_outcome(self._function(sample, **self._options), self._limits), True
        except MemoryError as error:
            return failed(FailureKind.MEMORY, _describe(error)), False
        except BaseException as error:  # sys.exit() and the like fail the sample, not the process
            return failed(FailureKind.EXCEPTION, _describe(error), _hint(error, self._limits)), True

    def _together(self, samples: Sequence[RewardSample]) -> Sequence[Outcome] | str:
        try:
            return self._outcomes(samples)
        except BaseException as error:  # the caller repeats one by one, to find the failing sample
            return _describe(error)

    def _outcomes(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        """Calls a batched function, and returns the outcome of each sample.

        A return value that is not one value per sample fails all of them: one by one, a function that compares samples
        would be another reward.
        """
        try:
            given = self._function(samples, **self._options)
            values = values_in_order(given, len(samples), getattr(self._function, "batch_of", "samples"))
        except NonsenseError as error:
            return [failed(error.kind, str(error))] * len(samples)
        return [_outcome(value, self._limits) for value in values]


class _Channel:
    """The channel to the controller, for this process only: a fork that writes to it ends immediately."""

    def __init__(self, records: int, process: int, limits: RewardLimits) -> None:
        self._records = records
        self._process = process
        self._limits = limits

    def encode(self, outcome: Outcome, nonce: bytes, item: int) -> bytes:
        """Encodes the record of one item; a record that is too large becomes a failure."""
        if isinstance(outcome, float):
            return encode_value(outcome, nonce=nonce, item=item)
        if isinstance(outcome, Failed):
            body = {"kind": outcome.kind.value, "message": outcome.message}
            return encode_record(Tag.FAILED, body, nonce=nonce, item=item)
        data = encode_graded(outcome.score, outcome.token_scores, outcome.metrics, nonce=nonce, item=item)
        if len(data) <= self._limits.max_record_bytes:
            return data
        limit = f"more than reward_limits.max_record_bytes {self._limits.max_record_bytes}"
        return self.encode(failed(FailureKind.TYPE, f"the record has {len(data)} bytes, {limit}"), nonce, item)

    def write(self, data: bytes) -> None:
        if os.getpid() != self._process:
            os._exit(0)
        write_all(self._records, data)


class _Task:
    """One message: its items, and the samples as new objects for every call."""

    def __init__(self, header: Mapping[str, Any], contexts: Sequence[bytes]) -> None:
        self.nonce = bytes.fromhex(header["nonce"])
        self.together: bool = header["together"]
        self.items: list[tuple[int, int]] = header["items"]
        self._samples = header["samples"]
        self._contexts = contexts

    def sample(self, at: int, reward: _Reward) -> RewardSample:
        """Builds a sample with its own row, so that a function cannot change rows of other samples."""
        context, response, truncated, extra, response_ids = self._samples[at]
        prompt, answer, row = json.loads(self._contexts[context])
        return RewardSample(
            prompt=prompt,
            answer=answer,
            row=row,
            response=response,
            truncated=truncated,
            extra=json.loads(extra) if extra else {},
            response_ids=tuple(response_ids) if reward.reads_tokens else (),
        )


def _grade(task: _Task, rewards: Sequence[_Reward], channel: _Channel, clean_up: Callable[[], None]) -> None:
    """Grades the items of one message in order. After a MemoryError the process ends, as it may still hold memory."""
    if task.together:
        reward = rewards[task.items[0][0]]
        outcomes = reward.together([task.sample(at, reward) for _, at in task.items])
        clean_up()
        if not isinstance(outcomes, str):
            records = [channel.encode(outcome, task.nonce, index) for index, outcome in enumerate(outcomes)]
            return channel.write(b"".join([*records, encode_record(Tag.DONE, nonce=task.nonce)]))
        channel.write(encode_record(Tag.SINGLY, {"message": outcomes}, nonce=task.nonce))
    for index, (which, at) in enumerate(task.items):
        outcome, intact = rewards[which].one(task.sample(at, rewards[which]))
        clean_up()
        channel.write(channel.encode(outcome, task.nonce, index))
        if not intact:
            os._exit(0)
    channel.write(encode_record(Tag.DONE, nonce=task.nonce))
    return None


def _outcome(value: object, limits: RewardLimits) -> Outcome:
    """The outcome of one value of a batch. A value that cannot be read, or shown, costs its own sample only."""
    try:
        return to_outcome(value, limits)
    except Exception as error:
        return failed(FailureKind.TYPE, f"the function gave a {type(value).__name__}: {_describe(error)}")


def _describe(error: BaseException) -> str:
    """Returns type, message, and innermost code location of an error."""
    text = described(error, _MESSAGE_CHARS)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = f" ({Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno})" if at is not None else ""
    return text[: _MESSAGE_CHARS - len(place)] + place


def _hint(error: BaseException, limits: RewardLimits) -> str:
    try:
        return hint(error, limits)
    except BaseException:  # attributes and comparisons of the error are the function's code, too
        return ""


def _cleaner(output: _Output) -> Callable[[], None]:
    """Returns a function that undoes side effects of a call: a running alarm, closed or replaced output."""
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
    """Output of `print`: the log file, if there is one and it is not full. Cannot be closed."""

    def __init__(self, path: str | None, limit: int) -> None:
        raw = open(path or os.devnull, "ab", buffering=0)  # noqa: SIM115 - lives as long as the process
        super().__init__(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", write_through=True)
        self._limit = limit if path else 0

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk must not fail the reward
            left = self._limit - os.fstat(self.fileno()).st_size
            if left > 0:
                cut = max(0, left - len(LOG_FULL))
                super().write(text if len(text) <= cut else f"{text[:cut]}{LOG_FULL}")
                self.flush()
        return len(text)

    def close(self) -> None:
        """Does nothing: the next function prints to the same output."""

"""Messages between the engine's process and SGLang's schedulers: commands as JSON; answers in anonymous memory, or over
TCP from schedulers on other nodes (`rlsdk_sglang.remote_answers`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlsdk_sglang import remote_answers

END = b"\n"
"""End of a complete answer, which is a single line."""
POLL_S, LOOK_S = 0.002, 1.0


@dataclass(frozen=True)
class Command:
    """A command for a scheduler process about the model that it serves."""

    name: str
    arguments: Mapping[str, Any]
    answers_to: tuple[list[Any], ...]
    """By pipeline stage: process id and file descriptor; or the address of remote answers
    (`remote_answers.Address`)."""
    data: bytes = b""
    """Weights sent along, for a scheduler that cannot map memory of the engine's process."""

    def encoded(self) -> bytes:
        return json.dumps([self.name, self.arguments, self.answers_to]).encode() + END + self.data

    @classmethod
    def decoded(cls, message: bytes) -> Command:
        text, _, data = message.partition(END)
        name, arguments, answers_to = json.loads(text)
        return cls(name, arguments, tuple(answers_to), data)

    def answer(self, value: object = None, error: str | None = None, *, stage: int = 0) -> None:
        """Answers the command; called in the process of pipeline stage `stage`, which executed it."""
        text, address = json.dumps({"value": value, "error": error}).encode(), self.answers_to[stage]
        if len(address) > 2:
            remote_answers.send(address, text)
            return
        process, descriptor = address
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            file.write(text + END)


class Answer:
    """Memory into which one scheduler writes its answer to a command. The kernel frees it, however the processes
    end."""

    def __init__(self) -> None:
        self._file = os.memfd_create("rlsdk-sglang")
        self.address = [os.getpid(), self._file]

    def read(self, wait_s: float = 0.0, look: Callable[[], None] = lambda: None) -> tuple[Any, str | None]:
        """Returns the value and the error, and closes it.

        Args:
            wait_s: seconds that the answer may still take: SGLang confirms a command after the first pipeline stage,
                and later stages execute it a little later.
            look: called every second; its exception ends the wait.
        """
        deadline, next_look = time.monotonic() + wait_s, time.monotonic() + LOOK_S
        with os.fdopen(self._file, "rb"):
            while not (data := os.pread(self._file, os.fstat(self._file).st_size, 0)).endswith(END):
                if time.monotonic() > deadline:
                    return None, "it gave no answer (it must run on this machine, as the same user)"
                if time.monotonic() > next_look:
                    look()
                    next_look = time.monotonic() + LOOK_S
                time.sleep(POLL_S)
        found = json.loads(data)
        return found["value"], found["error"]

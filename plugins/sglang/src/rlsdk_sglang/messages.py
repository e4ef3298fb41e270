"""What is said between the engine's process and SGLang's schedulers: commands as JSON, answers in memory without a
name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

END = b"\n"
"""Of a whole answer: none has another line."""
POLL_S = 0.002


@dataclass(frozen=True)
class Command:
    """Something that a scheduler's process is to do with the model that it serves."""

    name: str
    arguments: Mapping[str, Any]
    answers_to: tuple[tuple[int, int], ...]
    """By pipeline stage: process, and file descriptor in it."""

    def encoded(self) -> bytes:
        return json.dumps([self.name, self.arguments, self.answers_to]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Command:
        name, arguments, answers_to = json.loads(data)
        return cls(name, arguments, tuple((process, descriptor) for process, descriptor in answers_to))

    def answer(self, value: object = None, error: str | None = None, *, stage: int = 0) -> None:
        """Called by whoever carried it out, of that pipeline stage."""
        process, descriptor = self.answers_to[stage]
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            file.write(json.dumps({"value": value, "error": error}).encode() + END)


class Answer:
    """Where one scheduler writes what came of a command. Nothing is left behind, whatever ends either process."""

    def __init__(self) -> None:
        self._file = os.memfd_create("rlsdk-sglang")
        self.address = (os.getpid(), self._file)

    def read(self, wait_s: float = 0.0) -> tuple[Any, str | None]:
        """The value, and what went wrong. Closes it.

        Args:
            wait_s: how long the answer may still take: SGLang answers for the first pipeline stage, and the others
                carry a command out a little later.
        """
        deadline = time.monotonic() + wait_s
        with os.fdopen(self._file, "rb"):
            while not (data := os.pread(self._file, os.fstat(self._file).st_size, 0)).endswith(END):
                if time.monotonic() > deadline:
                    return None, "it gave no answer (it must run on this machine, as the same user)"
                time.sleep(POLL_S)
        found = json.loads(data)
        return found["value"], found["error"]

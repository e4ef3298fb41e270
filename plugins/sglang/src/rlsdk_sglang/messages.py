"""What is said between the engine's process and SGLang's schedulers: commands as JSON, answers in memory without a
name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """Something that a scheduler's process is to do with the model that it serves."""

    name: str
    arguments: Mapping[str, Any]
    answer_to: tuple[int, int]
    """Process and file descriptor in it."""

    def encoded(self) -> bytes:
        return json.dumps([self.name, self.arguments, self.answer_to]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Command:
        name, arguments, (process, descriptor) = json.loads(data)
        return cls(name, arguments, (process, descriptor))

    def answer(self, value: object = None, error: str | None = None) -> None:
        """Called by whoever carried it out."""
        process, descriptor = self.answer_to
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            file.write(json.dumps({"value": value, "error": error}).encode())


class Answer:
    """Where one scheduler writes what came of a command. Nothing is left behind, whatever ends either process."""

    def __init__(self) -> None:
        self._file = os.memfd_create("rlsdk-sglang")
        self.address = (os.getpid(), self._file)

    def read(self) -> tuple[Any, str | None]:
        """The value, and what went wrong. Closes it."""
        with os.fdopen(self._file, "rb") as file:
            data = file.read()
        if not data:
            return None, "it gave no answer (it must run on this machine, as the same user)"
        found = json.loads(data)
        return found["value"], found["error"]

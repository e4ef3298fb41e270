"""Sandboxes: where tools run what a model wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlsdk.interfaces.errors import BatchError


class SandboxError(BatchError):
    """A sandbox cannot be made on this machine, or is lost. Fails the sample."""

    kind = "sandbox"
    """Kind of the failure in metrics."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of a cell."""

    code: int = 0
    """Exit status; of a Python cell 1 after an exception; 128 and more: killed by a signal."""
    stdout: str = ""
    stderr: str = ""
    """With the traceback of a Python cell."""
    cut: int = 0
    """Bytes of the output that were left out of its middle."""
    timed_out: bool = False
    ended: str = ""
    """Why the interpreter ended, and with it what earlier cells left in it; files stay. Empty: it goes on."""

    @property
    def text(self) -> str:
        """What a model is shown: the output, and why the cell was ended."""
        note = f"[ended: {self.ended}. Variables are lost, files are kept]" if self.ended else ""
        status = f"[exit status {self.code}]" if self.code and not self.ended and not self.stderr else ""
        return "\n".join(part.rstrip("\n") for part in (self.stdout, self.stderr, note, status) if part)


class Sandbox(Protocol):
    """A place of its own for one episode. Calls block, and come one after another.

    Registered by `rlsdk_register_sandboxes`: called with the options of `rlsdk.agents.open_sandbox`, returns one. A
    sandbox ends with `close`, and by itself when the process that made it has ended. It raises `SandboxError` where it
    is lost; whatever a cell does is a `Ran`.
    """

    def python(self, code: str, *, seconds: float | None = None) -> Ran:
        """Runs a Python cell, which finds the names of the cells before it. The value of its last expression is
        printed.

        Args:
            code: of any number of lines.
            seconds: after which it is killed; None: the sandbox's own.
        """
        ...

    def shell(self, command: str, *, seconds: float | None = None) -> Ran:
        """Runs a cell of bash, which finds the folder and the variables of the cells before it. Args as `python`."""
        ...

    def put(self, path: str, content: bytes) -> None:
        """Writes a file.

        Args:
            path: within the sandbox; a relative one is below its folder.
            content: of the file.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def get(self, path: str) -> bytes:
        """Reads a file. Raises OSError where it cannot be read."""
        ...

    def close(self) -> None:
        """Ends all of its processes, and removes its files. Safe to call twice."""
        ...

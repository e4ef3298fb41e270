"""An environment with a Python tool, which runs in a sandbox of the episode's own."""

from __future__ import annotations

from rlsdk.agents import open_sandbox
from rlsdk.interfaces import Sandbox


class Solver:
    """The model may compute with Python, and submits a number."""

    def __init__(self, sandbox: str = "confined", seconds: float = 5.0) -> None:
        self._name, self._seconds = sandbox, seconds
        self._sandbox: Sandbox | None = None
        self._answer = 0.0
        self._given: float | None = None
        self.done = False

    def reset(self, answer: float) -> str:
        """Begins an episode; `answer` is a field of the row, and is not shown."""
        self.close()
        self._sandbox = open_sandbox(self._name, seconds=self._seconds)
        self._answer, self._given, self.done = float(answer), None, False
        return "Compute with `python`, and `submit` the number."

    def python(self, code: str) -> str:
        """Runs Python code. Variables are kept for the next call; the value of the last line is shown.

        Args:
            code: what to run
        """
        assert self._sandbox is not None  # `reset` comes first
        return self._sandbox.python(code).text

    def submit(self, number: float) -> str:
        """Ends the task.

        Args:
            number: the answer
        """
        self._given, self.done = number, True
        return "submitted"

    def get_reward(self) -> float:
        """1 for the right number."""
        return float(self._given is not None and abs(self._given - self._answer) <= 1e-6 * max(1.0, abs(self._answer)))

    def close(self) -> None:
        """Ends the sandbox, and all that runs in it."""
        if self._sandbox is not None:
            self._sandbox.close()

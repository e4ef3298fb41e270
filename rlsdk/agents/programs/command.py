"""An agent that is a command, in a process of its own for every episode."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlsdk.confinement.environment import allowed_environment
from rlsdk.interfaces import AgentSession, BatchError, Outcome, PromptView

TASK = "RLSDK_TASK"
"""Environment variable: path of a JSON file with the episode's task."""
_GRACE_S = 5.0
_TAIL_BYTES = 4000
"""Of its output, kept for messages."""


class AgentKilledError(BatchError):
    """A signal ended the agent's process, which says nothing about the episode."""

    kind = "agent"
    """Kind of the failure in metrics."""


class CommandProgram:
    """Runs a command, which finds the policy in `OPENAI_BASE_URL` and `OPENAI_API_KEY`."""

    def __init__(self, command: Sequence[str], environment: Sequence[str] = (), row_fields: Sequence[str] = ()) -> None:
        """Args:
        command: program and arguments; no shell.
        environment: names of further variables that the process gets.
        row_fields: names of the row's fields that it gets.
        """
        self._command = command
        self._environment = environment
        self._row_fields = row_fields

    async def run(self, prompt: PromptView, session: AgentSession, options: Mapping[str, Any]) -> Outcome:
        """Runs one episode. A cancelled one ends the process and those it started.

        Raises:
            AgentKilledError: a signal ended it.
            BatchError: the command cannot be started, or ends with an error.
        """
        with tempfile.TemporaryDirectory(prefix="rlsdk-agent-") as folder:
            task = Path(folder) / "task.json"
            task.write_text(json.dumps(self._task(prompt, session, options)), encoding="utf-8")
            environment = {**allowed_environment(os.environ, self._environment), **_variables(session), TASK: str(task)}
            code, output = await _finished(self._command, environment)
        said = f"; it said: {output}" if output else ""
        if code < 0:
            name = signal.Signals(-code).name
            raise AgentKilledError(f"the agent's command {self._command[0]!r} was ended by {name}{said}")
        if code:
            raise BatchError(f"the agent's command {self._command[0]!r} ended with exit status {code}{said}")
        return Outcome()

    def _task(self, prompt: PromptView, session: AgentSession, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompt": prompt.text,
            "messages": [*prompt.messages],
            "row": {name: prompt.row[name] for name in self._row_fields if name in prompt.row},
            "options": options,
            "model": session.model,
            "base_url": session.base_url,
        }


def _variables(session: AgentSession) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.api_key,
    }


async def _finished(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit status of a command, and the end of its output."""
    try:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        process = await asyncio.create_subprocess_exec(
            *_ending_with_this_process(), *command, env=environment, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise BatchError(f"rollout.command: {command[0]!r} cannot be started: {error.strerror}") from error
    assert process.stdout is not None
    try:
        tail = await _tail(process.stdout)
        return await process.wait(), tail
    finally:
        await _end(process)


@functools.cache
def _ending_with_this_process() -> tuple[str, ...]:
    """Words before a command that have the kernel end its process if this one is killed; none where that is unknown."""
    program = shutil.which("setpriv")  # of util-linux
    return () if program is None else (program, "--pdeathsig", "KILL", "--")


async def _tail(output: asyncio.StreamReader) -> str:
    """The end of an output, read as it comes."""
    kept = b""
    while data := await output.read(65_536):
        kept = (kept + data)[-_TAIL_BYTES:]
    return kept.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends whatever is left of a process and its children."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sent)
        if process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _GRACE_S)

"""Calls of an object's tools: checked, run, counted; what goes wrong is text for the model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rlsdk.agents.environments.limits import Limits
from rlsdk.agents.environments.schema import call_problem
from rlsdk.agents.environments.tools import EnvironmentClass, cut_text, text_of_result
from rlsdk.agents.environments.worker import Worker
from rlsdk.interfaces import AssistantMessage, Message, RlsdkError, ToolCall, ToolUse, nearest


class KnownResults(Protocol):
    """Results of tools without state, by number of their call: those from before a kill, and a place for new ones."""

    def known(self, call: int, name: str, arguments: Mapping[str, Any]) -> ToolUse | None: ...

    def keep(self, call: int, use: ToolUse) -> None: ...


class ToolCalls:
    """The calls of one episode."""

    def __init__(
        self, environment: EnvironmentClass, limits: Limits, worker: Worker, known: KnownResults | None
    ) -> None:
        """`known`: results of tools without state; None: there are none, and none are kept."""
        self._environment, self._limits, self._worker, self._known = environment, limits, worker, known
        self.counts = dict.fromkeys(("tool_calls", "tool_errors", "tool_failures", "results_cut"), 0)
        self.failures_in_a_row = 0
        self.uses: list[ToolUse] = []

    async def answers(self, of: Any, said: AssistantMessage, turn: int) -> list[Message]:
        """Results of a turn's calls, as messages; one that says what was wrong for a call that cannot be read.

        Args:
            of: the object.
            said: the turn.
            turn: its number, from 0.
        """
        if said.malformed is not None:
            self.counts["tool_errors"] += 1
            expected = f"the call could not be read: {said.malformed}. Expected one of the tools, in the format shown"
            return [{"role": "tool", "content": cut_text(expected, self._limits.max_tool_chars)}]
        found: list[Message] = []
        for call in said.calls:
            text = await self._noted(of, call, turn)
            found.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
            if is_done(of):
                break
        return found

    async def _noted(self, of: Any, call: ToolCall, turn: int) -> str:
        """As `_answer`; the episode shows it."""
        began, wrong = time.monotonic(), self.counts["tool_errors"] + self.counts["tool_failures"]
        text = await self._answer(of, call, turn)
        failed = self.counts["tool_errors"] + self.counts["tool_failures"] > wrong
        self.uses.append(
            ToolUse(
                turn=turn, name=call.name, arguments=call.arguments, result=text, failed=failed,
                seconds=round(time.monotonic() - began, 4),
            )
        )  # fmt: skip
        return text

    async def _answer(self, of: Any, call: ToolCall, turn: int) -> str:
        """Calls a tool; its failure is text for the model."""
        self.counts["tool_calls"] += 1
        schemas = {tool["function"]["name"]: tool["function"] for tool in self._environment.tools}
        if call.name not in schemas:
            known = sorted(schemas)
            return self._error(f"no tool {call.name!r}{nearest(call.name, known)}; expected one of {known}")
        if problem := call_problem(call.arguments, schemas[call.name]["parameters"]):
            return self._error(problem)
        result, failed = await self._result(of, call, turn)
        if failed:
            return self._failure(result)
        self.failures_in_a_row = 0
        self.counts["results_cut"] += len(result) > self._limits.max_tool_chars
        return cut_text(result, self._limits.max_tool_chars)

    async def _result(self, of: Any, call: ToolCall, turn: int) -> tuple[str, bool]:
        """What a tool says, and whether it is that it failed. One without state is not run again after a kill."""
        number, began = self.counts["tool_calls"] - 1, time.monotonic()
        known = self._known
        if known is None or call.name not in self._environment.stateless:
            return await self._run(of, call)
        if (found := known.known(number, call.name, call.arguments)) is not None:
            return found.result, found.failed
        result, failed = await self._run(of, call)
        use = ToolUse(
            turn=turn, name=call.name, arguments=call.arguments, result=result, failed=failed,
            seconds=round(time.monotonic() - began, 4),
        )  # fmt: skip
        known.keep(number, use)
        return result, failed

    async def _run(self, of: Any, call: ToolCall) -> tuple[str, bool]:
        """As `_result`; runs the tool."""
        try:
            tool = getattr(of, call.name)
            return text_of_result(await self._worker.call(tool, timeout_s=self._limits.tool_s, **call.arguments)), False
        except TimeoutError:
            return f"{call.name} did not answer within {self._limits.tool_s:g} s", True
        except RlsdkError:
            raise
        except Exception as error:  # a tool is the author's code
            return text_of_result(f"{call.name} failed: {type(error).__name__}: {error}"), True

    def _error(self, text: str) -> str:
        """The model's mistake."""
        self.counts["tool_errors"] += 1
        return cut_text(f"Error: {text}", self._limits.max_tool_chars)

    def _failure(self, text: str) -> str:
        """The tool's."""
        self.counts["tool_failures"] += 1
        self.failures_in_a_row += 1
        return cut_text(f"Error: {text}", self._limits.max_tool_chars)


def is_done(of: Any) -> bool:
    """Whether an object says that its episode has ended."""
    return getattr(of, "done", False) is True

"""An agent that is a function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlsdk.interfaces import Agent, AgentSession, BatchError, Outcome, PromptView


class FunctionProgram:
    """Runs `Agent` functions."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, prompt: PromptView, session: AgentSession, options: Mapping[str, Any]) -> Outcome:
        """Runs one episode.

        Raises:
            BatchError: what the function returned is no score.
        """
        returned = await self._agent(prompt, session, **options)
        if returned is None or isinstance(returned, Outcome):
            return returned or Outcome()
        if isinstance(returned, bool) or not isinstance(returned, int | float) or not math.isfinite(returned):
            raise BatchError(f"the agent returned {returned!r}; expected a finite number, an Outcome, or None")
        return Outcome(reward=float(returned))

"""Sections on agents: programs that make episodes, and the gateway that they talk to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Options, Section, empty_mapping, fields_of
from rlsdk.interfaces.settings import NO_INFLUENCE


class AgentsConfig(Section):
    """Agents: programs that make samples by chat messages."""

    agent: str | None = None
    """Generates each sample by chat messages, over an OpenAI-compatible endpoint: `pkg.mod:fn` or `file.py:fn`, an
    async function of the prompt and the session."""
    agent_options: Options = empty_mapping()
    """Keyword arguments of the agent; a command finds them in its task."""
    command: tuple[str, ...] = Field(default=(), strict=False)
    """As `agent`, in a process for each sample: program and arguments. It finds the endpoint in OPENAI_BASE_URL and
    OPENAI_API_KEY, and the path of its task, a JSON file, in RLSDK_TASK."""
    command_environment: tuple[str, ...] = Field(default=(), strict=False)
    """Names of further environment variables that the command gets; others than usual ones are withheld."""
    command_fields: tuple[str, ...] = Field(default=(), strict=False)
    """Names of fields of the data row that the command finds in its task. Others are withheld, the answer too: a
    program that knows it can pass it on."""
    max_rows: PositiveInt | None = None
    """Most rows of an episode that are trained; of more, so many are drawn, with as much more weight. null: all."""
    train_roles: tuple[Literal["agent", "auxiliary"], ...] = Field(default=("agent",), strict=False)
    """Roles of rows that are trained. auxiliary: requests without tools of an agent that began with tools."""

    @property
    def has_agent(self) -> bool:
        """Whether an agent or a command makes the samples."""
        return self.agent is not None or bool(self.command)

    def agent_problems(self) -> Iterator[Problem]:
        """Problems of these fields."""
        if self.agent is not None and self.command:
            yield Problem("command", value=list(self.command), expected="none, because rollout.agent makes the samples")
        if self.agent is not None and ":" not in self.agent:
            yield Problem("agent", value=self.agent, expected="file.py:function or pkg.mod:function")
        if self.command and shutil.which(self.command[0]) is None:
            yield Problem("command", value=list(self.command), expected="a program that is installed, or its path")
        if not self.train_roles:
            yield Problem("train_roles", "is empty: no row would be trained")

    def unused_by_agents(self) -> Iterator[Problem]:
        """Fields that have no effect."""
        if not self.has_agent:
            yield from fields_of(("agent_options", "max_rows", "train_roles"), "rollout.agent is null")
        if not self.command:
            yield from fields_of(("command_environment", "command_fields"), "rollout.command is empty")


class GatewayConfig(Section):
    """The OpenAI-compatible endpoint of agents, in the process that samples."""

    host: Annotated[str, NO_INFLUENCE] = "127.0.0.1"
    """Address to listen at. A request needs the key of an open session."""
    port: Annotated[NonNegativeInt, NO_INFLUENCE] = 0
    """0: any free one."""
    max_sessions: Annotated[PositiveInt | None, NO_INFLUENCE] = None
    """Most episodes of agents at once, or with a command most processes; further ones wait. null: 4096, or four
    processes for each processor."""
    lenient: tuple[str, ...] = Field(default=(), strict=False)
    """Fields of requests that are ignored although the gateway does not know them; others are refused."""
    agent_may_score: bool = False
    """Allows an agent to give its episode's score by `POST .../finish`."""

"""Checks of the agent that a configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import cast

from rlsdk.config.introspection.parameters import option_problems
from rlsdk.config.problem import Problem
from rlsdk.config.sections.agents import AgentsConfig
from rlsdk.interfaces import Agent, ConfigError, RlsdkError
from rlsdk.registry.functions import load_function


def load_agent(name: str) -> Agent:
    """The agent of a name, `pkg.mod:fn` or `file.py:fn`.

    Raises:
        ConfigError: there is none, or it is no async function of prompt and session.
    """
    agent = load_function(name, what="agent", takes=("prompt", "session"))
    if not iscoroutinefunction(agent):
        raise ConfigError(
            f"agent {name!r} is not async: expected `async def {name.rpartition(':')[2]}(prompt, session)`; put what "
            "blocks into `await asyncio.to_thread(...)`"
        )
    return cast(Agent, agent)


def agent_problems(rollout: AgentsConfig) -> Iterator[Problem]:
    """Problems of the agent and its options."""
    if rollout.agent is None:
        return
    try:
        agent = load_agent(rollout.agent)
    except RlsdkError as error:
        yield Problem("rollout.agent", str(error))
        return
    for problem in option_problems(agent, rollout.agent_options):
        yield replace(problem, path=f"rollout.agent_options.{problem.path}")

"""The agent of a run: loaded, with the gateway that it talks to and how the policy's chat is written and read."""

from __future__ import annotations

import copy
from typing import Any

from rlsdk.agents.chats.chat_format import ChatFormat
from rlsdk.agents.gateway.server import Gateway
from rlsdk.agents.programs.command import CommandProgram
from rlsdk.agents.programs.function import FunctionProgram
from rlsdk.agents.programs.rollouter import AgentRollouter, Program
from rlsdk.agents.sessions.limits import EpisodeLimits
from rlsdk.config import RunConfig
from rlsdk.config.checks.agents import load_agent
from rlsdk.config.sections.engines import RolloutConfig
from rlsdk.system.processors import usable_processors
from rlsdk.trainer.inputs.tokenizer import run_ends

SESSIONS = 4096
"""Episodes of agents at once."""
PROCESSES = 4
"""Processes of a command at once, for each processor."""


def agent_rollouter(config: RunConfig, tokenizer: Any, *, supports_stop: bool) -> AgentRollouter:
    """Starts the gateway of a run, and what runs its agents.

    Args:
        config: of the run.
        tokenizer: of the policy; a copy of it is used, for the gateway has its own thread.
        supports_stop: whether the rollout engine stops at texts.

    Raises:
        ConfigError: the tokenizer has no chat template, or the gateway's address cannot be listened at.
    """
    rollout, gateway = config.rollout, config.gateway
    form = ChatFormat(
        copy.deepcopy(tokenizer),
        name=rollout.tool_format,
        variables=config.data.chat_template_kwargs,
        stop_token_ids=run_ends(config, tokenizer).stops,
        needs_calls=False,
        never_rewrites=rollout.history == "exact",
    )
    return AgentRollouter(
        _program(rollout),
        form,
        Gateway(host=gateway.host, port=gateway.port, max_sessions=_max_sessions(config), lenient=gateway.lenient),
        EpisodeLimits(
            max_turns=rollout.max_turns,
            max_episode_tokens=rollout.max_episode_tokens,
            max_rows=rollout.max_rows,
            train_roles=rollout.train_roles,
        ),
        agent_s=rollout.timeouts.agent_s,
        supports_stop=supports_stop,
        may_score=gateway.agent_may_score,
    )


def _max_sessions(config: RunConfig) -> int:
    if config.gateway.max_sessions is not None:
        return config.gateway.max_sessions
    return PROCESSES * usable_processors() if config.rollout.command else SESSIONS


def _program(rollout: RolloutConfig) -> Program:
    if rollout.agent is not None:
        return FunctionProgram(load_agent(rollout.agent))
    return CommandProgram(rollout.command, rollout.command_environment, rollout.command_fields)

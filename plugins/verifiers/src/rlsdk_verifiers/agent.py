"""The agent: an episode is a rollout of a task by verifiers, whose model is the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig

from rlsdk.interfaces import AgentSession, ConfigError, Outcome, PromptView
from rlsdk_verifiers.tasks import task_of

OWN_HARNESS = "rlsdk_verifiers"
_NO_KEY = "RLSDK_VERIFIERS_NO_KEY"
"""A variable that is not set: the session's URL says whose request it is."""


class TaskFailedError(RuntimeError):
    """verifiers could not play the task."""


async def play(
    prompt: PromptView,
    session: AgentSession,
    *,
    harness: str = OWN_HARNESS,
    harness_options: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
    max_turns: int | None = None,
) -> Outcome:
    """Plays the row's task, and scores it with the task's own rewards.

    Args:
        prompt: a row of `--data verifiers:TASKSET`.
        session: the policy.
        harness: what runs the agent: this plugin's chat loop, or one of verifiers (`null`, `bash`, ...).
        harness_options: fields of its configuration.
        runtime: where the harness's program runs; None: `{type: subprocess}`.
        max_turns: most turns of the model.

    Raises:
        ConfigError: an option is refused.
        TaskFailedError: the task, the harness or its runtime failed.
    """
    task = task_of(prompt.row)
    client = EvalClientConfig(base_url=session.base_url, api_key_var=_NO_KEY)
    given = {
        "harness": {"id": harness, **(harness_options or {})},
        "runtime": dict(runtime or {"type": "subprocess"}),
        "model": session.model,
        "max_turns": max_turns,
    }
    try:
        agent = vf.Agent(vf.AgentConfig.model_validate({**given, "client": client}))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"rollout.agent_options of rlsdk_verifiers:play: {error}") from error
    trace = await agent.run(task)
    if not trace.ok and not trace.rewards:
        last = trace.errors[-1] if trace.errors else None
        raise TaskFailedError(f"{last.type}: {last.message}" if last else "the rollout of verifiers was not finished")
    numbers = {f"verifiers/{name}": value for name, value in _numbers(trace).items() if math.isfinite(value)}
    return Outcome(reward=float(trace.reward), info=numbers)


def _numbers(trace: vf.Trace) -> dict[str, float]:
    """Parts of the score, and metrics of the task."""
    found = {f"reward_{name}": float(part.value) for name, part in trace.rewards.items() if part is not None}
    found |= {name: float(value) for name, value in trace.metrics.items() if isinstance(value, int | float)}
    return found

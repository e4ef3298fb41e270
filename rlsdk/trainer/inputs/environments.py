"""The environment of a run: loaded, checked, and what plays it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.agents.chats.response_templates import loaded
from rlsdk.agents.environments.naming import find_environment
from rlsdk.agents.environments.tools import EnvironmentClass
from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError, PluginError
from rlsdk.kit.files.model_files import tokenizer_setting

if TYPE_CHECKING:
    from rlsdk.agents.environments.play import EnvironmentRollouter


def environment_rollouter(config: RunConfig, tokenizer: Any) -> EnvironmentRollouter:
    """What plays the environment that `rollout.environment` names.

    Raises:
        ConfigError: the class or a tool of it cannot be used, its options do not fit, or the tokenizer cannot write
            a chat with tools.
    """
    # Checks before a run load the class without torch, which the rest needs.
    from rlsdk.agents.chats.chat_format import ChatFormat
    from rlsdk.agents.environments.limits import Limits
    from rlsdk.agents.environments.play import EnvironmentRollouter
    from rlsdk.trainer.inputs.tokenizer import run_ends

    rollout, times = config.rollout, config.rollout.timeouts
    form = ChatFormat(
        tokenizer,
        name=rollout.tool_format,
        variables=config.data.chat_template_kwargs,
        stop_token_ids=run_ends(config, tokenizer).stops,
        never_rewrites=rollout.history == "exact",
    )
    return EnvironmentRollouter(
        environment=load_environment(config),
        form=form,
        limits=Limits(
            max_turns=rollout.max_turns,
            max_episode_tokens=rollout.max_episode_tokens,
            max_tool_chars=rollout.max_tool_chars,
            setup_s=times.setup_s,
            tool_s=times.tool_s,
            agent_s=times.agent_s,
            finalize_s=times.finalize_s,
        ),
    )


def load_environment(config: RunConfig) -> EnvironmentClass:
    """The class that `rollout.environment` names.

    Raises:
        ConfigError: there is none, it or a tool of it cannot be used, or `rollout.environment_options` do not fit.
    """
    target = config.rollout.environment or ""
    try:
        found = find_environment(target)
    except PluginError as error:
        raise ConfigError(f"rollout.environment {target!r}: {error}") from error
    environment = EnvironmentClass.of(found, target)
    try:
        inspect.signature(found).bind(**config.rollout.environment_options)
    except TypeError as error:
        raise ConfigError(f"rollout.environment_options: {target!r} is not made with them: {error}") from error
    return environment


def check_response_template(config: RunConfig) -> None:
    """Checks the format of tool calls that the policy's tokenizer brings, where its files are here and it is used.

    Raises:
        ConfigError: it is no response template.
    """
    rollout, folder = config.rollout, config.model.tokenizer or config.model.path
    is_read = rollout.tool_format is None and (rollout.has_agent or rollout.environment is not None)
    if folder is None or not is_read or config.model.trust_remote_code:
        return
    template = tokenizer_setting(Path(folder), "response_template")
    if template is not None:
        loaded(template)

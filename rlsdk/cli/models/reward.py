"""`rlsdk reward serve`: serves a reward over HTTP."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rlsdk.config import RewardConfig, RunConfig, config_error
from rlsdk.config.checks.commands import REWARD_SERVE
from rlsdk.config.loading.load import read_config
from rlsdk.config.loading.reads import unread
from rlsdk.interfaces import ConfigError, nearest
from rlsdk.registry import ComponentKind, Registry
from rlsdk.rewards.services.server import RewardServer, ServeOptions
from rlsdk.system.printable import printable
from rlsdk.trainer.inputs.rewards import secret_from_env, start_runner

SECTIONS = tuple(REWARD_SERVE.fields)
"""Sections of the configuration that apply to a service."""


def serve(name: str, arguments: Sequence[str], options: ServeOptions, token_env: str | None) -> None:
    """Serves until SIGINT or SIGTERM, then finishes the requests in progress.

    Args:
        name: name of a reward, or label of one in the configuration.
        arguments: `--config FILE` and fields, such as `--reward_limits.timeout_s 20`.
        options: options of the server, without the token.
        token_env: environment variable that holds the token; None: no token.

    Raises:
        ConfigError: the reward cannot be found or loaded, or the address cannot be used.
    """
    registry = Registry.discover()
    config = _read(arguments, registry)
    reward = find_reward(name, config, registry)
    token = None if token_env is None else secret_from_env(token_env)
    with start_runner([reward], config.reward_limits, registry, is_whole=False) as runner:
        server = RewardServer(runner, ServeOptions(**{**vars(options), "token": token}))
        runner.wait_ready()

        def stop(number: int, frame: FrameType | None) -> None:
            server.stop()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            print(f"reward {reward.title!r} answers at {server.url}; Ctrl-C ends it. Use it in a run:", flush=True)
            print(f"  {command(server.url, token_env)}", flush=True)
            server.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _read(arguments: Sequence[str], registry: Registry) -> RunConfig:
    """The configuration of a service; prints what it does not read of files.

    Raises:
        ConfigError: a field cannot be used, or a flag has no effect on a service.
    """
    loaded = read_config([], arguments, registry, sections=SECTIONS, reader=REWARD_SERVE)
    problems, lines = unread(loaded.given, loaded.config, REWARD_SERVE, loaded.problems, loaded.idle)
    if loaded.config is None or problems:
        raise config_error(problems)
    for line in lines:
        print(printable(line), file=sys.stderr)
    return loaded.config


def find_reward(name: str, config: RunConfig, registry: Registry) -> RewardConfig:
    """Returns the reward of the configuration with this label or name; without any there, the reward of this name.

    Raises:
        ConfigError: the configuration has rewards but none of this name, the reward is a URL, or it is not registered.
    """
    titles = [reward.title for reward in config.rewards]
    found = next((reward for reward in config.rewards if name in (reward.title, reward.name)), None)
    if found is None and titles:
        raise ConfigError(f"{name!r} is not one of the configuration's rewards {titles}{nearest(name, titles)}")
    reward = found or RewardConfig(name=name)
    if reward.is_remote:
        raise ConfigError(f"{name!r} is a service already; name it in a run by `--reward {name}`")
    if ":" not in reward.name:
        registry.row(ComponentKind.REWARD, reward.name)
    return reward.model_copy(update={"weight": 1.0, "rows": {}})  # the client applies weight and rows


def command(url: str, token_env: str | None) -> str:
    """Returns the command of a run that uses the service."""
    if token_env is None:
        return f"rlsdk train --reward {url} ..."
    return f"rlsdk train --rewards '[{{name: \"{url}\", remote: {{token_env: {token_env}}}}}]' ..."

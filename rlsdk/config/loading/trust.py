"""Refuses what a run's own configuration may not do without permission: run code, or send data elsewhere.

The folder of a run can come from anybody: a colleague, a hub, an archive. Its `config.yaml` names rewards, losses and
callbacks by file or module, which are executed, and trackers, which send prompts and answers where their options say.
Such values in a file of a run need `--trust-run` on the command line. A file that the user wrote and names with
`--config`, and every flag, is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsdk.config.introspection.validation_errors import dotted
from rlsdk.config.loading.tree import Place
from rlsdk.config.problem import Problem
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.spelling import Setting

TRUST_FLAG = "--trust-run"
FUNCTION_FIELDS = ("rewards.*.name", "algorithm.name", "algorithm.advantage", "algorithm.loss",
                   "algorithm.loss_aggregation", "algorithm.kl_estimator", "algorithm.kl_reward_estimator",
                   "rollout.rollouter", "rollout.environment", "rollout.agent", "trainer.callbacks.*")  # fmt: skip
"""Fields that take `pkg.mod:fn` besides registered names; `*` is a position in a list."""
LOCAL_TRACKERS = ("jsonl", "tensorboard")
"""Trackers that write only into the run's folder."""
_IN_FILE = re.compile(r"\.py:\w+\s*$")
_RUN_MARKS = ("checkpoints", "metrics.jsonl", ".lock")
"""Files of which one is next to the `config.yaml` of every run."""
_CHECKPOINT_MARK = "manifest.json"


def take_trust_flag(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without `--trust-run`, and whether it was among them."""
    return [argument for argument in arguments if argument != TRUST_FLAG], TRUST_FLAG in arguments


def is_of_run(file: Path, resumed: str | None = None) -> bool:
    """Whether a configuration file is in the folder of a run or of a checkpoint, or in the one that is resumed."""
    folders = (*file.absolute().parents, *file.resolve().parents)
    if resumed is not None and resumed not in ("auto", "never") and Path(resumed).resolve() in folders:
        return True
    return any(_is_run(folder) for folder in folders)


def _is_run(folder: Path) -> bool:
    if not (folder / "config.yaml").exists():
        return False
    return any((folder / mark).exists() for mark in (*_RUN_MARKS, _CHECKPOINT_MARK))


def check_trust(
    fields: dict[str, Any], origin: Callable[[Place], str], own: Callable[[str], bool], sections: Collection[str] | None
) -> None:
    """Refuses code and external trackers that the configuration of a run asks for.

    Args:
        fields: the whole configuration, as plain data.
        origin: returns the file and line, or the flag, from which the value at a path comes.
        own: whether an origin is the user's own.
        sections: top-level sections that will be used; None: all.

    Raises:
        ConfigError: lists every such field, and the flag.
    """
    problems = []
    for place, value in code_in(fields):
        came_from = origin(place)
        if (sections is None or place[0] in sections) and not own(came_from):
            problems.append(Problem(dotted(place), origin=came_from, value=value))
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(
            "the configuration comes from a run's folder, and it makes this command run code, or send data elsewhere:"
            f"{lines}\n"
            f"If you trust where the run comes from, add {Setting('trust_run', True)}; or give these fields yourself"
        )


def code_in(fields: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Paths of values that make a command run code outside rlsdk and its plugins, or send data to where a tracker's
    options say."""
    for place, value in _leaves(fields, ()):
        name = re.sub(r"\.\d+\b", ".*", dotted(place))
        if (
            (place[-1] == "trust_remote_code" and value)
            or (isinstance(value, str) and _IN_FILE.search(value))
            or (name in FUNCTION_FIELDS and ":" in str(value))
            or (_is_set_reward(place) and ":" in str(value))
            # Engine arguments can name classes, hooks and files; a Ray cluster sends code to its nodes.
            or "engine_kwargs" in place[1:-1]
            or (place == ("placement", "ray_address") and value)
            or place[:2] == ("rollout", "command")
            or _loosens_limits(place, value)
            # They send samples, and values of environment variables, to a server.
            or (place[-1] == "url" and value)
            or (place[-1] == "token_env" and value)
            or "headers_from_env" in place[:-1]
            or place[:2] == ("tracking", "options")
            or (place[:2] == ("tracking", "trackers") and value not in LOCAL_TRACKERS)
        ):
            yield place, value


def _loosens_limits(place: Place, value: Any) -> bool:
    """Whether a value lets graders do more: the reward `code` runs programs that the run's model writes."""
    if place[0] != "reward_limits":
        return False
    return (place[1] in ("allow_network", "allow_writes", "environment") and bool(value)) or value == "never"


def _is_set_reward(place: Place) -> bool:
    """Whether the path is the name of a reward of an evaluation set: `eval.sets.NAME.rewards.0.name`."""
    return place[:2] == ("eval", "sets") and place[3:4] == ("rewards",) and place[-1] == "name"


def _leaves(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    inside = list(items)
    if not inside and not isinstance(value, dict | list | tuple):
        yield place, value
    for key, item in inside:
        yield from _leaves(item, (*place, key))

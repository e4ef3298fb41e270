"""Environments by name: a class in a file or module, or one that a plugin makes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from rlsdk.interfaces import ConfigError
from rlsdk.registry import ComponentKind, Registry, find_function
from rlsdk.registry.known import FIRST_PARTY


def find_environment(target: str) -> Any:
    """The class that `rollout.environment` names.

    Args:
        target: `file.py:Class`, `pkg.mod:Class`, or `NAME:REST` with the NAME of a plugin's environment.

    Raises:
        ConfigError: there is none.
        PluginError: the plugin is not installed, or cannot be used.
    """
    kind, _, rest = target.partition(":")
    if not _is_plugin(kind):
        return find_function(target, what="environment")
    if not rest:
        raise ConfigError(f"environment {target!r}: expected {kind}:REST; `rlsdk plugins info {kind}` says what it is")
    return Registry.discover().component(ComponentKind.ENVIRONMENT, kind)(rest)


def _is_plugin(kind: str) -> bool:
    """Whether a plugin is meant: of a bare name that is one's, or no module's."""
    if not kind.isidentifier():
        return False
    known = kind in FIRST_PARTY[ComponentKind.ENVIRONMENT]
    return known or find_spec(kind) is None or kind in Registry.discover().usable(ComponentKind.ENVIRONMENT)

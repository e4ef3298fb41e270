"""Sandboxes by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from rlsdk.interfaces import ConfigError, Sandbox
from rlsdk.registry import ComponentKind, Registry

BUILT_IN = "confined"


def open_sandbox(name: str = BUILT_IN, **options: Any) -> Sandbox:
    """Opens a sandbox for one episode; the caller closes it.

    Args:
        name: `confined` (processes of this machine without rights), or one that a plugin registers.
        options: of that kind. For `confined`: those of `rlsdk.agents.ConfinedSandbox`.

    Raises:
        ConfigError: an option is unknown, or its value is none.
        PluginError: there is no sandbox of this name, or it cannot be used.
        SandboxError: it cannot be opened here.
    """
    make = _maker(name)
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ConfigError(f"sandbox {name!r} is not made with {sorted(options)}: {error}") from error
    made: Sandbox = make(**options)
    return made


@cache
def _maker(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = Registry.discover().component(ComponentKind.SANDBOX, name)
    return found

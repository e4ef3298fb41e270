"""Loads functions by import string: workers receive names as text, and look each up once per process."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from rlsdk.interfaces import ConfigError


@functools.cache
def resolve(path: str, what: str) -> Any:
    """Returns the object that `package.module:name` names.

    Args:
        path: the import string.
        what: kind of the object, for errors: "policy loss".

    Raises:
        ConfigError: the module does not exist, or has no such name.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} {path!r} cannot be loaded: {error}; name it as 'package.module:function'") from error

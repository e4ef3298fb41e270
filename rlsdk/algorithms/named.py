"""Functions by import string: what crosses to workers as text is looked up there, once per process."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from rlsdk.interfaces import ConfigError


@functools.cache
def resolve(path: str, what: str) -> Any:
    """The object that `package.module:name` names.

    Args:
        path: the import string.
        what: what it is to be, for errors: "policy loss".

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} {path!r} cannot be loaded: {error}; name it as 'package.module:function'") from error

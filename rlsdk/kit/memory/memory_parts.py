"""Names of the parts of an engine's memory that can be offloaded or put to sleep."""

from __future__ import annotations

from collections.abc import Sequence

from rlsdk.interfaces import ConfigError, nearest

TRAIN_PARTS = ("weights", "optimizer", "gradients")
ROLLOUT_PARTS = ("weights", "kv_cache")


def check_parts(method: str, parts: Sequence[str], known: Sequence[str]) -> None:
    """Checks names of parts.

    Raises:
        ConfigError: one of the parts is unknown.
    """
    for part in parts:
        if part not in known:
            raise ConfigError(f"{method}: unknown part {part!r}{nearest(part, known)}; expected some of {list(known)}")

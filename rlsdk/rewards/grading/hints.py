"""Hints on the field of the configuration that allows what a confined reward function was refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from rlsdk.interfaces.settings import RewardLimits


def hint(error: BaseException, limits: RewardLimits) -> str:
    """Returns a hint on the configuration field that allows the refused operation; empty for other errors."""
    for cause in _chain(error):
        if not isinstance(cause, OSError):
            continue
        unresolved = type(cause).__name__ == "gaierror"
        if not unresolved and cause.errno not in (errno.EACCES, errno.EPERM, errno.ENETUNREACH):
            continue
        if cause.filename is None and not limits.allow_network:
            return "; graders have no network: set reward_limits.allow_network if this reward needs it"
        if cause.filename is not None and not limits.allow_writes:
            return "; graders write no files: set reward_limits.allow_writes if this reward needs to"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__

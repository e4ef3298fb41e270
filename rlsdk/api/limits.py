"""Limits of this shell that end a run somewhere deep in a library, found before anything is started."""

from __future__ import annotations

import resource

from rlsdk.interfaces import ConfigError

LEAST_ADDRESS_SPACE = 16 << 30
"""Bytes. Ray's server reserves about 10 GiB of addresses on its own, torch and an engine the rest; no memory yet."""


def check_limits() -> None:
    """
    Raises:
        ConfigError: `ulimit -v` is too low for Ray and torch, which would die without a word of that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_ADDRESS_SPACE:
        return
    can_raise = hard == resource.RLIM_INFINITY
    fix = "Run: ulimit -v unlimited" if can_raise else "The hard limit is as low: ask who runs this machine to raise it"
    raise ConfigError(
        f"ulimit -v is {soft / 2**30:.1f} GiB of addresses in this shell: Ray and torch reserve at least "
        f"{LEAST_ADDRESS_SPACE >> 30} GiB, and die where they cannot. {fix}"
    )

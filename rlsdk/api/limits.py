"""Checks resource limits of this shell that would make a run fail deep in a library."""

from __future__ import annotations

import resource

from rlsdk.interfaces import ConfigError

LEAST_ADDRESS_SPACE = 16 << 30
"""Bytes of address space. Ray's server reserves about 10 GiB of it, torch and an engine the rest; this is not memory
use."""


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

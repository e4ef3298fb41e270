"""vLLM's process groups beside those of a train engine that lives in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class OwnWorld:
    """Gives what runs inside `entered()` a default process group of its own.

    vLLM takes the default group for its own and makes it when there is none. A train engine in the same process does
    the same, for other ranks. Neither may see the other's.
    """

    def __init__(self) -> None:
        self._default: Any = None
        self.users = 0
        """Engines that live on these groups: vLLM keeps one set for the whole process."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        outer = _swap(self._default)
        try:
            yield
        finally:
            self._default = _swap(outer)

    @property
    def alive(self) -> bool:
        """False once somebody ended the groups of the whole process, these among them."""
        return self._default is not None and self._default in distributed_c10d._world.pg_map

    def destroy(self) -> None:
        """Ends the default group that was made inside. Groups derived from it are their makers' to end."""
        mine, alive, self._default = self._default, self.alive, None
        if alive and mine is not dist.GroupMember.WORLD:
            dist.destroy_process_group(mine)


WORLD = OwnWorld()
"""Of all engines in this process."""


def _swap(group: Any) -> Any:
    """Makes `group` (None: no group) the default and returns the one that was."""
    if not dist.is_available():
        return None
    before = dist.GroupMember.WORLD
    # torch has no public way to hold two default groups; this is what init_process_group itself calls.
    distributed_c10d._update_default_pg(group)
    return before

"""vLLM's process groups, kept apart from those of a train engine in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class OwnWorld:
    """A separate default process group for code inside `entered()`.

    vLLM uses the default group as its own and creates it if none exists. A train engine in the same process does the
    same with other ranks. Neither may use the other's group.
    """

    def __init__(self) -> None:
        self._default: Any = None
        self.users = 0
        """Number of engines that use these groups: vLLM keeps one set per process."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        outer = _swap(self._default)
        try:
            yield
        finally:
            self._default = _swap(outer)

    @property
    def alive(self) -> bool:
        """False once the groups of the whole process, including these, were destroyed."""
        return self._default is not None and self._default in distributed_c10d._world.pg_map

    def destroy(self) -> None:
        """Destroys the default group that was created in it. Derived groups are destroyed by their creators."""
        mine, alive, self._default = self._default, self.alive, None
        if alive and mine is not dist.GroupMember.WORLD:
            dist.destroy_process_group(mine)


WORLD = OwnWorld()
"""The groups of all engines in this process."""


def _swap(group: Any) -> Any:
    """Makes `group` (None: no group) the default and returns the previous default."""
    if not dist.is_available():
        return None
    before = dist.GroupMember.WORLD
    # torch has no public way to hold two default groups; this is what init_process_group itself calls.
    distributed_c10d._update_default_pg(group)
    return before

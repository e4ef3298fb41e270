"""A running role: its row of the role table, its backend's capabilities, and its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from rlsdk.config import Role
from rlsdk.interfaces import BackendSpec, Batch, Capability, Peer


class PendingResult(Protocol):
    """The result of an asynchronous call."""

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for the result and returns it."""
        ...


class Ranks(Protocol):
    """The ranks of one role as one object: a `WorkerGroup` of a cluster, or engines in this process."""

    @property
    def world_size(self) -> int: ...

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Calls a method of the role's hosts with its declared dispatch, and waits for the result."""
        ...

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingResult:
        """As `run`, without waiting. Calls of one group run in the order of submission."""
        ...

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Calls a method on every rank with its own arguments; results in rank order."""
        ...

    def future(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """Calls a method on one rank, without a deadline."""
        ...

    def peers(self) -> Sequence[Peer]:
        """A handle per rank that can be sent to another worker."""
        ...


class BatchStore(Protocol):
    """Stores a batch once, to be passed to any method of any group: a cluster, or this process."""

    def put(self, batch: Batch) -> Any:
        """Stores the batch and returns a reference to it."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoleGroup:
    """The ranks of one role, as a ShardingManager sees them."""

    role: Role
    spec: BackendSpec
    group: Ranks

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def backend(self) -> str:
        return self.spec.name

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset(capability.value for capability in self.spec.capabilities)

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def can(self, capability: Capability) -> bool:
        """Whether its backend claims this capability."""
        return capability in self.spec.capabilities

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return self.group.run(method, *args, timeout_s=timeout_s, **kwargs)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingResult:
        return self.group.submit(method, *args, **kwargs)

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        return self.group.run_each(method, arguments, timeout_s=timeout_s)

    def peers(self) -> Sequence[Peer]:
        return self.group.peers()

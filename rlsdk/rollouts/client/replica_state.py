"""State of a replica in the request client: its protocol, health, and outstanding work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlsdk.interfaces import GenerationRequest
from rlsdk.rollouts.client.concurrency import ConcurrencyMeter
from rlsdk.rollouts.client.health import Event, Health
from rlsdk.rollouts.client.pump import Collected


class Replica(Protocol):
    """One serving replica, as used by the client."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def max_running(self) -> int:
        """Number of samples that it decodes concurrently; more wait inside the engine."""
        ...

    async def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    async def collect(self, wait_s: float) -> Collected:
        """Samples that finished since the last call; waits at most `wait_s` seconds for the first."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    @property
    def keeps_unfinished(self) -> bool:
        """Whether `pause` and `resume` work; otherwise running samples are aborted and continue from their tokens."""
        ...

    async def pause(self) -> None: ...

    async def resume(self, keep_cache: bool) -> None: ...


class Restarts(Protocol):
    """Restarts lost replicas."""

    @property
    def health(self) -> Sequence[Health]:
        """The state of every replica, in order."""
        ...

    async def revive(self, at: int, life: int, error: BaseException) -> None:
        """Returns when the replica with this index serves the current weights from a new process.

        Args:
            at: index of the replica.
            life: number of the lost process.
            error: the error by which it was lost.

        Raises:
            BaseException: the replica is given up; the reason.
        """
        ...


class NoRestarts:
    """Satisfies `Restarts`: lost replicas stay lost."""

    def __init__(self, count: int) -> None:
        self.health = [Health() for _ in range(count)]

    async def revive(self, at: int, life: int, error: BaseException) -> None:
        self.health[at].handle(Event.GIVEN_UP)
        raise error


@dataclass(eq=False)
class ReplicaState:
    """A replica and its outstanding work."""

    replica: Replica
    health: Health
    life: int = 0
    """Number of the process (restarts so far) that has these samples."""
    samples: int = 0
    tokens: int = 0
    to_send: list[GenerationRequest] = field(default_factory=list)
    last_progress: tuple[int | None, int] = (None, 0)
    """Progress: tokens decoded, samples finished."""
    progress_at: float = 0.0
    """Time when `seen` last changed."""
    error: BaseException | None = None
    """Error by which it was lost; None: it serves."""
    paused: bool = False
    busy_s: float = 0.0
    """Seconds in which it had samples to generate, up to `since`."""
    since: float | None = None
    """Time at which it got work after being idle; None: it is idle."""
    meter: ConcurrencyMeter | None = None
    """Adapts the number of its concurrent samples; None: as many as it decodes at once."""
    num_tokens: int = 0
    """Number of tokens in its finished samples."""

    @property
    def limit(self) -> int:
        """Samples that it may run at once."""
        return self.replica.max_running if self.meter is None else self.meter.limit

    def measure(self, collected: Collected, *, waiting: bool) -> None:
        """Updates the limit from an answer."""
        self.num_tokens += len(collected.outputs.token_ids)
        if self.meter is not None:
            self.meter.report(
                time.monotonic(),
                tokens=self.num_tokens if collected.num_decoded is None else collected.num_decoded,
                samples=len(collected.outputs),
                running=self.samples,
                waiting=waiting,
                used=collected.kv_used,
            )

    def count(self, samples: int) -> None:
        """Adds to the number of outstanding samples; negative: removes."""
        self.samples += samples
        if self.samples and self.since is None:
            self.since = time.monotonic()
        elif not self.samples and self.since is not None:
            self.busy_s += time.monotonic() - self.since
            self.since = None

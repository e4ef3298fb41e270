"""The ranks of a rollout group as replicas of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from rlsdk.interfaces import GenerationRequest
from rlsdk.rollouts import Collected


class CallsRanks(Protocol):
    """The part of a worker group's interface that replicas need."""

    @property
    def world_size(self) -> int: ...

    def future(self, rank: int, method: str, *args: Any) -> Future[Any]: ...


@dataclass(frozen=True, kw_only=True)
class GroupReplica:
    """Satisfies `rlsdk.rollouts.Replica`."""

    group: CallsRanks
    rank: int
    name: str
    max_running: int
    keeps_unfinished: bool = False

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        await self._call("submit_requests", requests)

    async def collect(self, wait_s: float) -> Collected:
        collected: Collected = await self._call("collect", wait_s)
        return collected

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("abort", request_ids)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self, keep_cache: bool) -> None:
        await self._call("resume", keep_cache)

    async def _call(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self.group.future(self.rank, method, *args))


def replicas_of(
    group: CallsRanks, *, backend: str, max_running: int, keeps_unfinished: bool = False
) -> list[GroupReplica]:
    """Makes one replica per rank; `keeps_unfinished`: its backend claims `Capability.PARTIAL_ROLLOUT`."""
    return [
        GroupReplica(
            group=group,
            rank=rank,
            name=f"replica {rank} of {backend!r}",
            max_running=max_running,
            keeps_unfinished=keeps_unfinished,
        )
        for rank in range(group.world_size)
    ]

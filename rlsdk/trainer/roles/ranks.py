"""A subset of a group's ranks as a group: for a sync while other ranks are unavailable."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlsdk.interfaces import DeadlineError, Peer, RlsdkError, WeightSourceHost
from rlsdk.trainer.roles.adapter_sync import CALL
from rlsdk.trainer.roles.role_group import PendingResult, Ranks

DEATH_S = 2.0
"""Seconds by which a process's death may be noticed later than the error that it causes."""


class LosableRanks(Protocol):
    """The part of a worker group's interface that is needed here."""

    def future(self, rank: int, method: str, *args: Any) -> Future[Any]: ...

    def death(self, rank: int) -> BaseException | None: ...

    def peers(self) -> Sequence[Peer]: ...


@dataclass(eq=False)
class SomeRanks:
    """Some ranks of a group as a `Ranks`, for methods that run on every rank. Waits for every rank before it raises an
    error, so that no rank is still running the call."""

    group: LosableRanks
    ranks: Sequence[int]
    timeout_s: float
    gone: dict[int, RlsdkError] = field(default_factory=dict)
    """Errors of the ranks that died or did not answer in time, by rank."""

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        assert not kwargs
        return self.run_each(method, [args] * len(self.ranks), timeout_s)

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Calls a method on each of the ranks; results in their order.

        Raises:
            RlsdkError: the error of the first rank that failed.
        """
        limit = timeout_s or self.timeout_s
        futures = [self.group.future(rank, method, *args) for rank, args in zip(self.ranks, arguments, strict=True)]
        wait_for_futures(futures, timeout=limit)
        results: list[Any] = []
        errors: list[RlsdkError] = []
        for rank, future in zip(self.ranks, futures, strict=True):
            try:
                results.append(future.result(timeout=0))
            except RlsdkError as error:
                errors.append(error)
            except FutureTimeoutError:
                self.gone[rank] = DeadlineError(f"no answer within {limit:g} s in {method} from replica {rank}")
                errors.append(self.gone[rank])
        if errors:
            self._find_dead(errors[0])
            raise errors[0]
        return results

    def future(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self.group.future(self.ranks[rank], method, *args)

    def peers(self) -> Sequence[Peer]:
        every = self.group.peers()
        return [every[rank] for rank in self.ranks]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{method} of some ranks is waited for")

    def _find_dead(self, error: RlsdkError) -> None:
        end = time.monotonic() + DEATH_S
        while not self.gone:
            self.gone.update({rank: error for rank in self.ranks if self.group.death(rank) is not None})
            if time.monotonic() > end:
                return
            time.sleep(0.05)


class RememberedLayouts:
    """Training ranks as a `Ranks` that caches their layouts, which never change, so that the sync of a restarted
    replica need not wait for the end of an update."""

    def __init__(self, group: Ranks) -> None:
        self._group = group
        self._layouts: dict[tuple[Any, ...], Any] = {}

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        layout = WeightSourceHost.weight_layout.__name__
        if method != layout and not (method == CALL and args[1] == layout):
            return self._group.run(method, *args, timeout_s=timeout_s, **kwargs)
        if (method, *args) not in self._layouts:
            self._layouts[(method, *args)] = self._group.run(method, *args, timeout_s=timeout_s)
        return self._layouts[(method, *args)]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingResult:
        return self._group.submit(method, *args, **kwargs)

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        return self._group.run_each(method, arguments, timeout_s)

    def future(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self._group.future(rank, method, *args)

    def peers(self) -> Sequence[Peer]:
        return self._group.peers()

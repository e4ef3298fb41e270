"""Processes that an engine needs on the other nodes of its replica. The cluster package provides each worker with a way
to start them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from rlsdk.interfaces import RlsdkError


class Companion(Protocol):
    """An object in its own process, which ends with the process that started it."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Calls a method there, on its own thread. The future raises what the method raised, or `WorkerError` when
        the process is gone; it has no deadline."""
        ...

    def end(self) -> None:
        """Kills the process. Safe to call twice."""
        ...


class Companions(Protocol):
    """One per worker of a cluster."""

    @property
    def address(self) -> str:
        """By which the other nodes of the run reach this one."""
        ...

    def start(self, bundle: int, target: str, *args: Any) -> tuple[Companion, Future[Any]]:
        """Starts a process with an object in it; does not wait.

        Args:
            bundle: of `RankContext.bundles`: the process starts on the node of that device.
            target: `package.module:Class`.
            args: of the constructor.

        Returns:
            The companion, and what is done once its object is made, or raises what the constructor raised.
        """
        ...


_companions: list[Companions] = []


def use_companions(companions: Companions | None) -> None:
    """Says how this process starts companions; None: it no longer can."""
    _companions[:] = [] if companions is None else [companions]


def get_companions() -> Companions:
    """Those of this process; raises `RlsdkError` where there are none."""
    if not _companions:
        raise RlsdkError("this process cannot start others on other nodes: it is no worker of a cluster")
    return _companions[0]

"""Companions: processes that an engine needs on the other nodes of its replica. The cluster package registers for each
worker how to start them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from rlsdk.interfaces import RlsdkError


class Companion(Protocol):
    """An object in a process of its own, which ends with the process that started it."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Calls a method of the object, on a thread of its own. The future raises what the method raised, or
        `WorkerError` if the process is gone; it has no deadline."""
        ...

    def end(self) -> None:
        """Kills the process. Safe to call twice."""
        ...


class Companions(Protocol):
    """One per worker of a cluster."""

    @property
    def address(self) -> str:
        """Address at which the other nodes of the run reach this node."""
        ...

    def start(self, bundle: int, target: str, *args: Any) -> tuple[Companion, Future[Any]]:
        """Starts a process with an object; does not wait for it.

        Args:
            bundle: one of `RankContext.bundles`; the process starts on the node of that device.
            target: `package.module:Class`.
            args: of the constructor.

        Returns:
            The companion, and a future that is done when its object is constructed; it raises what the constructor
            raised.
        """
        ...


_companions: list[Companions] = []


def use_companions(companions: Companions | None) -> None:
    """Sets how this process starts companions; None: it cannot any more."""
    _companions[:] = [] if companions is None else [companions]


def get_companions() -> Companions:
    """The companions of this process; raises `RlsdkError` if it cannot start any."""
    if not _companions:
        raise RlsdkError("this process cannot start others on other nodes: it is no worker of a cluster")
    return _companions[0]

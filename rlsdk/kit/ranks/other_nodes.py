"""Processes of an engine on the other nodes of its replica, managed from the first node.

The worker that hosts the engine starts them as its companions, on the nodes of its other devices.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rlsdk.interfaces import DeadlineError, RankContext, RlsdkError
from rlsdk.kit.ranks.companions import Companion, get_companions

END_S = 30.0
"""Seconds for an object on another node to end before its process is killed."""
LOOK_S = 1.0
PORTS = range(20000, 32000)
"""Ports below the ephemeral range of the system."""


class OtherNodes:
    """Starts one object on each other node. Create it before the engine starts on the first node, as all nodes wait for
    each other.

    The class of the object has two methods: `watch`, which returns or raises when something ended, and `end`.
    """

    def __init__(self, ctx: RankContext, target: str, arguments: Callable[[RankContext, int], Sequence[Any]]) -> None:
        """Starts the objects; does not wait.

        Args:
            ctx: of the replica.
            target: `package.module:Class` of the objects.
            arguments: returns the constructor's arguments, from the context on a node and its index in the replica.
        """
        self._companions: list[Companion] = []
        self._started: list[Future[Any]] = []
        self._watched: list[Future[Any]] = []
        for rank, name in enumerate(node_names(ctx)):
            if rank > 0:
                there = replace(ctx, node=name)
                bundle = ctx.bundles[ctx.device_nodes.index(name)]
                companion, started = get_companions().start(bundle, target, *arguments(there, rank))
                self._companions.append(companion)
                self._started.append(started)

    def check_starting(self) -> None:
        """Raises the error of a node whose object could not start."""
        for started in self._started:
            if started.done():
                started.result()

    def wait(self, timeout_s: float) -> None:
        """Waits until all objects are constructed, and starts to watch them.

        Raises:
            DeadlineError: it takes longer.
        """
        deadline = time.monotonic() + timeout_s
        for number, started in enumerate(self._started, start=2):
            try:
                started.result(max(deadline - time.monotonic(), LOOK_S))
            except TimeoutError:
                raise DeadlineError(
                    f"node {number} of this replica did not start its part of the engine within {timeout_s:g} s "
                    "(deadlines.collective_s)"
                ) from None
        self._watched = [companion.call("watch") for companion in self._companions]

    def check_alive(self) -> None:
        """Raises: RlsdkError: something on another node ended."""
        for watched in self._watched:
            if watched.done():
                why = watched.exception() or "it left"
                raise RlsdkError(f"a part of this replica on another node ended: {why}") from None

    def end(self) -> None:
        """Ends all objects and their processes. Safe to call twice."""
        leaving = [companion.call("end") for companion in self._companions] if self._watched else []
        deadline = time.monotonic() + END_S
        for left in leaving:
            with suppress(Exception):
                left.result(max(deadline - time.monotonic(), 0.0))
        for companion in self._companions:
            companion.end()
        self._companions = []


def node_names(ctx: RankContext) -> list[str]:
    """Names of a replica's nodes, its own first."""
    return list(dict.fromkeys(ctx.device_nodes)) or [ctx.node]


def num_here(ctx: RankContext, num_devices: int) -> int:
    """Number of a replica's devices on the node of this process."""
    return sum(node == ctx.node for node in ctx.device_nodes) if len(node_names(ctx)) > 1 else num_devices


def free_port(host: str, count: int = 1) -> int:
    """The first of `count` consecutive free ports on this address of this node.

    Raises:
        OSError: no port can be bound, as it is not an address of this node.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS) - count)
        if all(_is_free(host, port + more) for more in range(count)):
            return port


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True

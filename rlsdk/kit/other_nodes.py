"""A replica on several nodes whose engine wants a process on each: those on the other nodes, seen from the first.

The worker that hosts the engine has them started as its companions, where its own devices on those nodes are.
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
from rlsdk.kit.companions import Companion, get_companions

END_S = 30.0
"""For what runs on another node to end before its process is killed."""
LOOK_S = 1.0
PORTS = range(20000, 32000)
"""Below those that a system gives out by itself."""


class OtherNodes:
    """Made before the engine starts on the first node, which waits for the others as they wait for it.

    What runs there is an object with two methods: `watch`, which returns when something ended, or raises, and `end`.
    """

    def __init__(self, ctx: RankContext, target: str, arguments: Callable[[RankContext, int], Sequence[Any]]) -> None:
        """Starts them; does not wait.

        Args:
            ctx: of the replica.
            target: `package.module:Class` of the object.
            arguments: of its constructor, from the context on its node and the node's number in the replica.
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
        """Raises: what a node could not start for."""
        for started in self._started:
            if started.done():
                started.result()

    def wait(self, timeout_s: float) -> None:
        """Until all objects are made; they are watched from then on.

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
        """Ends them all. Safe to call twice."""
        leaving = [companion.call("end") for companion in self._companions] if self._watched else []
        deadline = time.monotonic() + END_S
        for left in leaving:
            with suppress(Exception):
                left.result(max(deadline - time.monotonic(), 0.0))
        for companion in self._companions:
            companion.end()
        self._companions = []


def node_names(ctx: RankContext) -> list[str]:
    """Of a replica's nodes, the first its own."""
    return list(dict.fromkeys(ctx.device_nodes)) or [ctx.node]


def num_here(ctx: RankContext, num_devices: int) -> int:
    """Of a replica's devices, those on the node of this process."""
    return sum(node == ctx.node for node in ctx.device_nodes) if len(node_names(ctx)) > 1 else num_devices


def free_port(host: str, count: int = 1) -> int:
    """The first of so many ports in a row that are free on this address of this node.

    Raises:
        OSError: no port can be bound: it is no address of this node.
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

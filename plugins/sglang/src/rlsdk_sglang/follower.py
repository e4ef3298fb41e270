"""SGLang's schedulers on a node other than the first of its replica (`rlsdk_sglang.nodes`)."""

from __future__ import annotations

import time

from rlsdk.interfaces import RankContext, RolloutSpec
from rlsdk.kit.ranks.waiting import LOOK_S
from rlsdk_sglang.client import ClientThread
from rlsdk_sglang.config import SglangOptions
from rlsdk_sglang.contained_engine import LEAVE_S, ContainedEngine
from rlsdk_sglang.launch import engine_arguments, environment, started
from rlsdk_sglang.nodes import NodePlace

UNBLOCKED = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}
"""Variable without which SGLang's start does not return on a node that serves no requests."""


class Follower:
    """Created in a companion. Its constructor returns once the schedulers of all nodes are ready."""

    def __init__(self, ctx: RankContext, spec: RolloutSpec, options: SglangOptions, place: NodePlace) -> None:
        self._client = ClientThread()
        self._engine = ContainedEngine()
        arguments = engine_arguments(ctx, spec, options, place)
        self._client.call(started, self._engine, arguments, environment(ctx, spec) | UNBLOCKED)

    def watch(self) -> None:
        """Waits until a scheduler ends, then raises `RlsdkError`. Never returns."""
        while True:
            self._engine.check_alive()
            time.sleep(LOOK_S)

    def end(self) -> None:
        """Waits for the schedulers, which the first node ends; kills those that do not end."""
        self._client.call(self._engine.end, LEAVE_S)
        self._client.stop()

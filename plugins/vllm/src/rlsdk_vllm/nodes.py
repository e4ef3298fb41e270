"""Copies of attention on several nodes: a process on each node starts the cores of its copies.

The engine's front runs on the first node and talks to all cores over TCP. The other nodes run what
`vllm serve --headless` runs, in companions of the worker that hosts the engine (`rlsdk.kit.ranks.other_nodes`), on the
devices of this replica.

Tested versions: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlsdk.interfaces import ConfigError, RankContext, RolloutSpec
from rlsdk.kit.ranks.companions import get_companions
from rlsdk.kit.ranks.other_nodes import free_port, node_names
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk_vllm.config import VllmOptions

FOLLOWER = "rlsdk_vllm.follower:Follower"


@dataclass(frozen=True, kw_only=True)
class CopiesHere:
    """The copies of attention on one node."""

    start: int
    """Index of the first, among all copies of the replica."""
    count: int
    host: str
    """Address of the first node, to which the cores of all nodes report."""
    port: int

    def arguments(self) -> dict[str, Any]:
        """`EngineArgs` for the copies of this node."""
        own = {"data_parallel_start_rank": self.start} if self.start else {}
        return {
            "data_parallel_backend": "mp",
            "data_parallel_size_local": self.count,
            "data_parallel_address": self.host,
            "data_parallel_rpc_port": self.port,
            **own,
        }


def check_copies(ctx: RankContext, spec: RolloutSpec) -> None:
    """Raises `ConfigError` if a copy would be on two nodes."""
    devices = spec.tp_size * spec.pp_size
    counts = Counter(ctx.device_nodes)
    if any(count % devices for count in counts.values()):
        raise ConfigError(
            f"rollout.dp_size {spec.dp_size} on {len(counts)} nodes: a copy of attention takes {devices} devices "
            f"(rollout.tp_size {spec.tp_size} x pp_size {spec.pp_size}) of one node, and this replica's nodes have "
            f"{list(counts.values())}. Give a smaller tp_size x pp_size; without dp_size one copy may span nodes"
        )


def first_place(ctx: RankContext, spec: RolloutSpec) -> CopiesHere:
    """The copies on this process's node, the first of the replica."""
    host = get_companions().address
    devices = sum(node == ctx.node for node in ctx.device_nodes)
    return CopiesHere(start=0, count=devices // (spec.tp_size * spec.pp_size), host=host, port=free_port(host))


def follower_of(
    spec: RolloutSpec,
    options: VllmOptions,
    shapes: Mapping[str, tuple[int, ...]],
    sources: Sequence[Source] | None,
    first: CopiesHere,
) -> Callable[[RankContext, int], Sequence[Any]]:
    """Function that gives the arguments of `Follower` for a node after the first (`OtherNodes`)."""

    def arguments(there: RankContext, rank: int) -> Sequence[Any]:
        before = node_names(there)[:rank]
        width = spec.tp_size * spec.pp_size
        start = sum(node in before for node in there.device_nodes) // width
        count = sum(node == there.node for node in there.device_nodes) // width
        return there, spec, options, dict(shapes), sources, replace(first, start=start, count=count)

    return arguments

"""Replicas on several nodes: one process per node starts SGLang's schedulers there (`rlsdk.kit.ranks.other_nodes`).

Tested: 0.5.23.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rlsdk.interfaces import ConfigError, RankContext, RolloutSpec
from rlsdk.kit.ranks.replica_devices import spans_nodes

FOLLOWER = "rlsdk_sglang.follower:Follower"
LOOPBACK = "127.0.0.1"
NEIGHBOURS = 16
"""Number of consecutive ports that SGLang uses, from the given one."""


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """One node of a replica with several nodes."""

    rank: int
    count: int
    first: str
    """`HOST:PORT` where the first node listens."""
    num_cached_tokens: int | None
    """Tokens in the KV cache, equal on all nodes: schedulers that admit different numbers of rows would wait for each
    other forever."""

    def arguments(self, timeout_s: float) -> dict[str, Any]:
        """`ServerArgs` for this node."""
        return {
            "nnodes": self.count,
            "node_rank": self.rank,
            "dist_init_addr": self.first,
            "dist_timeout": math.ceil(timeout_s),
        }


def check_nodes(ctx: RankContext, spec: RolloutSpec) -> None:
    """Raises `ConfigError` if SGLang cannot split a replica over these nodes."""
    counts = Counter(ctx.device_nodes)
    nodes = len(counts)
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"a replica of 'sglang' needs the same number of devices on each of its nodes; here they are "
            f"{list(counts.values())}. Give nodes of one size, or another product of rollout.tp_size, pp_size and "
            "dp_size"
        )
    if spec.pp_size % nodes and nodes % spec.pp_size:
        raise ConfigError(
            f"rollout.pp_size {spec.pp_size} on {nodes} nodes: SGLang puts whole stages on a node, or whole nodes in a "
            "stage; give a pp_size that divides the number of nodes or is a multiple of it"
        )


def peers(ctx: RankContext) -> dict[str, str]:
    """Environment that allows only the replica's nodes to connect to the TCP sockets of SGLang's copies of attention,
    which unpickle messages without authentication."""
    known = [name.rpartition("/")[2] for name in (*ctx.device_nodes, ctx.node) if "/" in name]
    found = {"SGLANG_ZMQ_ALLOWED_PEERS": ",".join(sorted({LOOPBACK, *known}))}
    # On a node with several addresses: the address that the other nodes use.
    return found | ({"SGLANG_ZMQ_SOURCE_IP": ctx.node.rpartition("/")[2]} if spans_nodes(ctx) and known else {})

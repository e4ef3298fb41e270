"""Targets that forward what they receive: a source sends a byte once per node, not once per replica.

Targets that want the same boxes, none of them next to a source, form chains: on each node, in order, the first target
receives from the sources, and each other one from the previous one. If the busiest source would still send more than
any target receives, the first targets of all nodes form one chain too: the sources then send each byte once. A chain
takes no longer than its slowest link, plus one bucket per stage: buckets are forwarded while the next ones arrive.

Workers of an engine form chains with workers of the same name in other replicas. Their weights go through their
replica's own process, which forwards them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import WeightLayout
from rlsdk.sharding.plan.box_table import BoxTable, Ints, mix
from rlsdk.sharding.plan.holders import ELSEWHERE, SAME_PROCESS
from rlsdk.sharding.plan.matching import Sides
from rlsdk.sharding.plan.routes import Routes

INTER_NODE_BYTES_S = 50e9
"""Bytes per second of one rank's link between nodes, one way (400 Gbit/s). For predictions."""
INTRA_NODE_BYTES_S = 400e9
"""Bytes per second of one rank's link within a node, one way. For predictions."""


def first_of(relays: Mapping[int, int], target: int) -> int:
    """The target of its chain that receives from the sources."""
    while target in relays:
        target = relays[target]
    return target


def passing_place(layout: WeightLayout) -> WeightLayout:
    """The place from and to which a target's weights are forwarded: for a worker, host memory of its replica's
    process."""
    return layout if layout.worker is None else replace(layout, device="cpu")


def plan_relays(target: Sequence[WeightLayout], sides: Sides, routes: Routes) -> dict[int, int]:
    """For each target that receives from another target, that other target.

    Args:
        target: all targets.
        sides: what they want.
        routes: what each would receive from the sources.
    """
    count = len(target)
    chains = _chains(target, sides, routes)
    relays = {late: early for group in chains for chain in group for early, late in pairwise(chain)}
    far = routes.distance == ELSEWHERE
    direct = _direct(routes, relays)
    sent = np.bincount(routes.source[far & direct], routes.num_bytes[far & direct])
    taken = np.bincount(routes.target[far], routes.num_bytes[far], minlength=count)
    if sent.max(initial=0) > taken.max(initial=0):
        for group in chains:
            relays |= {late[0]: early[0] for early, late in pairwise(group)}
    return relays


def _chains(target: Sequence[WeightLayout], sides: Sides, routes: Routes) -> list[list[list[int]]]:
    """Groups of targets that want the same boxes, each as one chain per node. Targets that cannot forward are excluded:
    several places of one process, targets next to a source, which read from it, and workers on another node than their
    replica's process. Workers of one replica have different names and are never in one chain."""
    near = set(np.unique(routes.target[routes.distance != ELSEWHERE]).tolist())
    processes: dict[str, int] = {}
    for layout in target:
        processes[layout.process] = processes.get(layout.process, 0) + 1
    keys = _wants(sides.wanted, int(sides.wants.max(initial=-1)) + 1)[sides.wants]
    groups: dict[tuple[int, str, str | None], dict[str, list[int]]] = {}
    for at, layout in enumerate(target):
        if at not in near and processes[layout.process] == 1 and not layout.is_apart:
            kind = layout.device.partition(":")[0]
            groups.setdefault((int(keys[at]), kind, layout.worker), {}).setdefault(layout.node, []).append(at)
    return [list(nodes.values()) for nodes in groups.values()]


def _wants(wanted: BoxTable, count: int) -> NDArray[np.uint64]:
    """`[count]`: hash of each list of boxes, equal for the same boxes in the same order; collisions have a probability
    near 2**-64."""
    sums = np.zeros(count, np.uint64)
    if len(wanted):
        first = np.searchsorted(wanted.rank, np.arange(count + 1))
        place = np.arange(len(wanted)) - first[wanted.rank]
        rows = mix(wanted.name, 7) * wanted.measure() ^ mix(place, 11)
        filled = np.flatnonzero(np.diff(first))
        sums[filled] = np.add.reduceat(mix(rows.view(np.int64), 13), first[filled])
    return sums


def _direct(routes: Routes, relays: Mapping[int, int]) -> NDArray[np.bool_]:
    """`[routes]`: whether the target receives from the sources."""
    if not relays:
        return np.ones(len(routes.source), bool)
    return np.isin(routes.target, list(relays), invert=True)


def relayed_load(routes: Routes, relays: Mapping[int, int], num_sources: int) -> Ints:
    """`[num_sources]`: bytes that each source sends to other processes, with relays."""
    direct = (routes.distance != SAME_PROCESS) & _direct(routes, relays)
    return np.bincount(routes.source[direct], routes.num_bytes[direct], minlength=num_sources).astype(np.int64)


def predict_seconds(
    routes: Routes,
    relays: Mapping[int, int],
    target: Sequence[WeightLayout],
    num_sources: int,
    bucket_bytes: int,
    *,
    inter_node_bytes_s: float = INTER_NODE_BYTES_S,
    intra_node_bytes_s: float = INTRA_NODE_BYTES_S,
) -> float:
    """Predicted seconds: the busiest link of any rank, in or out, at full rate, plus one bucket for each stage of the
    longest chain. Without latency, contention in switches, loading and fingerprints."""
    direct = _direct(routes, relays)
    per_target = np.bincount(routes.target, routes.num_bytes, minlength=len(target))
    far = routes.distance == ELSEWHERE
    near = ~far & (routes.distance != SAME_PROCESS)
    seconds = 0.0
    for rows, speed, within in ((far, inter_node_bytes_s, False), (near, intra_node_bytes_s, True)):
        sends = np.bincount(routes.source[rows & direct], routes.num_bytes[rows & direct], minlength=num_sources)
        takes = np.bincount(routes.target[rows & direct], routes.num_bytes[rows & direct], minlength=len(target))
        passes = np.zeros(len(target))
        for child, parent in relays.items():
            if (target[child].node == target[parent].node) == within:
                passes[parent] += per_target[child]
                takes[child] += per_target[child]
        busiest = max(float(values.max(initial=0)) for values in (sends, takes, passes))
        seconds = max(seconds, busiest / speed)
    delay = 0.0
    for child in relays:
        at, stages = child, 0.0
        while at in relays:
            beside = target[at].node == target[relays[at]].node
            stages += 1 / (intra_node_bytes_s if beside else inter_node_bytes_s)
            at = relays[at]
        delay = max(delay, stages)
    return seconds + delay * bucket_bytes

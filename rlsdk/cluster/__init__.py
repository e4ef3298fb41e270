"""Ray: pools of devices, one worker process on each, and groups of ranks whose methods say how they are called."""

from __future__ import annotations

from rlsdk.cluster.background_start import BackgroundCluster
from rlsdk.cluster.batch_ref import BatchRef
from rlsdk.cluster.capacity import processors_notice
from rlsdk.cluster.cluster import Cluster
from rlsdk.cluster.dispatch import Join, MethodSpec, Split, dispatch
from rlsdk.cluster.group import WorkerGroup
from rlsdk.cluster.local import count_gpus
from rlsdk.cluster.pending import Pending, wait_any
from rlsdk.cluster.placement import PRESETS, PlacementSpec, PoolSpec, preset_placement

__all__ = [
    "PRESETS",
    "BackgroundCluster",
    "BatchRef",
    "Cluster",
    "Join",
    "MethodSpec",
    "Pending",
    "PlacementSpec",
    "PoolSpec",
    "Split",
    "WorkerGroup",
    "count_gpus",
    "dispatch",
    "preset_placement",
    "processors_notice",
    "wait_any",
]

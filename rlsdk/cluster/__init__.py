"""Ray: pools of devices, one worker process on each, and groups of ranks whose methods say how they are called."""

from __future__ import annotations

from rlsdk.cluster.background_start import BackgroundCluster
from rlsdk.cluster.batches.batch_ref import BatchRef
from rlsdk.cluster.calls.dispatch import Join, MethodSpec, Split, dispatch
from rlsdk.cluster.calls.pending import Pending, wait_any
from rlsdk.cluster.cluster import Cluster
from rlsdk.cluster.devices.capacity import processors_notice
from rlsdk.cluster.devices.placement import PRESETS, PlacementSpec, PoolSpec, preset_placement
from rlsdk.cluster.group import WorkerGroup
from rlsdk.cluster.ray_cluster.local import count_gpus

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

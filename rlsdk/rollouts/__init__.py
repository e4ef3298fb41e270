"""The stream of groups: decides which samples are made, where and when. Uses engines and clusters only through
protocols."""

from __future__ import annotations

from rlsdk.rollouts.client.client import GenerationClient
from rlsdk.rollouts.client.packed import PackedOutputs
from rlsdk.rollouts.client.pump import Collected, Lost, Pump
from rlsdk.rollouts.client.replica_state import Replica, Restarts
from rlsdk.rollouts.groups.batches import make_batch
from rlsdk.rollouts.groups.grading import Codec, Grader
from rlsdk.rollouts.groups.group import Failure, Grade, Group, GroupId, GroupTask, Sample
from rlsdk.rollouts.groups.rollouter import single_turn
from rlsdk.rollouts.groups.stream import RolloutStream, StreamOptions
from rlsdk.rollouts.schedule.events import Finished, Publish, Published, Sampled, Snapshot, Start, Train, Updated
from rlsdk.rollouts.schedule.schedule import Schedule
from rlsdk.rollouts.schedule.seeds import request_seed

__all__ = [
    "Codec",
    "Collected",
    "Failure",
    "Finished",
    "GenerationClient",
    "Grade",
    "Grader",
    "Group",
    "GroupId",
    "GroupTask",
    "Lost",
    "PackedOutputs",
    "Publish",
    "Published",
    "Pump",
    "Replica",
    "Restarts",
    "RolloutStream",
    "Sample",
    "Sampled",
    "Schedule",
    "Snapshot",
    "Start",
    "StreamOptions",
    "Train",
    "Updated",
    "make_batch",
    "request_seed",
    "single_turn",
]

"""The stream of groups: decides which samples are made, where and when. Uses engines and clusters only through
protocols."""

from __future__ import annotations

from rlsdk.rollouts.batches import make_batch
from rlsdk.rollouts.client import GenerationClient
from rlsdk.rollouts.events import Finished, Hold, Publish, Published, Sampled, Start, Train, Updated
from rlsdk.rollouts.grading import Codec, Grader
from rlsdk.rollouts.group import Failure, Grade, Group, GroupId, GroupTask, Sample
from rlsdk.rollouts.packed import PackedOutputs
from rlsdk.rollouts.pump import Collected, Lost, Pump
from rlsdk.rollouts.replica_state import Replica, Restarts
from rlsdk.rollouts.rollouter import single_turn
from rlsdk.rollouts.schedule import Schedule
from rlsdk.rollouts.seeds import request_seed
from rlsdk.rollouts.stream import RolloutStream, StreamOptions

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
    "Hold",
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
    "Start",
    "StreamOptions",
    "Train",
    "Updated",
    "make_batch",
    "request_seed",
    "single_turn",
]

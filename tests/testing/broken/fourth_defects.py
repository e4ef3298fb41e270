"""The engines of the fourth blind trial that the requirements missed."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_FOURTH: dict[str, Defect] = {}
TRAIN_FOURTH: dict[str, Defect] = {}
RANKS_FOURTH: dict[str, Defect] = {}
SHARDING_FOURTH = {
    "last-round-joined": Defect("sharding_fourth:LastRoundJoined", {"plan.rounds": "bytes of"}),
    "changed-since-the-first": Defect(
        "sharding_fourth:ChangedSinceTheFirst", {"sync.report": "changed tensors of none since"}
    ),
    "shared-pool-of-the-class": Defect("sharding_fourth:SharedPoolOfTheClass", {"sync.managers": ""}),
}

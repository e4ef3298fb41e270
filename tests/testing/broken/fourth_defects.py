"""The engines of the fourth blind trial that the requirements missed."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_FOURTH = {
    "top-k-capped": Defect("rollout_fourth:TopKCapped", {"distribution.responses": ""}),
    "temperature-clamped": Defect("rollout_fourth:TemperatureClamped", {"distribution.responses": "log-prob"}),
    "half-in-big-batch": Defect("rollout_fourth:HalfInBigBatch", {"replicas": "log-prob"}),
    "keyed-by-tail": Defect("rollout_fourth:KeyedByTail", {"company.like_prompts": "log-prob"}),
    "abort-takes-one-more": Defect("rollout_fourth:AbortTakesOneMore", {"abort.at_once": "tokens decoded behind it"}),
    "even-ranks-alike": Defect("rollout_fourth:EvenRanksAlike", {"replicas": "depend on another replica"}),
    "wake-begins-calls": Defect("rollout_fourth:WakeBeginsCalls", {"noise.lifetime": "distinct samples"}),
    "failed-update-stays-open": Defect("rollout_fourth:FailedUpdateStaysOpen", {"handles": "open files that"}),
}
TRAIN_FOURTH = {
    "failure-keeps-half": Defect("train_fourth:FailureKeepsHalf", {"objective.raises": "bfloat16"}),
    "norms-stay-old": Defect("train_fourth:NormsStayOld", {"model.bfloat16_forward": "difference of log-probs"}),
}
RANKS_FOURTH: dict[str, Defect] = {}
SHARDING_FOURTH = {
    "last-round-joined": Defect("sharding_fourth:LastRoundJoined", {"plan.rounds": "bytes of"}),
    "changed-since-the-first": Defect(
        "sharding_fourth:ChangedSinceTheFirst", {"sync.report": "changed tensors of none since"}
    ),
    "shared-pool-of-the-class": Defect("sharding_fourth:SharedPoolOfTheClass", {"sync.managers": ""}),
}

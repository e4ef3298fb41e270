"""Engines of the families that the tenth blind trial showed to be looked at too little."""

from __future__ import annotations

from broken.defect import Defect

TRAIN_TENTH = {
    "schedule-from-adam": Defect(
        "train_tenth:ScheduleFromAdam", {"checkpoint.idle": "of the rate, behind one and an idle step"}
    ),
    "rotary-in-bfloat16": Defect(
        "train_tenth:RotaryInBfloat16", {"model.bfloat16_positions": "difference of late tokens"}
    ),
    "offloads-what-steps-changed": Defect(
        "train_tenth:OffloadsWhatStepsChanged", {"steady.offload_changed": "changed by a checkpoint"}
    ),
}
RANKS_TENTH = {
    "least-step": Defect("ranks_tenth:LeastStep", {"ranks.checkpoint_heads": "difference of weights"}),
}
SHARDING_TENTH = {
    "compares-what-changed": Defect(
        "sharding_tenth:ComparesWhatChanged", {"sync.proven.each": "where another tensor was trained"}
    ),
    "trusts-tied-copies": Defect("sharding_tenth:TrustsTiedCopies", {"sync.proven.each": "head.weight"}),
}

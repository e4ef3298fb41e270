"""Engines of the families that the sixth blind trial showed to be looked at too little."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_SIXTH = {
    "pad-never-drawn": Defect("rollout_sixth:PadNeverDrawn", {"distribution.special": "p-value of special token"}),
    "positions-unscaled": Defect("rollout_sixth:PositionsUnscaled", {"model.configuration": "wrong samples, scaled"}),
    "logits-unscaled": Defect("rollout_sixth:LogitsUnscaled", {"model.configuration": "wrong samples, scaled"}),
    "stops-of-48-rows": Defect("rollout_sixth:StopsOf48Rows", {"replicas": "many that stop"}),
    "majority-is-greedy": Defect("rollout_sixth:MajorityIsGreedy", {"company.minority": "most are greedy"}),
}
TRAIN_SIXTH = {
    "metrics-in-float32": Defect("train_sixth:MetricsInFloat32", {"objective.metrics": "a large count and ones"}),
    "scored-before-pads": Defect("train_sixth:ScoredBeforePads", {"outputs.scores": "special tokens at the end"}),
    "reset-rounds": Defect("train_sixth:ResetRounds", {"step.reset": "a reset made, bfloat16"}),
}
SHARDING_SIXTH = {
    "seconds-without-proof": Defect(
        "sharding_sixth:SecondsWithoutProof", {"sync.report.whole": "of those that passed"}
    ),
    "ways-by-alphabet": Defect("sharding_sixth:WaysByAlphabet", {"sync.report.whole": "transports, of"}),
    "one-name-for-all": Defect("sharding_sixth:OneNameForAll", {"sync.report.whole": "names of an earlier sync"}),
}

"""Engines of the families that the fifth blind trial showed to be looked at too little."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_FIFTH = {
    "one-row-more": Defect("rollout_fifth:OneRowMore", {"model.tied": "samples at once"}),
    "ended-rows-count": Defect("rollout_fifth:EndedRowsCount", {"num_decoded.exact": "unlike lengths"}),
    "window-too-wide": Defect("rollout_fifth:WindowTooWide", {"model.configuration": "wrong samples"}),
    "filters-of-the-folder": Defect("rollout_fifth:FiltersOfTheFolder", {"model.configuration": "something else"}),
    "temporary-folder-stays": Defect("rollout_fifth:TemporaryFolderStays", {"close": "temporary folder"}),
}
TRAIN_FIFTH = {
    "passes-add-up": Defect("train_fifth:PassesAddUp", {"objective.given": "not their call's"}),
    "maxima-stay": Defect("train_fifth:MaximaStay", {"objective.metrics": "of an earlier call"}),
    "groups-by-attribute": Defect("train_fifth:GroupsByAttribute", {"objective.whole_groups": "not asked for"}),
    "heads-in-half": Defect("train_fifth:HeadsInHalf", {"model.bfloat16": "faults, values"}),
    "lacking-moments-are-zero": Defect("train_fifth:LackingMomentsAreZero", {"checkpoint.missing_file": "faults"}),
    "saved-in-a-thread": Defect("train_fifth:SavedInAThread", {"checkpoint.folder": "`save_checkpoint` returned"}),
    "optimizer-folder-stays": Defect("train_fifth:OptimizerFolderStays", {"close": "temporary folder"}),
}

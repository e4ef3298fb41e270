"""The engines of the second blind trial, and the requirements that each must fail."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_TRIAL = {
    "unfiltered-late": Defect("rollout_trial:UnfilteredLate", {"length.responses": "left out by the filters"}),
    "mirrored-noise": Defect("rollout_trial:MirroredNoise", {"noise": "samples and 0 steps apart"}),
    "mirrored-steps": Defect("rollout_trial:MirroredSteps", {"noise": "steps apart"}),
    "id-in-seed": Defect("rollout_trial:IdInSeed", {"continue.seed": "an interruption changed"}),
    "last-one-untempered": Defect("rollout_trial:LastOneUntempered", {"company.stops": "log-prob"}),
    "less-room-behind-long": Defect("rollout_trial:LessRoomBehindLong", {"length.responses": "64 tokens"}),
    "many-ignore-stops": Defect("rollout_trial:ManyIgnoreStops", {"company.stops": "where something stopped it"}),
    "index-of-a-thousand": Defect("rollout_trial:IndexOfAThousand", {"seed.values": "samples of one seed"}),
    "aborted-without-log-probs": Defect("rollout_trial:AbortedWithoutLogProbs", {"abort.exact": "log-prob 0"}),
    "pause-drops-filters": Defect("rollout_trial:PauseDropsFilters", {"pause": "wrong samples"}),
    "thread-for-sleep": Defect("rollout_trial:ThreadForSleep", {"handles": "threads that"}),
    "file-for-abort": Defect("rollout_trial:FileForAbort", {"handles": "open files that"}),
    "count-of-version": Defect("rollout_trial:CountOfVersion", {"num_decoded": "an abort and an update"}),
    "given-are-counted": Defect("rollout_trial:GivenAreCounted", {"num_decoded": "that were given"}),
    "two-runs-at-most": Defect("rollout_trial:TwoRunsAtMost", {"versions.runs": "log-probs of other weights"}),
    "first-receipt-again": Defect("rollout_trial:FirstReceiptAgain", {"update.each_tensor": "fingerprint differs"}),
    "bytes-are-elements": Defect("rollout_trial:BytesAreElements", {"update.served": "bytes"}),
    "layout-lacks-norm": Defect("rollout_trial:LayoutLacksNorm", {"layout": "model.norm.weight"}),
    "stop-string-cut": Defect("rollout_trial:StopStringCut", {"stop_strings": "end wrongly"}),
    "stop-strings-of-any-case": Defect("rollout_trial:StopStringsOfAnyCase", {"stop_strings": "end wrongly"}),
    "end-first-is-dropped": Defect("rollout_trial:EndFirstIsDropped", {"company.any_token": "first'"}),
    "temperature-of-tenths": Defect(
        "rollout_trial:TemperatureOfTenths", {"distribution.responses": "deviations of log-probability"}
    ),
    "aborts-by-beginning": Defect("rollout_trial:AbortsByBeginning", {"abort": "b1"}),
    "unknown-is-an-error": Defect("rollout_trial:UnknownIsAnError", {"abort": "nobody"}),
    "narrow-ids": Defect("rollout_trial:NarrowIds", {"company.kinds": "int16"}),
    "wide-log-probs": Defect("rollout_trial:WideLogProbs", {"company.kinds": "float64"}),
    "sorted-at-the-end": Defect(
        "rollout_trial:SortedAtTheEnd", {"company.as_they_finish": "when the first sample came"}
    ),
}
TRAIN_TRIAL = {
    "last-of-long-unread": Defect("train_trial_more:LastOfLongUnread", {"length.outputs": "largest difference"}),
    "third-call-dropped": Defect("train_trial_more:ThirdCallDropped", {"step.clipping_calls": "largest difference"}),
    "clips-a-little-more": Defect("train_trial_more:ClipsALittleMore", {"step.clipping": "largest difference"}),
    "warms-up-early": Defect("train_trial_more:WarmsUpEarly", {"step.schedule": "difference of the rate"}),
    "begins-again-at-the-end": Defect(
        "train_trial_more:BeginsAgainAtTheEnd", {"step.schedule": "difference of the rate"}
    ),
    "floor-is-zero": Defect("train_trial_more:FloorIsZero", {"step.schedule": "difference of the rate"}),
    "loss-of-the-last": Defect("train_trial_more:LossOfTheLast", {"gradient.micro_batches": "difference of loss"}),
    "maxima-added-up": Defect("train_trial_more:MaximaAddedUp", {"objective.metrics": "difference of the maximum"}),
    "one-micro-batch": Defect("train_trial_more:OneMicroBatch", {"gradient.micro_batches": "passes of 1 row"}),
    "forward-in-half": Defect("train_trial_more:ForwardInHalf", {"outputs.log_probs": "bfloat16"}),
    "gradient-mode-left": Defect(
        "train_trial_more:GradientModeLeft", {"steady.forward": "gradients is left False by look"}
    ),
    "export-cuts-off": Defect("train_trial_more:ExportCutsOff", {"export.bfloat16": "difference of weights"}),
    "moments-in-half": Defect("train_trial_more:MomentsInHalf", {"checkpoint.resume": "difference of weights"}),
    "says-its-node-only": Defect("train_trial_more:SaysItsNodeOnly", {"layout": "node:pid"}),
    "forward-not-so-cold": Defect("train_trial_more:ForwardNotSoCold", {"outputs.unlikely": "at temperature 0.03"}),
    "head-alone": Defect("train_trial_more:HeadAlone", {"gradient.values": "difference of loss"}),
    "late-tokens-do-not-learn": Defect("train_trial_more:LateTokensDoNotLearn", {"gradient": "difference of loss"}),
    "norms-not-measured": Defect("train_trial_more:NormsNotMeasured", {"gradient": "gradient norm"}),
    "lr-of-the-next": Defect("train_trial_more:LrOfTheNext", {"step.schedule": "difference of the rate"}),
    "cannot-save-twice": Defect("train_trial_more:CannotSaveTwice", {"export.again": "File exists"}),
    "entropy-of-the-likeliest": Defect(
        "train_trial_more:EntropyOfTheLikeliest", {"objective.both": "difference of loss"}
    ),
}
SHARDING_TRIAL = {
    "single-numbers-lost": Defect("sharding_trial:SingleNumbersLost", {"plan.cover": "scale"}),
    "small-fingerprints": Defect("sharding_trial:SmallFingerprints", {"sync.proven": "keeps one element"}),
    "weights-only": Defect("sharding_trial:WeightsOnly", {"sync.proven": "in each other's place"}),
    "first-few": Defect("sharding_trial:FirstFew", {"sync.proven": "keeps one tensor"}),
    "change-is-an-error": Defect("sharding_trial:ChangeIsAnError", {"sync.changed": "weights changed that should not"}),
    "says-the-version-before": Defect("sharding_trial:SaysTheVersionBefore", {"sync.report": "version"}),
    "all-has-moved": Defect("sharding_trial:AllHasMoved", {"sync.report": "bytes that crossed"}),
    "bound-is-what-moved": Defect("sharding_trial:BoundIsWhatMoved", {"plan.bytes": "lower bound"}),
    "ways-unsaid": Defect("sharding_trial:WaysUnsaid", {"sync.report": "transports"}),
    "last-rounds-together": Defect("sharding_trial:LastRoundsTogether", {"plan.bytes": "largest round"}),
    "counts-transfers": Defect("sharding_trial:CountsTransfers", {"sync.report": "tensors"}),
    "seconds-are-milliseconds": Defect(
        "sharding_trial:SecondsAreMilliseconds", {"sync.report": "seconds, of those that passed"}
    ),
    "pairs-of-replicas": Defect(
        "sharding_trial:PairsOfReplicas", {"sync.proven": "replica 1 of 4 keeps all as it was"}
    ),
}

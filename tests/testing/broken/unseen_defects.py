"""The engines of the third blind trial that the requirements missed, and the most telling of the others."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_UNSEEN = {
    # Missed: what the requirements behind them look at is the family of each, and not the one case.
    "short-stop-window": Defect("rollout_unseen:ShortStopWindow", {"company.stops": "goes on behind a stop string"}),
    "seed-mixes-max-tokens": Defect("rollout_unseen:SeedMixesMaxTokens", {"seed.alone": "with what does not count"}),
    "global-generator": Defect("rollout_unseen:GlobalGenerator", {"random_state": "generators that were moved on"}),
    "recompute-forgets": Defect("rollout_unseen:RecomputeForgetsWhatCame", {"events.update": "of neither"}),
    "stale-prompts-shared": Defect(
        "rollout_unseen:StalePromptsShared", {"events.keep_cache": "did not go on with what they had"}
    ),
    "aborted-index-from-zero": Defect("rollout_unseen:AbortedIndexFromZero", {"events.abort": "wrong samples"}),
    "version-of-the-queue": Defect("rollout_unseen:VersionOfTheQueue", {"abort.versions": "of another version"}),
    "eight-steps-a-turn": Defect("rollout_unseen:EightStepsATurn", {"event_loop.turns": "turns of the event loop"}),
    "left-while-paused": Defect("rollout_unseen:LeftWhilePaused", {"abandoned.paused": "requests run"}),
    "queued-before-checked": Defect("rollout_unseen:QueuedBeforeChecked", {"refusals.nothing": "that came later"}),
    "fuller-than-full": Defect("rollout_unseen:FullerThanFull", {"kv_used": "answers that are no share"}),
    "source-errors-renamed": Defect("rollout_unseen:SourceErrorsRenamed", {"update.source_raises": "did not come out"}),
    # Caught.
    "compaction-keeps-sampling": Defect(
        "rollout_unseen:CompactionKeepsSampling", {"model.tied": "difference of log-probs"}
    ),
    "slots-per-call": Defect("rollout_unseen:SlotsPerCall", {"max_running": "samples at once, three calls"}),
    "groups-at-once": Defect("rollout_unseen:GroupsAtOnce", {"max_running": "samples at once, one call"}),
    "admits-while-paused": Defect("rollout_unseen:AdmitsWhilePaused", {"pause.idle": "tokens that came in the pause"}),
    "bytes-as-they-came": Defect("rollout_unseen:BytesAsTheyCame", {"update.receipts": "bytes, pieces of bfloat16"}),
    "noise-of-the-clock": Defect("rollout_unseen:NoiseOfTheClock", {"noise.lifetime": "distinct samples"}),
    "pad-is-masked": Defect("rollout_unseen:PadIsMasked", {"company.kinds": "log-prob"}),
    "stop-string-at-the-limit": Defect(
        "rollout_unseen:StopStringAtTheLimitIsLength", {"company.kinds": "where something stopped it"}
    ),
    "aborted-without-dtypes": Defect("rollout_unseen:AbortedWithoutDtypes", {"abort.at_once": "float64"}),
    "a-run-per-resume": Defect("rollout_unseen:ARunPerResume", {"events.pause": "do not add up"}),
    "host-copy-once": Defect("rollout_unseen:HostCopyOnce", {"sleep.kept": "wrong samples, woken"}),
    "counts-elements": Defect("rollout_unseen:CountsElements", {"update.damaged": "a piece came twice"}),
}
TRAIN_UNSEEN = {
    "infinity-passes": Defect(
        "train_unseen:InfinityPasses", {"step.infinite": "a step with a gradient that is not finite"}
    ),
    "cosine-comes-back": Defect(
        "train_unseen:CosineComesBack", {"step.schedule_end": "difference of the rate, cosine"}
    ),
    "layout-says-what-computes": Defect("train_unseen:LayoutSaysWhatComputes", {"layout.kinds": "faults, bfloat16"}),
    "export-rounds-the-masters": Defect("train_unseen:ExportRoundsTheMasters", {"steady.kinds": "weights, bfloat16"}),
    "saves-behind-your-back": Defect("train_unseen:SavesBehindYourBack", {"checkpoint.on_disk": "returned"}),
    "all-the-cores": Defect("train_unseen:AllTheCores", {"place.threads": "threads of torch"}),
    "copy-is-stale": Defect("train_unseen:CopyIsStaleAfterLoad", {"checkpoint.bfloat16": "difference of weights"}),
    "beside-the-folder": Defect("train_unseen:BesideTheFolder", {"checkpoint.only_reads": "files beside it"}),
    "no-limit-no-check": Defect("train_unseen:NoLimitNoCheck", {"step.skipped": "skipped"}),
    "reset-keeps-betas": Defect("train_unseen:ResetKeepsBetas", {"step.reset": "gradient norm"}),
    "earlier-calls-stay": Defect("train_unseen:EarlierCallsStay", {"objective.raises": "gradient norm"}),
}
RANKS_UNSEEN = {
    "random-state-of-rank-zero": Defect("ranks_unseen:RandomStateOfRankZero", {"ranks.random_state": "numbers drawn"}),
    "seed-of-the-world": Defect("ranks_unseen:SeedOfTheWorld", {"ranks.initial": "difference from one rank, random"}),
}
SHARDING_UNSEEN = {
    "any-transport": Defect("sharding_unseen:AnyTransport", {"plan.preference": "other than the first"}),
    "failed-sync-counts": Defect("sharding_unseen:FailedSyncCounts", {"sync.unchanged": "asked again after"}),
    "false-is-none": Defect("sharding_unseen:FalseIsNone", {"sync.changed": "no change expected"}),
}

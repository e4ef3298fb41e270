"""The broken rollout engines by family, and the requirements that each must fail."""

from __future__ import annotations

from broken.defect import Defect
from broken.state_defects import ROLLOUT_FOLDERS, ROLLOUT_NESTED, ROLLOUT_STATES
from rlsdk.interfaces import Capability

ROLLOUT_CAPABILITIES = frozenset(
    {
        Capability.SEED,
        Capability.MIN_P,
        Capability.STOP_STRINGS,
        Capability.ABORT,
        Capability.SLEEP,
        Capability.PARTIAL_ROLLOUT,
        Capability.STALE_CACHE,
    }
)

UPDATES = ("update.served", "update.no_stale_cache", "update.pieces", "update.failed", "update.first", "sleep.update")
"""Requirements that look at log-probs after an update."""
ROLLOUT = {
    "narrow-top-p": Defect("rollout_distribution:NarrowTopP", {"distribution.filtered": "p-value"}),
    "flat-draws": Defect("rollout_distribution:FlatDraws", {"distribution.fine": "p-value"}),
    "greedy-is-warm": Defect("rollout_distribution:GreedyIsWarm", {"greedy": "largest difference of log-probs"}),
    "min-p-ignored": Defect("rollout_distribution:MinPIgnored", {"min_p": "below min-p"}),
    "warmer-later": Defect("rollout_distribution:WarmerLater", {"distribution.responses": "left out by the filters"}),
    "cooler-late": Defect("rollout_distribution:CoolerLate", {"length.responses": "deviations of log-probability"}),
    "temperature-floor": Defect("rollout_distribution:TemperatureFloor", {"distribution.responses": "temperature 0.1"}),
    "temperature-ceiling": Defect(
        "rollout_distribution:TemperatureCeiling", {"distribution.responses": "temperature 2"}
    ),
    "cold-is-greedy": Defect("rollout_distribution:ColdIsGreedy", {"distribution.responses": "temperature 0.1"}),
    "least-temperature": Defect("rollout_distribution:LeastTemperature", {"distribution.cold": "wrong samples"}),
    "min-p-first": Defect("rollout_distribution:MinPFirst", {"distribution.responses": "min-p"}),
    "top-p-first": Defect("rollout_distribution:TopPFirst", {"distribution.responses": "top-p"}),
    "top-p-one-more": Defect("rollout_distribution:TopPOneMore", {"distribution.responses": "left out by the filters"}),
    "top-p-one-less": Defect(
        "rollout_distribution:TopPOneLess", {"distribution.responses": "deviations of log-probability"}
    ),
    "top-k-one-more": Defect("rollout_distribution:TopKOneMore", {"distribution.responses": "left out by the filters"}),
    "top-p-of-all": Defect("rollout_distribution:TopPOfAll", {"distribution.responses": "top-k, then top-p"}),
    "dislikes-repeats": Defect(
        "rollout_distribution:DislikesRepeats", {"distribution.responses": "left out by the filters"}
    ),
    "end-later": Defect("rollout_distribution:EndLater", {"distribution.sequences": "p-value of the end"}),
    "no-rare-tokens": Defect(
        "rollout_distribution:NoRareTokens", {"distribution.responses": "deviations of log-probability"}
    ),
    "greedy-in-company": Defect("rollout_distribution:GreedyInCompany", {"company.kinds": "is not the most probable"}),
    "tempered-twice": Defect(
        "rollout_distribution:TemperedTwice", {"distribution.responses": "deviations of log-probability"}
    ),
    "top-p-near-one": Defect("rollout_distribution:TopPNearOne", {"distribution.responses": "left out by the filters"}),
    "top-k-20": Defect("rollout_distribution:TopK20", {"distribution.responses": "top-k 60"}),
    "min-p-tempered": Defect("rollout_distribution:MinPTempered", {"distribution.responses": ""}),
    "greedy-almost": Defect("rollout_distribution:GreedyAlmost", {"distribution.greedy": "is not the most probable"}),
    "top-k-capped": Defect("rollout_distribution:TopKCapped", {"distribution.responses": ""}),
    "temperature-clamped": Defect("rollout_distribution:TemperatureClamped", {"distribution.responses": "log-prob"}),
    "pad-never-drawn": Defect(
        "rollout_distribution:PadNeverDrawn", {"distribution.special": "p-value of special token"}
    ),
    "unfiltered-late": Defect("rollout_distribution:UnfilteredLate", {"length.responses": "left out by the filters"}),
    "temperature-of-tenths": Defect(
        "rollout_distribution:TemperatureOfTenths", {"distribution.responses": "deviations of log-probability"}
    ),
    "pad-is-masked": Defect("rollout_distribution:PadIsMasked", {"company.kinds": "log-prob"}),
    "seed-ignored": Defect(
        "rollout_noise:SeedIgnored",
        {
            "seed": "samples that changed in company",
            "abort": "not the beginning of what they would have been",
            "pause": "samples that a pause changed",
            "first_sample": "differ from the group's",
            "continue.seed": "an interruption changed",
        },
    ),
    "seed-for-all": Defect("rollout_noise:SeedForAll", {"no_seed": "samples that came again"}),
    "group-numbered": Defect(
        "rollout_noise:GroupNumbered", {"first_sample": "differ from the group's", "continue.seed": "changed"}
    ),
    "seed-restarts": Defect(
        "rollout_noise:SeedRestarts", {"continue.seed": "an interruption changed", "continue.stop_strings": "not found"}
    ),
    "coarse-noise": Defect("rollout_noise:CoarseNoise", {"distribution.fine": "p-value"}),
    "half-noise": Defect("rollout_noise:HalfNoise", {"distribution.fine": "p-value"}),
    "noise-twice": Defect("rollout_noise:NoiseTwice", {"noise": "1 steps apart", "noise.seeds": "steps apart"}),
    "noise-in-a-ring": Defect("rollout_noise:NoiseInARing", {"length.responses": "128 steps apart"}),
    "noise-moves-on": Defect("rollout_noise:NoiseMovesOn", {"noise": "steps apart", "noise.seeds": "steps apart"}),
    "samples-in-pairs": Defect(
        "rollout_noise:SamplesInPairs", {"noise": "samples", "company.many": "distinct samples"}
    ),
    "seed-plus-index": Defect(
        "rollout_noise:SeedPlusIndex", {"noise.seeds": "depend on others", "seed.values": "the same tokens"}
    ),
    "seed-of-32-bits": Defect("rollout_noise:SeedOf32Bits", {"seed.values": "the same tokens"}),
    "seed-as-float": Defect("rollout_noise:SeedAsFloat", {"seed.values": "the same tokens"}),
    "seed-zero": Defect("rollout_noise:SeedZero", {"seed.values": "did not come again"}),
    "one-noise-for-call": Defect("rollout_noise:OneNoiseForCall", {"noise": "depend on others"}),
    "one-noise-for-two-calls": Defect("rollout_noise:OneNoiseForFour", {"noise": "depend on others"}),
    "seeded-company": Defect("rollout_noise:SeededCompany", {"company.kinds": "distinct samples without a seed"}),
    "same-again-from-32": Defect("rollout_noise:SameAgainFrom32", {"company.many": "distinct samples"}),
    "replicas-share-noise": Defect("rollout_noise:ReplicasShareNoise", {"replicas": "another replica's"}),
    "noise-of-the-step": Defect("rollout_noise:NoiseOfTheStep", {"company.alone": "company changed"}),
    "sleep-begins-noise": Defect("rollout_noise:SleepBeginsNoise", {"noise.lifetime": "distinct samples"}),
    "update-begins-noise": Defect("rollout_noise:UpdateBeginsNoise", {"noise.lifetime": "distinct samples"}),
    "sleep-changes-seeds": Defect("rollout_noise:SleepChangesSeeds", {"sleep.kept": "sleep changed"}),
    "seeds-first-only": Defect("rollout_noise:SeedsFirstOnly", {"company.alone": "company changed"}),
    "eight-numbers": Defect("rollout_noise:EightNumbers", {"company.many": "distinct samples"}),
    "late-noise-shared": Defect("rollout_noise:LateNoiseShared", {"length.responses": "steps apart"}),
    "pause-skips-noise": Defect("rollout_noise:PauseSkipsNoise", {"pause": "a pause changed"}),
    "keeps-models": Defect("rollout_resources:KeepsModels", {"close": "share of the weights' memory"}),
    "resume-forgets-aborts": Defect("rollout_aborts:ResumeForgetsAborts", {"abort.paused": "right behind it"}),
    "resumes-are-counted": Defect("rollout_pauses:ResumesAreCounted", {"pause.idle": "one resume did not continue"}),
    "even-ranks-share-noise": Defect("rollout_noise:EvenRanksShareNoise", {"replicas": "depend on another replica"}),
    "wake-begins-calls": Defect("rollout_noise:WakeBeginsCalls", {"noise.lifetime": "distinct samples"}),
    "calls-share-noise": Defect("rollout_noise:CallsShareNoise", {"noise": "of calls at the same time"}),
    "version-in-seed": Defect("rollout_noise:VersionInSeed", {"pause.same_weights": "samples that it changed"}),
    "size-in-seed": Defect("rollout_noise:SizeInSeed", {"replicas": "another replica changed"}),
    "run-in-seed": Defect("rollout_noise:RunInSeed", {"update.first": "the seed of the run changed"}),
    "mirrored-noise": Defect("rollout_noise:MirroredNoise", {"noise": "samples and 0 steps apart"}),
    "mirrored-steps": Defect("rollout_noise:MirroredSteps", {"noise": "steps apart"}),
    "id-in-seed": Defect("rollout_noise:IdInSeed", {"continue.seed": "an interruption changed"}),
    "index-of-a-thousand": Defect("rollout_noise:IndexOfAThousand", {"seed.values": "samples of one seed"}),
    "seed-mixes-max-tokens": Defect("rollout_noise:SeedMixesMaxTokens", {"seed.alone": "with what does not count"}),
    "noise-of-the-clock": Defect("rollout_noise:NoiseOfTheClock", {"noise.lifetime": "distinct samples"}),
    "global-generator": Defect("rollout_noise:GlobalGenerator", {"random_state": "generators that were moved on"}),
    "log-prob-before-temperature": Defect(
        "rollout_log_probs:BeforeTemperature", {"log_probs.temperature": "temperature 0.6"}
    ),
    "log-prob-after-filters": Defect(
        "rollout_log_probs:AfterFilters", {"log_probs.filters": "largest difference with top-k"}
    ),
    "rare-log-probs": Defect("rollout_log_probs:RareLogProbs", {"company.kinds": "log-prob"}),
    "drifts-late": Defect("rollout_log_probs:DriftsLate", {"length.responses": "log-prob 257"}),
    "one-late-behind-128": Defect("rollout_log_probs:OneLateBehind128", {"length.responses": "log-prob 129"}),
    "pages-log-probs": Defect("rollout_log_probs:PagesLogProbs", {"length.responses": "log-prob 64"}),
    "half-log-probs": Defect("rollout_log_probs:HalfLogProbs", {"length.responses": "log-prob"}),
    "log-prob-floor": Defect("rollout_log_probs:LogProbFloor", {"company.any_token": "log-prob"}),
    "half-in-big-batch": Defect("rollout_log_probs:HalfInBigBatch", {"replicas": "log-prob"}),
    "rounded-log-probs": Defect("rollout_log_probs:RoundedLogProbs", {"model.tied": "that are bfloat16 numbers"}),
    "last-one-untempered": Defect("rollout_log_probs:LastOneUntempered", {"company.stops": "log-prob"}),
    "aborted-without-log-probs": Defect("rollout_log_probs:AbortedWithoutLogProbs", {"abort.exact": "log-prob 0"}),
    "wide-log-probs": Defect("rollout_log_probs:WideLogProbs", {"company.kinds": "float64"}),
    "stop-token-dropped": Defect(
        "rollout_stopping:StopTokenDropped", {"stop_tokens": "without a stop token at its end"}
    ),
    "stops-by-itself": Defect(
        "rollout_stopping:StopsByItself",
        {
            "stop_tokens.only": "responses that ended early",
            "more_than_slots": "another request's length",
            "continue": "another length than 9",
            "continue.seed": "an interruption changed",
        },
    ),
    "one-token-short": Defect(
        "rollout_stopping:OneTokenShort", {"max_tokens": "8 tokens", "more_than_slots": "another request's length"}
    ),
    "stop-strings-ignored": Defect(
        "rollout_stopping:StopStringsIgnored",
        {"stop_strings": "goes on behind one of", "continue.stop_strings": "not found"},
    ),
    "given-again": Defect(
        "rollout_stopping:GivenAgain",
        {"continue": "another length than 9", "continue.seed": "changed", "continue.stop_strings": "not found"},
    ),
    "given-uncounted": Defect(
        "rollout_stopping:GivenUncounted",
        {"continue": "another length than 9", "continue.seed": "an interruption changed"},
    ),
    "stops-of-others": Defect("rollout_stopping:StopsOfOthers", {"company.kinds": "finish reason stop"}),
    "first-never-stops": Defect("rollout_stopping:FirstNeverStops", {"company.stops": "where something stopped it"}),
    "length-before-stop": Defect("rollout_stopping:LengthBeforeStop", {"company.stops": "where something stopped it"}),
    "stops-by-prompt": Defect("rollout_stopping:StopsByPrompt", {"company.stops": "finish reason stop"}),
    "stops-by-one-token": Defect("rollout_stopping:StopsByOneToken", {"company.stops": "goes on behind a stop string"}),
    "limit-of-batch": Defect("rollout_stopping:LimitOfBatch", {"company.kinds": "expected"}),
    "room-less-one": Defect("rollout_stopping:RoomLessOne", {"length.limits": "tokens, finish reason length"}),
    "two-at-least": Defect("rollout_stopping:TwoAtLeast", {"length.limits": "its limit is 1"}),
    "stops-at-room": Defect("rollout_stopping:StopsAtRoom", {"length.limits": "finish reason stop"}),
    "small-limits": Defect("rollout_stopping:SmallLimits", {"length.limits": "expected"}),
    "four-stops": Defect("rollout_stopping:FourStops", {"company.stops": "where something stopped it"}),
    "one-stop-string": Defect("rollout_stopping:OneStopString", {"stop_strings": "goes on behind one of"}),
    "first-of-group-short": Defect("rollout_stopping:LimitsTheFirstOfGroup", {"company.kinds": "expected"}),
    "stops-of-48-rows": Defect("rollout_stopping:StopsOf48Rows", {"replicas": "many that stop"}),
    "less-room-behind-long": Defect("rollout_stopping:LessRoomBehindLong", {"length.responses": "64 tokens"}),
    "many-ignore-stops": Defect("rollout_stopping:ManyIgnoreStops", {"company.stops": "where something stopped it"}),
    "stop-string-cut": Defect("rollout_stopping:StopStringCut", {"stop_strings": "end wrongly"}),
    "stop-strings-of-any-case": Defect("rollout_stopping:StopStringsOfAnyCase", {"stop_strings": "end wrongly"}),
    "short-stop-window": Defect("rollout_stopping:ShortStopWindow", {"company.stops": "goes on behind a stop string"}),
    "stop-string-at-the-limit": Defect(
        "rollout_stopping:StopStringAtTheLimitIsLength", {"company.kinds": "where something stopped it"}
    ),
    "prompt-cut": Defect("rollout_prompts:PromptCut", {"longest_prompt": "largest difference"}),
    "nothing-refused": Defect("rollout_prompts:NothingRefused", {"refusals": "accepted"}),
    "window-256": Defect("rollout_prompts:Window256", {"length.prompts": "log-prob 0"}),
    "forgets-at-pages": Defect("rollout_prompts:ForgetsAtPages", {"length.prompts": "log-prob 0"}),
    "begins-twice": Defect("rollout_prompts:BeginsTwice", {"length.prompts": "sample 'p1'/0: log-prob"}),
    "leaks-into-neighbour": Defect("rollout_prompts:LeaksIntoNeighbour", {"length.prompts": "log-prob 0"}),
    "shares-prefix": Defect("rollout_prompts:SharesPrefix", {"length.prompts": "log-prob 0"}),
    "forgets-long-response": Defect("rollout_prompts:ForgetsLongResponse", {"length.continued": "log-prob 0"}),
    "pads-masked": Defect("rollout_prompts:PadsMasked", {"company.any_token": "log-prob"}),
    "cut-at-end": Defect("rollout_prompts:CutAtEnd", {"company.any_token": "log-prob"}),
    "keyed-by-tail": Defect("rollout_prompts:KeyedByTail", {"company.like_prompts": "log-prob"}),
    "end-first-is-dropped": Defect("rollout_prompts:EndFirstIsDropped", {"company.any_token": "first'"}),
    "one-row-more": Defect("rollout_models:OneRowMore", {"model.tied": "samples at once"}),
    "window-too-wide": Defect("rollout_models:WindowTooWide", {"model.configuration": "wrong samples"}),
    "filters-of-the-folder": Defect("rollout_models:FiltersOfTheFolder", {"model.configuration": "something else"}),
    "norms-of-old-weights": Defect("rollout_models:NormsOfOldWeights", {"model.capped": "after an update"}),
    "logits-uncapped": Defect("rollout_models:LogitsUncapped", {"model.capped": "wrong samples, capped logits"}),
    "tied-unsaid": Defect("rollout_models:TiedUnsaid", {"model.tied": "other names of the tied tensor"}),
    "served-as-float32": Defect("rollout_models:ServedAsFloat32", {"model.tied": "bytes"}),
    "positions-unscaled": Defect("rollout_models:PositionsUnscaled", {"model.scaled": "wrong samples, scaled"}),
    "logits-unscaled": Defect("rollout_models:LogitsUnscaled", {"model.scaled": "wrong samples, scaled"}),
    "chunks-of-1024": Defect("rollout_models:ChunksOf1024", {"model.scaled": "behind 4150"}),
    "positions-in-half": Defect("rollout_models:PositionsInHalf", {"model.tied": "mean difference behind"}),
    "sums-in-half": Defect("rollout_models:SumsInHalf", {"model.tied": "deviations of their number"}),
    "compaction-keeps-sampling": Defect(
        "rollout_models:CompactionKeepsSampling", {"model.tied": "difference of log-probs"}
    ),
    "rows-swapped": Defect("rollout_batches:RowsSwapped", {"more_than_slots": "another request's length"}),
    "one-sample-twice": Defect("rollout_batches:OneSampleTwice", {"samples": "came 2 times"}),
    "top-k-of-batch": Defect("rollout_batches:TopKOfBatch", {"company.kinds": "left out by the filters"}),
    "first-ones-temperature": Defect("rollout_batches:FirstOnesTemperature", {"company.kinds": "log-prob"}),
    "filters-of-neighbour": Defect("rollout_batches:FiltersOfNeighbour", {"company.kinds": "left out by the filters"}),
    "prompts-merged": Defect("rollout_batches:PromptsMerged", {"company.many": "distinct samples"}),
    "last-twice": Defect("rollout_batches:LastTwice", {"company.many": "came 2 times"}),
    "majority-is-greedy": Defect("rollout_batches:MajorityIsGreedy", {"company.minority": "most are greedy"}),
    "narrow-ids": Defect("rollout_batches:NarrowIds", {"company.kinds": "int16"}),
    "one-call-at-a-time": Defect("rollout_calls:OneCallAtATime", {"calls_join": "before a long one that had begun"}),
    "loop-of-its-own": Defect("rollout_calls:LoopOfItsOwn", {"event_loop": "asyncio.run"}),
    "names-run-together": Defect("rollout_calls:NamesRunTogether", {"company.names": "came 2 times"}),
    "all-at-the-end": Defect("rollout_calls:AllAtTheEnd", {"company.as_they_finish": "behind a long one"}),
    "one-buffer": Defect("rollout_calls:OneBuffer", {"company.as_they_finish": "changed after"}),
    "no-gradient": Defect("rollout_calls:NoGradient", {"company.manners": "gradients"}),
    "nothing-fails": Defect("rollout_calls:NothingFails", {"company.names": "empty"}),
    "joins-without-first": Defect("rollout_calls:JoinsWithoutFirst", {"company.staggered": "log-prob"}),
    "never-withdraws": Defect("rollout_calls:NeverWithdraws", {"abandoned": "came while"}),
    "left-takes-all": Defect("rollout_calls:LeftTakesAll", {"abandoned": "wrong samples of another call"}),
    "slots-left": Defect("rollout_calls:SlotsLeft", {"abandoned": "samples at once afterwards"}),
    "drops-for-slow-callers": Defect("rollout_calls:DropsForSlowCallers", {"company.slow_caller": "is missing"}),
    "slow-callers-hold": Defect("rollout_calls:SlowCallersHold", {"company.slow_caller": ""}),
    "takes-turns": Defect("rollout_calls:TakesTurns", {"company.staggered": "before long ones"}),
    "runs-more": Defect("rollout_calls:RunsMore", {"max_running": "samples at once, one call"}),
    "looks-wait": Defect("rollout_calls:LooksWait", {"looks.cheap": "that an update held up"}),
    "never-turns": Defect("rollout_calls:NeverTurns", {"event_loop.turns": "turns of the event loop"}),
    "shared-tokens": Defect("rollout_calls:SharedTokens", {"outputs.own": "wrong samples, call"}),
    "sorts-requests": Defect("rollout_calls:SortsRequests", {"requests.own": "has no attribute 'sort'"}),
    "refuses-late": Defect("rollout_calls:RefusesLate", {"refusals.nothing": "samples of a call with"}),
    "pauses-at-home": Defect("rollout_calls:PausesAtHome", {"threads": "tokens that came in a pause"}),
    "other-errors": Defect("rollout_calls:OtherErrors", {"initialize.refusals": "OSError"}),
    "sorted-at-the-end": Defect(
        "rollout_calls:SortedAtTheEnd", {"company.as_they_finish": "when the first sample came"}
    ),
    "groups-at-once": Defect("rollout_calls:GroupsAtOnce", {"max_running": "samples at once, one call"}),
    "eight-steps-a-turn": Defect("rollout_calls:EightStepsATurn", {"event_loop.turns": "turns of the event loop"}),
    "slots-per-call": Defect("rollout_calls:SlotsPerCall", {"max_running": "samples at once, three calls"}),
    "left-while-paused": Defect("rollout_calls:LeftWhilePaused", {"abandoned.paused": "requests run"}),
    "queued-before-checked": Defect("rollout_calls:QueuedBeforeChecked", {"refusals.nothing": "that came later"}),
    "counts-calls": Defect("rollout_counts:CountsCalls", {"num_decoded": "some had come and not all"}),
    "ended-rows-count": Defect("rollout_counts:EndedRowsCount", {"num_decoded.exact": "unlike lengths"}),
    "counts-prompts": Defect("rollout_counts:CountsPrompts", {"num_decoded.exact": "more than came, long prompts"}),
    "kv-of-last-call": Defect("rollout_counts:KvOfLastCall", {"kv_used": "share behind few"}),
    "kv-in-percent": Defect("rollout_counts:KvInPercent", {"kv_used": "answers that are no share"}),
    "count-of-version": Defect("rollout_counts:CountOfVersion", {"num_decoded": "an abort and an update"}),
    "given-are-counted": Defect("rollout_counts:GivenAreCounted", {"num_decoded": "that were given"}),
    "fuller-than-full": Defect("rollout_counts:FullerThanFull", {"kv_used": "answers that are no share"}),
    "abort-loses": Defect("rollout_aborts:AbortLoses", {"abort": "is missing"}),
    "abort-absent": Defect(
        "rollout_aborts:AbortAbsent",
        {
            "registration.capabilities": "abort is claimed",
            "abort": "does not support",
            "event_loop": "does not support",
        },
    ),
    "slots-lost": Defect("rollout_aborts:SlotsLost", {"abort.slots": "samples at once afterwards"}),
    "abort-waits-for-resume": Defect("rollout_aborts:AbortWaitsForResume", {"abort.paused": "came in the pause"}),
    "nothing-is-all": Defect("rollout_aborts:NothingIsAll", {"abort.exact": "behind an abort of nothing"}),
    "abort-speaks-of-next": Defect("rollout_aborts:AbortSpeaksOfNext", {"abort.exact": "began behind an abort"}),
    "waiting-stay": Defect("rollout_aborts:WaitingStay", {"abort.exact": "samples that were aborted"}),
    "abort-is-length": Defect("rollout_aborts:AbortIsLength", {"abort.exact": "0 tokens, finish reason length"}),
    "aborted-short": Defect("rollout_aborts:AbortedShort", {"abort.exact": "log-probs"}),
    "count-falls": Defect("rollout_aborts:CountFalls", {"abort.exact": "by which the count grew"}),
    "aborts-newest": Defect("rollout_aborts:AbortsNewest", {"abort.exact": "two calls with one id"}),
    "abort-takes-one-more": Defect("rollout_aborts:AbortTakesOneMore", {"abort.at_once": "tokens decoded behind it"}),
    "abort-drops-newest": Defect("rollout_aborts:AbortDropsNewest", {"abort.kept": "and not given out"}),
    "abort-ends-the-pause": Defect(
        "rollout_aborts:AbortEndsThePause", {"abort.still_paused": "that ended in the pause"}
    ),
    "aborts-in-a-while": Defect("rollout_aborts:AbortsInAWhile", {"abort.at_once": "tokens decoded behind it"}),
    "wide-indices": Defect("rollout_aborts:WideIndices", {"abort.exact": "expected int"}),
    "aborts-by-beginning": Defect("rollout_aborts:AbortsByBeginning", {"abort": "b1"}),
    "unknown-is-an-error": Defect("rollout_aborts:UnknownIsAnError", {"abort": "nobody"}),
    "aborted-index-from-zero": Defect("rollout_aborts:AbortedIndexFromZero", {"events.abort": "wrong samples"}),
    "aborted-without-dtypes": Defect("rollout_aborts:AbortedWithoutDtypes", {"abort.at_once": "float64"}),
    "cache-kept-over-pause": Defect(
        "rollout_pauses:CacheKeptOverPause",
        {"partial_rollout": "of neither", "versions.runs": "log-probs of other weights"},
    ),
    "pause-aborts": Defect(
        "rollout_pauses:PauseAborts",
        {
            "pause": "wrong samples",
            "partial_rollout": "no tokens",
            "versions.runs": "done before they were paused",
        },
    ),
    "pause-lets-in": Defect("rollout_pauses:PauseLetsIn", {"pause.still": "tokens that came in a pause"}),
    "pause-counts": Defect("rollout_pauses:PauseCounts", {"pause.still": ""}),
    "cache-never-kept": Defect("rollout_pauses:CacheNeverKept", {"stale_cache": "did not go on with what they had"}),
    "abort-in-a-pause-keeps-keys": Defect(
        "rollout_pauses:AbortInAPauseKeepsKeys", {"pause.updates": "behind an abort"}
    ),
    "first-token-unchecked": Defect("rollout_pauses:FirstTokenUnchecked", {"pause.same_weights": "goes on behind"}),
    "pauses-what-runs": Defect("rollout_pauses:PausesWhatRuns", {"pause.idle": "tokens that came in the pause"}),
    "kept-for-good": Defect(
        "rollout_pauses:KeptForGood", {"stale_cache.pauses": "should have, kept then computed again"}
    ),
    "pause-drops-filters": Defect("rollout_pauses:PauseDropsFilters", {"pause": "wrong samples"}),
    "recompute-forgets": Defect("rollout_pauses:RecomputeForgetsWhatCame", {"events.update": "of neither"}),
    "stale-prompts-shared": Defect(
        "rollout_pauses:StalePromptsShared", {"events.keep_cache": "did not go on with what they had"}
    ),
    "a-run-per-resume": Defect("rollout_pauses:ARunPerResume", {"events.pause": "do not add up"}),
    "admits-while-paused": Defect("rollout_pauses:AdmitsWhilePaused", {"pause.idle": "tokens that came in the pause"}),
    "old-version": Defect(
        "rollout_versions:OldVersion",
        {
            "versions": "other versions than 1",
            "partial_rollout": "versions 0 to 0",
            "versions.runs": "log-probs of other weights in its runs",
        },
    ),
    "first-and-last-version": Defect("rollout_versions:FirstAndLastVersion", {"versions.runs": "of other weights"}),
    "runs-beyond-tokens": Defect(
        "rollout_versions:RunsBeyondTokens",
        {"versions": "do not add up", "versions.runs": "not of the weights that they name"},
    ),
    "same-version-skipped": Defect(
        "rollout_versions:SameVersionSkipped", {"update.versions": "wrong samples of update 1"}
    ),
    "versions-only-grow": Defect("rollout_versions:VersionsOnlyGrow", {"update.versions": "wrong samples of update 2"}),
    "version-of-32-bits": Defect("rollout_versions:VersionOf32Bits", {"update.versions": "wrong samples of update 3"}),
    "aborted-all-new": Defect("rollout_versions:AbortedAllNew", {"versions.ends": "log-probs of other weights"}),
    "four-runs-at-most": Defect("rollout_versions:FourRunsAtMost", {"versions.runs": "log-probs of other weights"}),
    "two-runs-at-most": Defect("rollout_versions:TwoRunsAtMost", {"versions.runs": "log-probs of other weights"}),
    "version-of-the-queue": Defect("rollout_versions:VersionOfTheQueue", {"abort.versions": "of another version"}),
    "one-tensor-never-updated": Defect(
        "rollout_updates:OneTensorNeverUpdated",
        {
            "update.each_tensor": "layers.0.self_attn.v_proj.bias",
            "partial_rollout": "of neither",
            "versions.runs": "log-probs of other weights",
            **dict.fromkeys(UPDATES, "largest difference"),
            "update.first": "weights that came",
        },
    ),
    "stale-cache": Defect("rollout_updates:StaleCache", {"update.no_stale_cache": "largest difference after"}),
    "never-recovers": Defect(
        "rollout_updates:NeverRecovers", {"update.failed": "largest difference after a whole update"}
    ),
    "touched-then-refused": Defect(
        "rollout_updates:TouchedThenRefused", {"update.busy": "a refusal that took the weights"}
    ),
    "updated-while-busy": Defect("rollout_updates:UpdatedWhileBusy", {"update.busy": "of neither"}),
    "source-error-kept": Defect(
        "rollout_updates:SourceErrorKept", {"update.source_raises": "errors that did not come out"}
    ),
    "stuck-behind-error": Defect(
        "rollout_updates:StuckBehindError", {"update.source_raises": "an update is under way"}
    ),
    "items-listed": Defect("rollout_updates:ItemsListed", {"update.borrowed": "fingerprints that differ"}),
    "one-item-ahead": Defect("rollout_updates:OneItemAhead", {"update.borrowed": "fingerprints that differ"}),
    "flattened": Defect("rollout_updates:Flattened", {"update.strided": "fingerprints that differ"}),
    "rows-only": Defect("rollout_updates:RowsOnly", {"update.strided": "wrong samples"}),
    "through-half": Defect(
        "rollout_updates:ThroughHalf", {"update.strided": "fingerprints that differ, inside of another"}
    ),
    "nans-hidden": Defect("rollout_updates:NaNsHidden", {"update.not_finite": "behind a token of no number"}),
    "nans-given": Defect("rollout_updates:NaNsGiven", {"update.not_finite": "behind a token of no number"}),
    "nans-stay": Defect("rollout_updates:NaNsStay", {"update.not_finite": "behind a token of no number"}),
    "greedy-remembered": Defect(
        "rollout_updates:GreedyRemembered", {"update.nothing_old": "wrong samples of version 1"}
    ),
    "long-remembered": Defect("rollout_updates:LongRemembered", {"update.nothing_old": "wrong samples of version"}),
    "paused-lost": Defect("rollout_updates:PausedLost", {"update.raises_paused": "samples of both weights"}),
    "rounds-vectors": Defect("rollout_updates:RoundsVectors", {"update.served": "fingerprints that differ"}),
    "cache-by-embeddings": Defect("rollout_updates:CacheByEmbeddings", {"update.little": "after an update of"}),
    "elsewhere": Defect("rollout_updates:Elsewhere", {"layout.place": "that are not node:pid"}),
    "counts-pieces": Defect("rollout_updates:CountsPieces", {"update.receipts": "tensors, pieces"}),
    "gathers-first": Defect("rollout_updates:GathersFirst", {"update.one_at_a_time": "held beside its weights"}),
    "covers-by-count": Defect("rollout_updates:CoversByCount", {"update.damaged": "a piece came twice"}),
    "counts-what-failed": Defect(
        "rollout_updates:CountsWhatFailed", {"update.behind_failure": "behind a source that raised"}
    ),
    "first-receipt-again": Defect("rollout_updates:FirstReceiptAgain", {"update.each_tensor": "fingerprint differs"}),
    "bytes-are-elements": Defect("rollout_updates:BytesAreElements", {"update.served": "bytes"}),
    "layout-lacks-norm": Defect("rollout_updates:LayoutLacksNorm", {"layout": "model.norm.weight"}),
    "counts-elements": Defect("rollout_updates:CountsElements", {"update.damaged": "a piece came twice"}),
    "bytes-as-they-came": Defect("rollout_updates:BytesAsTheyCame", {"update.receipts": "bytes, pieces of bfloat16"}),
    "source-errors-renamed": Defect(
        "rollout_updates:SourceErrorsRenamed", {"update.source_raises": "did not come out"}
    ),
    "wakes-empty": Defect(
        "rollout_sleep:WakesEmpty",
        {"sleep": "largest difference after it", "event_loop": "largest difference of log-probs"},
    ),
    "old-weights-awake": Defect("rollout_sleep:OldWeightsAwake", {"sleep.update": "largest difference after it"}),
    "sleep-forgets-version": Defect("rollout_sleep:SleepForgetsVersion", {"sleep.kept": "versions [0], expected 5"}),
    "sleep-loses-update": Defect("rollout_sleep:SleepLosesUpdate", {"sleep.kept": "log-prob"}),
    "second-sleep": Defect("rollout_sleep:SecondSleep", {"sleep.kept": "log-prob"}),
    "wake-brings-back-weights": Defect(
        "rollout_sleep:WakeBringsBackWeights", {"sleep.kept": "between the stages of waking"}
    ),
    "kept-until-awake": Defect(
        "rollout_sleep:KeptUntilAwake", {"sleep.stages": "slept at 1, woke weights, updated, slept at 1"}
    ),
    "comes-apart": Defect("rollout_sleep:ComesApart", {"model.tied": "log-probs"}),
    "host-copy-once": Defect("rollout_sleep:HostCopyOnce", {"sleep.kept": "wrong samples, woken"}),
    "leaks": Defect("rollout_resources:Leaks", {"memory": "MiB that 12 calls added"}),
    "leaves-process": Defect("rollout_resources:LeavesProcess", {"close": "left behind"}),
    "text-worker-stays": Defect("rollout_resources:TextWorkerStays", {"close": "left behind"}),
    "close-forgets-calls": Defect("rollout_states:CloseForgetsCalls", {"close": "calls that went on"}),
    "one-model-for-all": Defect("rollout_resources:OneModelForAll", {"replicas": "the one that was left"}),
    "thread-for-update": Defect("rollout_resources:ThreadForUpdate", {"handles": "threads that"}),
    "file-for-call": Defect("rollout_resources:FileForCall", {"handles": "open files that"}),
    "file-for-engine": Defect("rollout_resources:FileForEngine", {"replicas": "open files that it left"}),
    "thread-for-engine": Defect("rollout_resources:ThreadForEngine", {"replicas": "threads that it left"}),
    "keeps-weights": Defect("rollout_resources:KeepsWeights", {"memory.updates": "MiB that"}),
    "temporary-folder-stays": Defect("rollout_resources:TemporaryFolderStays", {"close": "temporary folder"}),
    "failed-update-stays-open": Defect("rollout_resources:FailedUpdateStaysOpen", {"handles": "open files that"}),
    "thread-for-sleep": Defect("rollout_resources:ThreadForSleep", {"handles": "threads that"}),
    "file-for-abort": Defect("rollout_resources:FileForAbort", {"handles": "open files that"}),
    "over-padding": Defect("rollout_log_probs:OverPadding", {"model.configuration": "log-prob"}),
    "nan-stays": Defect("rollout_updates:NanStays", {"update.not_finite": "logits that are not finite"}),
    "file-of-sleep": Defect("rollout_resources:FileOfSleep", {"close.asleep": "shared memory"}),
    "group-begins-anew": Defect("rollout_noise:GroupBeginsAnew", {"continue.seed": "in another way alone"}),
    "shares-equal-head": Defect(
        "rollout_models:SharesEqualHead", {"model.configuration": "wrong samples after an update, sliding windows"}
    ),
    "runs-by-label": Defect("rollout_versions:RunsByLabel", {"versions.runs": "the first version again"}),
    "min-p-before-top-p": Defect(
        "rollout_distribution:MinPBeforeTopP", {"distribution.responses": "deviations of log-probability"}
    ),
    "aborted-unchecked": Defect("rollout_aborts:AbortedUnchecked", {"update.not_finite": "aborted samples"}),
    "experts-always-normalised": Defect(
        "rollout_models:ExpertsAlwaysNormalised", {"model.experts": "glm4_moe, the first weights"}
    ),
    "buffers-apart": Defect("rollout_models:BuffersApart", {"model.experts": "other biases"}),
    "norms-in-half": Defect("rollout_models:NormsInHalf", {"model.float16": "version 1"}),
    "stops-in-the-first-128": Defect("rollout_stopping:StopsInTheFirst128", {"length.stop_strings": "expected"}),
    "nucleus-summed-in-half": Defect(
        "rollout_distribution:NucleusSummedInHalf", {"model.float16": "mass before a token"}
    ),
    "noise-of-16-bits": Defect("rollout_noise:NoiseOf16Bits", {"model.float16": "equally probable ids"}),
    "tokens-of-16-bits": Defect("rollout_models:TokensOf16Bits", {"model.float16": "version 0"}),
    "fill-of-nothing": Defect("rollout_counts:FillOfNothing", {"life": "ZeroDivisionError"}),
    "leaving-aborts-namesakes": Defect("rollout_aborts:LeavingAbortsNamesakes", {"abandoned": "finish reason abort"}),
    "minus-one-is-none": Defect("rollout_noise:MinusOneIsNone", {"seed.values": "did not come again"}),
    "dtype-of-first-item": Defect("rollout_updates:DtypeOfFirstItem", {"update.strided": "dtypes that change"}),
    "nan-is-impossible": Defect("rollout_updates:NanIsImpossible", {"update.not_finite": "one logit is no number"}),
    "waits-for-its-loop": Defect("rollout_pauses:WaitsForItsLoop", {"threads": "TimeoutError"}),
    "refused-start-leaves-file": Defect(
        "rollout_resources:RefusedStartLeavesFile", {"initialize.refusals": "left behind"}
    ),
    "keeps-abandoned-calls": Defect("rollout_resources:KeepsAbandonedCalls", {"handles": "objects kept"}),
    **ROLLOUT_FOLDERS,
    **ROLLOUT_STATES,
    **ROLLOUT_NESTED,
}

"""The broken rollout engines, and the requirements that each must fail."""

from __future__ import annotations

from broken.defect import Defect
from broken.fifth_defects import ROLLOUT_FIFTH
from broken.fourth_defects import ROLLOUT_FOURTH
from broken.known_defects import ROLLOUT_KNOWN
from broken.life_defects import ROLLOUT_LIVES
from broken.promise_defects import ROLLOUT_PROMISES
from broken.sixth_defects import ROLLOUT_SIXTH
from broken.trial_defects import ROLLOUT_TRIAL
from broken.unseen_defects import ROLLOUT_UNSEEN
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
    "log-prob-before-temperature": Defect("BeforeTemperature", {"log_probs.temperature": "temperature 0.6"}),
    "log-prob-after-filters": Defect("AfterFilters", {"log_probs.filters": "largest difference with top-k"}),
    "stop-token-dropped": Defect("StopTokenDropped", {"stop_tokens": "without a stop token at its end"}),
    "stops-by-itself": Defect(
        "StopsByItself",
        {
            "stop_tokens.only": "responses that ended early",
            "more_than_slots": "another request's length",
            "continue": "another length than 9",
            "continue.seed": "an interruption changed",
        },
    ),
    "seed-ignored": Defect(
        "SeedIgnored",
        {
            "seed": "samples that changed in company",
            "abort": "not the beginning of what they would have been",
            "pause": "samples that a pause changed",
            "first_sample": "differ from the group's",
            "continue.seed": "an interruption changed",
        },
    ),
    "seed-for-all": Defect("SeedForAll", {"no_seed": "samples that came again"}),
    "rows-swapped": Defect("RowsSwapped", {"more_than_slots": "another request's length"}),
    "one-sample-twice": Defect("OneSampleTwice", {"samples": "came 2 times"}),
    "prompt-cut": Defect("PromptCut", {"longest_prompt": "largest difference"}),
    "one-token-short": Defect(
        "OneTokenShort", {"max_tokens": "8 tokens", "more_than_slots": "another request's length"}
    ),
    "narrow-top-p": Defect("NarrowTopP", {"distribution.filtered": "p-value"}),
    "flat-draws": Defect("FlatDraws", {"distribution.fine": "p-value"}),
    "greedy-is-warm": Defect("GreedyIsWarm", {"greedy": "largest difference of log-probs"}),
    "min-p-ignored": Defect("MinPIgnored", {"min_p": "below min-p"}),
    "stop-strings-ignored": Defect(
        "StopStringsIgnored", {"stop_strings": "goes on behind one of", "continue.stop_strings": "not found"}
    ),
    "nothing-refused": Defect("NothingRefused", {"refusals": "accepted"}),
    "abort-absent": Defect(
        "AbortAbsent",
        {
            "registration.capabilities": "abort is claimed",
            "abort": "does not support",
            "event_loop": "does not support",
        },
    ),
    "abort-loses": Defect("AbortLoses", {"abort": "is missing"}),
    "old-version": Defect(
        "OldVersion",
        {
            "versions": "other versions than 1",
            "partial_rollout": "versions 0 to 0",
            "versions.runs": "log-probs of other weights in its runs",
        },
    ),
    "one-tensor-never-updated": Defect(
        "OneTensorNeverUpdated",
        {
            "update.each_tensor": "layers.0.self_attn.v_proj.bias",
            "partial_rollout": "of neither",
            "versions.runs": "log-probs of other weights",
            **dict.fromkeys(UPDATES, "largest difference"),
        },
    ),
    "stale-cache": Defect("StaleCache", {"update.no_stale_cache": "largest difference after"}),
    "never-recovers": Defect("NeverRecovers", {"update.failed": "largest difference after a whole update"}),
    "touched-then-refused": Defect("TouchedThenRefused", {"update.busy": "a refusal that took the weights"}),
    "updated-while-busy": Defect("UpdatedWhileBusy", {"update.busy": "of neither"}),
    "cache-kept-over-pause": Defect(
        "CacheKeptOverPause", {"partial_rollout": "of neither", "versions.runs": "log-probs of other weights"}
    ),
    "pause-aborts": Defect(
        "PauseAborts",
        {
            "pause": "wrong samples",
            "partial_rollout": "no tokens",
            "versions.runs": "done before they were paused",
        },
    ),
    "wakes-empty": Defect(
        "WakesEmpty", {"sleep": "largest difference after it", "event_loop": "largest difference of log-probs"}
    ),
    "old-weights-awake": Defect("OldWeightsAwake", {"sleep.update": "largest difference after it"}),
    "group-numbered": Defect("GroupNumbered", {"first_sample": "differ from the group's", "continue.seed": "changed"}),
    "given-again": Defect(
        "GivenAgain",
        {"continue": "another length than 9", "continue.seed": "changed", "continue.stop_strings": "not found"},
    ),
    "given-uncounted": Defect(
        "GivenUncounted", {"continue": "another length than 9", "continue.seed": "an interruption changed"}
    ),
    "seed-restarts": Defect(
        "SeedRestarts", {"continue.seed": "an interruption changed", "continue.stop_strings": "not found"}
    ),
    "first-and-last-version": Defect("FirstAndLastVersion", {"versions.runs": "of other weights"}),
    "runs-beyond-tokens": Defect(
        "RunsBeyondTokens", {"versions": "do not add up", "versions.runs": "not of the weights that they name"}
    ),
    "counts-calls": Defect("CountsCalls", {"num_decoded": "some had come and not all"}),
    "one-call-at-a-time": Defect("OneCallAtATime", {"calls_join": "before a long one that had begun"}),
    "loop-of-its-own": Defect("LoopOfItsOwn", {"event_loop": "asyncio.run"}),
    "leaks": Defect("Leaks", {"memory": "MiB that 12 calls added"}),
    "leaves-process": Defect("LeavesProcess", {"close": "left behind"}),
    "warmer-later": Defect("drawing:WarmerLater", {"distribution.responses": "left out by the filters"}),
    "cooler-late": Defect("drawing:CoolerLate", {"length.responses": "deviations of log-probability"}),
    "temperature-floor": Defect("drawing:TemperatureFloor", {"distribution.responses": "temperature 0.1"}),
    "temperature-ceiling": Defect("drawing:TemperatureCeiling", {"distribution.responses": "temperature 2"}),
    "cold-is-greedy": Defect("drawing:ColdIsGreedy", {"distribution.responses": "temperature 0.1"}),
    "min-p-first": Defect("drawing:MinPFirst", {"distribution.responses": "min-p"}),
    "top-p-first": Defect("drawing:TopPFirst", {"distribution.responses": "top-p"}),
    "top-p-one-more": Defect("drawing:TopPOneMore", {"distribution.responses": "left out by the filters"}),
    "top-p-one-less": Defect("drawing:TopPOneLess", {"distribution.responses": "deviations of log-probability"}),
    "top-k-one-more": Defect("drawing:TopKOneMore", {"distribution.responses": "left out by the filters"}),
    "top-p-of-all": Defect("drawing:TopPOfAll", {"distribution.responses": "top-k, then top-p"}),
    "top-k-of-batch": Defect("drawing:TopKOfBatch", {"company.kinds": "left out by the filters"}),
    "dislikes-repeats": Defect("drawing:DislikesRepeats", {"distribution.responses": "left out by the filters"}),
    "end-later": Defect("drawing:EndLater", {"distribution.sequences": "p-value of the end"}),
    "no-rare-tokens": Defect("drawing:NoRareTokens", {"distribution.responses": "deviations of log-probability"}),
    "coarse-noise": Defect("drawing:CoarseNoise", {"distribution.fine": "p-value"}),
    "half-noise": Defect("drawing:HalfNoise", {"distribution.fine": "p-value"}),
    "noise-twice": Defect("drawing:NoiseTwice", {"noise": "1 steps apart", "noise.seeds": "steps apart"}),
    "noise-in-a-ring": Defect("drawing:NoiseInARing", {"length.responses": "128 steps apart"}),
    "noise-moves-on": Defect("drawing:NoiseMovesOn", {"noise": "steps apart", "noise.seeds": "steps apart"}),
    "samples-in-pairs": Defect("drawing:SamplesInPairs", {"noise": "samples", "company.many": "distinct samples"}),
    "seed-plus-index": Defect(
        "drawing:SeedPlusIndex", {"noise.seeds": "depend on others", "seed.values": "the same tokens"}
    ),
    "seed-of-32-bits": Defect("drawing:SeedOf32Bits", {"seed.values": "the same tokens"}),
    "seed-as-float": Defect("drawing:SeedAsFloat", {"seed.values": "the same tokens"}),
    "seed-zero": Defect("drawing:SeedZero", {"seed.values": "did not come again"}),
    "one-noise-for-call": Defect("drawing:OneNoiseForCall", {"noise": "depend on others"}),
    "one-noise-for-two-calls": Defect("drawing:OneNoiseForFour", {"noise": "depend on others"}),
    "seeded-company": Defect("drawing:SeededCompany", {"company.kinds": "distinct samples without a seed"}),
    "drifts-late": Defect("lengths:DriftsLate", {"length.responses": "log-prob 257"}),
    "one-late-behind-128": Defect("lengths:OneLateBehind128", {"length.responses": "log-prob 129"}),
    "pages-log-probs": Defect("lengths:PagesLogProbs", {"length.responses": "log-prob 64"}),
    "window-256": Defect("lengths:Window256", {"length.prompts": "log-prob 0"}),
    "forgets-at-pages": Defect("lengths:ForgetsAtPages", {"length.prompts": "log-prob 0"}),
    "begins-twice": Defect("lengths:BeginsTwice", {"length.prompts": "sample 'p1'/0: log-prob"}),
    "leaks-into-neighbour": Defect("lengths:LeaksIntoNeighbour", {"length.prompts": "log-prob 0"}),
    "shares-prefix": Defect("lengths:SharesPrefix", {"length.prompts": "log-prob 0"}),
    "room-less-one": Defect("lengths:RoomLessOne", {"length.limits": "tokens, finish reason length"}),
    "two-at-least": Defect("lengths:TwoAtLeast", {"length.limits": "its limit is 1"}),
    "stops-at-room": Defect("lengths:StopsAtRoom", {"length.limits": "finish reason stop"}),
    "small-limits": Defect("lengths:SmallLimits", {"length.limits": "expected"}),
    "forgets-long-response": Defect("lengths:ForgetsLongResponse", {"length.continued": "log-prob 0"}),
    "first-ones-temperature": Defect("company:FirstOnesTemperature", {"company.kinds": "log-prob"}),
    "greedy-in-company": Defect("company:GreedyInCompany", {"company.kinds": "is not the most probable"}),
    "filters-of-neighbour": Defect("company:FiltersOfNeighbour", {"company.kinds": "left out by the filters"}),
    "stops-of-others": Defect("company:StopsOfOthers", {"company.kinds": "finish reason stop"}),
    "first-never-stops": Defect("company:FirstNeverStops", {"company.stops": "where something stopped it"}),
    "length-before-stop": Defect("company:LengthBeforeStop", {"company.stops": "where something stopped it"}),
    "stops-by-prompt": Defect("company:StopsByPrompt", {"company.stops": "finish reason stop"}),
    "stops-by-one-token": Defect("company:StopsByOneToken", {"company.stops": "goes on behind a stop string"}),
    "same-again-from-32": Defect("company:SameAgainFrom32", {"company.many": "distinct samples"}),
    "prompts-merged": Defect("company:PromptsMerged", {"company.many": "distinct samples"}),
    "names-run-together": Defect("company:NamesRunTogether", {"company.names": "came 2 times"}),
    "all-at-the-end": Defect("company:AllAtTheEnd", {"company.as_they_finish": "behind a long one"}),
    "one-buffer": Defect("company:OneBuffer", {"company.as_they_finish": "changed after"}),
    "no-gradient": Defect("company:NoGradient", {"company.manners": "gradients"}),
    "nothing-fails": Defect("company:NothingFails", {"company.names": "empty"}),
    "alike-replicas": Defect("company:AlikeReplicas", {"replicas": "another replica's"}),
    "one-model-for-all": Defect("company:OneModelForAll", {"replicas": "the one that was left"}),
    "noise-of-the-clock": Defect("company:NoiseOfTheClock", {"company.alone": "company changed"}),
    "joins-without-first": Defect("company:JoinsWithoutFirst", {"company.staggered": "log-prob"}),
    "limit-of-batch": Defect("company:LimitOfBatch", {"company.kinds": "expected"}),
    "rare-log-probs": Defect("company:RareLogProbs", {"company.kinds": "log-prob"}),
    "never-withdraws": Defect("lifetimes:NeverWithdraws", {"abandoned": "came while"}),
    "left-takes-all": Defect("lifetimes:LeftTakesAll", {"abandoned": "wrong samples of another call"}),
    "slots-lost": Defect("lifetimes:SlotsLost", {"abort.slots": "samples at once afterwards"}),
    "slots-left": Defect("lifetimes:SlotsLeft", {"abandoned": "samples at once afterwards"}),
    "abort-waits-for-resume": Defect("lifetimes:AbortWaitsForResume", {"abort.paused": "came in the pause"}),
    "nothing-is-all": Defect("lifetimes:NothingIsAll", {"abort.exact": "behind an abort of nothing"}),
    "abort-speaks-of-next": Defect("lifetimes:AbortSpeaksOfNext", {"abort.exact": "began behind an abort"}),
    "waiting-stay": Defect("lifetimes:WaitingStay", {"abort.exact": "samples that were aborted"}),
    "pause-lets-in": Defect("lifetimes:PauseLetsIn", {"pause.still": "tokens that came in a pause"}),
    "pause-counts": Defect("lifetimes:PauseCounts", {"pause.still": ""}),
    "sleep-forgets-version": Defect("lifetimes:SleepForgetsVersion", {"sleep.kept": "versions [0], expected 5"}),
    "sleep-loses-update": Defect("lifetimes:SleepLosesUpdate", {"sleep.kept": "log-prob"}),
    "sleep-begins-noise": Defect("lifetimes:SleepBeginsNoise", {"noise.lifetime": "distinct samples"}),
    "update-begins-noise": Defect("lifetimes:UpdateBeginsNoise", {"noise.lifetime": "distinct samples"}),
    "sleep-changes-seeds": Defect("lifetimes:SleepChangesSeeds", {"sleep.kept": "sleep changed"}),
    "thread-for-update": Defect("lifetimes:ThreadForUpdate", {"handles": "threads that"}),
    "file-for-call": Defect("lifetimes:FileForCall", {"handles": "open files that"}),
    "file-for-engine": Defect("lifetimes:FileForEngine", {"replicas": "open files that it left"}),
    "thread-for-engine": Defect("lifetimes:ThreadForEngine", {"replicas": "threads that it left"}),
    "source-error-kept": Defect("lifetimes:SourceErrorKept", {"update.source_raises": "errors that did not come out"}),
    "stuck-behind-error": Defect("lifetimes:StuckBehindError", {"update.source_raises": "an update is under way"}),
    "items-listed": Defect("lifetimes:ItemsListed", {"update.borrowed": "fingerprints that differ"}),
    "one-item-ahead": Defect("lifetimes:OneItemAhead", {"update.borrowed": "fingerprints that differ"}),
    "flattened": Defect("lifetimes:Flattened", {"update.strided": "fingerprints that differ"}),
    "rows-only": Defect("lifetimes:RowsOnly", {"update.strided": "wrong samples"}),
    "through-half": Defect("lifetimes:ThroughHalf", {"update.strided": "fingerprints that differ, inside of another"}),
    "nans-hidden": Defect("lifetimes:NaNsHidden", {"update.not_finite": "samples of weights with nan"}),
    "nans-given": Defect("lifetimes:NaNsGiven", {"update.not_finite": "samples of weights with nan"}),
    "nans-stay": Defect("lifetimes:NaNsStay", {"update.not_finite": "wrong samples afterwards"}),
    "same-version-skipped": Defect("lifetimes:SameVersionSkipped", {"update.versions": "wrong samples of update 1"}),
    "versions-only-grow": Defect("lifetimes:VersionsOnlyGrow", {"update.versions": "wrong samples of update 2"}),
    "version-of-32-bits": Defect("lifetimes:VersionOf32Bits", {"update.versions": "wrong samples of update 3"}),
    "greedy-remembered": Defect("lifetimes:GreedyRemembered", {"update.nothing_old": "wrong samples of version 1"}),
    "long-remembered": Defect("lifetimes:LongRemembered", {"update.nothing_old": "wrong samples of version"}),
    "paused-lost": Defect("lifetimes:PausedLost", {"update.raises_paused": "samples of both weights"}),
    "cache-never-kept": Defect("lifetimes:CacheNeverKept", {"stale_cache": "did not go on with what they had"}),
    "half-log-probs": Defect("further:HalfLogProbs", {"length.responses": "log-prob"}),
    "abort-is-length": Defect("further:AbortIsLength", {"abort.exact": "0 tokens, finish reason length"}),
    "last-twice": Defect("further:LastTwice", {"company.many": "came 2 times"}),
    "tempered-twice": Defect("further:TemperedTwice", {"distribution.responses": "deviations of log-probability"}),
    "top-p-near-one": Defect("further:TopPNearOne", {"distribution.responses": "left out by the filters"}),
    "top-k-20": Defect("further:TopK20", {"distribution.responses": "top-k 60"}),
    "min-p-tempered": Defect("further:MinPTempered", {"distribution.responses": ""}),
    "seeds-first-only": Defect("further:SeedsFirstOnly", {"company.alone": "company changed"}),
    "eight-numbers": Defect("further:EightNumbers", {"company.many": "distinct samples"}),
    "late-noise-shared": Defect("further:LateNoiseShared", {"length.responses": "steps apart"}),
    "four-stops": Defect("further:FourStops", {"company.stops": "where something stopped it"}),
    "one-stop-string": Defect("further:OneStopString", {"stop_strings": "goes on behind one of"}),
    "rounds-vectors": Defect("further:RoundsVectors", {"update.served": "fingerprints that differ"}),
    "aborted-short": Defect("further:AbortedShort", {"abort.exact": "log-probs"}),
    "pause-skips-noise": Defect("further:PauseSkipsNoise", {"pause": "a pause changed"}),
    "second-sleep": Defect("further:SecondSleep", {"sleep.kept": "log-prob"}),
    "keeps-weights": Defect("further:KeepsWeights", {"memory.updates": "MiB that"}),
    "count-falls": Defect("further:CountFalls", {"abort.exact": "by which the count grew"}),
    "pads-masked": Defect("further:PadsMasked", {"company.any_token": "log-prob"}),
    "cut-at-end": Defect("further:CutAtEnd", {"company.any_token": "log-prob"}),
    "log-prob-floor": Defect("further:LogProbFloor", {"company.any_token": "log-prob"}),
    "aborts-newest": Defect("further:AbortsNewest", {"abort.exact": "two calls with one id"}),
    "drops-for-slow-callers": Defect("further:DropsForSlowCallers", {"company.slow_caller": "is missing"}),
    "slow-callers-hold": Defect("further:SlowCallersHold", {"company.slow_caller": ""}),
    "first-of-group-short": Defect("further:LimitsTheFirstOfGroup", {"company.kinds": "expected"}),
    "takes-turns": Defect("further:TakesTurns", {"company.staggered": "before long ones"}),
    "greedy-almost": Defect("further:GreedyAlmost", {"distribution.greedy": "is not the most probable"}),
    **ROLLOUT_TRIAL,
    **ROLLOUT_PROMISES,
    **ROLLOUT_UNSEEN,
    **ROLLOUT_LIVES,
    **ROLLOUT_FOURTH,
    **ROLLOUT_FIFTH,
    **ROLLOUT_SIXTH,
    **ROLLOUT_KNOWN,
}

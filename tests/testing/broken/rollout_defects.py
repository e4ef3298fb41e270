"""The broken rollout engines, and the requirements that each must fail."""

from __future__ import annotations

from broken.defect import Defect
from rlsdk.interfaces import Capability

ROLLOUT_CAPABILITIES = frozenset(
    {
        Capability.SEED,
        Capability.MIN_P,
        Capability.STOP_STRINGS,
        Capability.ABORT,
        Capability.SLEEP,
        Capability.PARTIAL_ROLLOUT,
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
    "flat-draws": Defect("FlatDraws", {"distribution": "p-value"}),
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
            "pause": "samples that a pause changed",
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
}

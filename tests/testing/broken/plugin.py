"""Entry module of the broken backends. Imports no engine, as every entry module should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsdk.interfaces import BackendKind, BackendSpec, Capability, RegisterBackend, RegisterComponent, hookimpl

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


@dataclass(frozen=True)
class Defect:
    """A broken engine, and the requirements that it fails: these and no others."""

    engine: str
    """Class, in `broken.rollout`, `broken.train` or `broken.sharding`."""
    fails: Mapping[str, str]
    """Requirement -> words of the reason that its report gives."""


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

TRAIN_CAPABILITIES = frozenset(
    {
        Capability.VALUE_HEAD,
        Capability.SCORE_HEAD,
        Capability.ENTROPY,
        Capability.OFFLOAD,
        Capability.EXPORT,
        Capability.PACKING,
    }
)

COMPARED = ("", ".mask", ".entropy", ".values", ".scores", ".padding", ".calls")
"""Requirements on gradients that hold an engine to plain torch, and not to itself."""
TRAIN = {
    "log-prob-before-temperature": Defect("BeforeTemperature", {"outputs.temperature": "temperature 0.6"}),
    "entropy-in-bits": Defect("EntropyInBits", {"outputs.entropy": "largest difference of entropy"}),
    "values-one-late": Defect("ValuesOneLate", {"outputs.values": "largest difference of values"}),
    "scores-absent": Defect("ScoresAbsent", {"outputs.scores": "largest difference of scores"}),
    "mask-one-early": Defect(
        "MaskOneEarly", {"outputs.mask": "off the mask", "gradient.mask": "largest difference of loss"}
    ),
    "rows-sorted": Defect("RowsSorted", {"outputs.row_order": "passes of 2 rows"}),
    "no-rows-fail": Defect("NoRowsFail", {"outputs.company": "list index out of range"}),
    "pads-in-secret": Defect("PadsInSecret", {"outputs.packing": "most tokens through a linear layer"}),
    "mean-of-means": Defect(
        "MeanOfMeans", {"gradient.micro_batches": "largest difference of loss", "gradient.calls": "loss"}
    ),
    "first-call-forgotten": Defect("FirstCallForgotten", {"gradient.calls": "largest difference of loss"}),
    "clipped-norm-told": Defect("ClippedNormTold", {"step.clipping": "gradient norm"}),
    "schedule-one-late": Defect("ScheduleOneLate", {"step.schedule": "of the rate, constant"}),
    "steps-on-nan": Defect("StepsOnNaN", {"step.skipped": "largest difference"}),
    "copies-for-shards": Defect("CopiesForShards", {"layout": "shards that are copies"}),
    "one-tensor-frozen": Defect(
        "OneTensorFrozen",
        {
            "layout": "a step did not change",
            **dict.fromkeys(
                (*(f"gradient{part}" for part in COMPARED), "step.clipping", "step.schedule"), "difference of"
            ),
        },
    ),
    "moments-forgotten": Defect("MomentsForgotten", {"checkpoint.resume": "largest difference of weights"}),
    "schedule-forgotten": Defect("ScheduleForgotten", {"checkpoint.schedule": "largest difference of rates"}),
    "damage-loaded": Defect("DamageLoaded", {"checkpoint.damaged": "nothing in it"}),
    "export-of-the-first": Defect("ExportOfTheFirst", {"export": "largest difference of weights"}),
    "offload-absent": Defect(
        "OffloadAbsent", {"registration.capabilities": "offload is claimed", "offload": "does not support"}
    ),
    "gradients-lost": Defect("GradientsLost", {"offload": "largest difference of weights"}),
    "frozen-in-half": Defect("FrozenInHalf", {"frozen": "largest difference"}),
    "any-size": Defect("AnySize", {"refusals": "2 ranks"}),
    "leaks": Defect("Leaks", {"memory": "MiB that 15 steps added"}),
    "leaves-memory": Defect("LeavesMemory", {"close": "shared memory"}),
}

SHARDING = {
    "big-buckets": Defect("BigBuckets", {"plan.bytes": "largest bucket"}),
    "one-bucket-short": Defect(
        "OneBucketShort",
        {
            "plan.cover": "elements not sent once",
            "plan.bytes": "bytes of its buckets",
            "sync.bitwise": "elements came",
            "sync.unchanged": "elements came",
            "sync.interrupted": "does not serve version 1",
        },
    ),
    "trusts-receipts": Defect("TrustsReceipts", {"sync.proven": "keeps one tensor"}),
    "serves-stale": Defect("ServesStale", {"sync.unchanged": "version 2 with the weights of version 1"}),
}


@hookimpl
def rlsdk_register_sharding_managers(register: RegisterComponent) -> None:
    for name, defect in SHARDING.items():
        register(name, f"broken.sharding:{defect.engine}", "The generic manager with a defect.")


@hookimpl
def rlsdk_register_backends(register: RegisterBackend) -> None:
    for name, defect in ROLLOUT.items():
        register(
            BackendSpec(
                name=name,
                kind=BackendKind.ROLLOUT,
                engine=f"broken.rollout:{defect.engine}",
                description="The reference engine with a defect.",
                capabilities=ROLLOUT_CAPABILITIES,
                max_ranks=1,
            )
        )
    for name, defect in TRAIN.items():
        register(
            BackendSpec(
                name=name,
                kind=BackendKind.TRAIN,
                engine=f"broken.train:{defect.engine}",
                description="The reference engine with a defect.",
                capabilities=TRAIN_CAPABILITIES,
                dtypes=frozenset({"float32", "bfloat16"}),
                max_ranks=1,
            )
        )

"""Broken train engines, by name, and what must fail for each."""

from __future__ import annotations

from broken.defect import Defect
from broken.fifth_defects import TRAIN_FIFTH
from broken.fourth_defects import RANKS_FOURTH, TRAIN_FOURTH
from broken.known_defects import TRAIN_KNOWN
from broken.life_defects import RANKS_LIVES, TRAIN_LIVES
from broken.promise_defects import RANKS_PROMISES, TRAIN_PROMISES
from broken.sixth_defects import TRAIN_SIXTH
from broken.tenth_defects import RANKS_TENTH, TRAIN_TENTH
from broken.trial_defects import TRAIN_TRIAL
from broken.unseen_defects import RANKS_UNSEEN, TRAIN_UNSEEN
from rlsdk.interfaces import Capability

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
FIRST = {
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

SECOND = {
    "positions-wrap": Defect("train_outputs:PositionsWrap", {"length.outputs": "largest difference"}),
    "rows-meet": Defect("train_outputs:RowsMeet", {"length.outputs": "in one pass"}),
    "ends-after-thousand": Defect("train_outputs:EndsAfterThousand", {"length.outputs": "in one pass"}),
    "budget-doubled": Defect("train_outputs:BudgetDoubled", {"length.budget": "passes over their limit"}),
    "forward-without-budget": Defect("train_outputs:ForwardWithoutBudget", {"length.budget": "most tokens in a pass"}),
    "long-rows-cut": Defect("train_outputs:LongRowsCut", {"length.outputs": "300 tokens"}),
    "one-token-rows-fail": Defect("train_outputs:OneTokenRowsFail", {"length.shortest": "list index"}),
    "values-masked": Defect("train_outputs:ValuesMasked", {"length.values": "largest difference of"}),
    "scores-in-order-of-length": Defect(
        "train_outputs:ScoresInOrderOfLength", {"length.scores": "largest difference of scores"}
    ),
    "entropy-at-one": Defect("train_outputs:EntropyAtOne", {"length.entropy": "largest difference of entropy"}),
    "last-name-only": Defect("train_outputs:LastNameOnly", {"objective.both": "log_probs"}),
    "more-than-asked": Defect("train_outputs:MoreThanAsked", {"length.entropy": "not asked for"}),
    "cached-by-row": Defect("train_outputs:CachedByRow", {"steady.forward": "after step 0"}),
    "buffer-reused": Defect("train_outputs:BufferReused", {"steady.forward": "largest"}),
    "rows-by-number": Defect("train_updates:RowsByNumber", {"length.outputs": "largest difference"}),
    "dropout-stays": Defect("train_outputs:DropoutStays", {"model.dropout": "largest difference"}),
    "dropout-when-recomputed": Defect("train_outputs:DropoutWhenRecomputed", {"model.dropout": "recomputed"}),
    "vocabulary-padded": Defect("train_outputs:VocabularyPadded", {"model.families": "llama"}),
    "norm-eps-fixed": Defect("train_outputs:NormEpsFixed", {"model.families": "llama"}),
    "tied-cut": Defect("train_outputs:TiedCut", {"model.tied": "largest difference of loss"}),
    "tied-parted": Defect("train_outputs:TiedParted", {"model.tied": "tied"}),
    "softmax-in-half": Defect("train_outputs:SoftmaxInHalf", {"model.bfloat16": "bfloat16 numbers"}),
    "trains-in-half": Defect("train_updates:TrainsInHalf", {"model.small_steps": "movement"}),
    "adds-in-half": Defect("train_updates:AddsInHalf", {"model.accumulated": "equal micro-batches"}),
    "recomputed-without-input": Defect(
        "train_updates:RecomputedWithoutInput", {"model.recomputed": "largest difference of loss"}
    ),
    "drawn-by-process": Defect("train_updates:DrawnByProcess", {"model.initial": "two random starts"}),
    "begins-rounded": Defect("train_updates:BeginsRounded", {"model.initial": "from the checkpoint"}),
    "seeds-the-process": Defect("train_updates:SeedsTheProcess", {"random_state": "moved on"}),
    "shuffles": Defect("train_updates:Shuffles", {"random_state": "moved on"}),
    "frozen-at-one": Defect("train_outputs:FrozenAtOne", {"frozen.heads": "log_probs"}),
    "maxima-from-zero": Defect("train_updates:MaximaFromZero", {"objective.metrics": "maximum"}),
    "names-of-the-first": Defect("train_updates:NamesOfTheFirst", {"objective.metrics": "not reported"}),
    "temperature-kept": Defect("train_updates:TemperatureKept", {"objective.temperature": "largest difference"}),
    "gradient-at-one": Defect("train_updates:GradientAtOne", {"objective.temperature": "largest difference"}),
    "entropy-detached": Defect("train_updates:EntropyDetached", {"objective.both": "largest difference of loss"}),
    "foreign-fields-dropped": Defect("train_updates:ForeignFieldsDropped", {"objective.given": "has no field"}),
    "meta-dropped": Defect("train_updates:MetaDropped", {"objective.given": "lost"}),
    "inputs-changed": Defect("train_updates:InputsChanged", {"objective.given": "changed"}),
    "last-row-again": Defect("train_updates:LastRowAgain", {"objective.given": "rows"}),
    "groups-split": Defect("train_updates:GroupsSplit", {"objective.whole_groups": "largest difference"}),
    "raised-and-kept": Defect("train_updates:RaisedAndKept", {"objective.raises": "largest difference of loss"}),
    "raised-as-other": Defect("train_updates:RaisedAsOther", {"objective.raises": "training failed"}),
    "earlier-calls-kept": Defect("train_updates:EarlierCallsKept", {"objective.raises": "gradient norm"}),
    "unknown-is-zero": Defect("train_updates:UnknownIsZero", {"objective.unknown_output": "accepted"}),
    "unknown-is-key-error": Defect("train_updates:UnknownIsKeyError", {"objective.unknown_output": "logprobs"}),
    "betas-fixed": Defect("train_updates:BetasFixed", {"step.settings": "short memory"}),
    "second-beta-fixed": Defect("train_updates:SecondBetaFixed", {"step.settings": "short memory"}),
    "eps-at-most": Defect("train_updates:EpsAtMost", {"step.settings": "large eps"}),
    "decay-at-most": Defect("train_updates:DecayAtMost", {"step.settings": "strong decay"}),
    "decay-everywhere": Defect("train_updates:DecayEverywhere", {"step.settings": "largest difference"}),
    "decay-in-gradient": Defect("train_updates:DecayInGradient", {"step.settings": "largest difference"}),
    "clips-each-tensor": Defect("train_updates:ClipsEachTensor", {"step.clipping_calls": "limit"}),
    "clips-each-call": Defect("train_updates:ClipsEachCall", {"step.clipping_calls": "limit"}),
    "clips-nothing": Defect("train_updates:ClipsNothing", {"step.zero_gradient": "skipped, clipped"}),
    "skips-zero": Defect("train_updates:SkipsZero", {"step.zero_gradient": "skipped"}),
    "skip-forgets": Defect("train_updates:SkipForgets", {"step.skipped_later": "largest difference"}),
    "skip-keeps-gradients": Defect("train_updates:SkipKeepsGradients", {"step.skipped_later": "largest difference"}),
    "reset-keeps-moments": Defect("train_updates:ResetKeepsMoments", {"step.reset": "gradient norm"}),
    "reset-keeps-schedule": Defect("train_updates:ResetKeepsSchedule", {"step.reset": "rate"}),
    "by-share-of-tokens": Defect("train_updates:ByShareOfTokens", {"step.unlike_calls": "largest difference"}),
    "largest-calls-only": Defect("train_updates:LargestCallsOnly", {"step.unlike_calls": "largest difference"}),
    "empty-call-clears": Defect("train_updates:EmptyCallClears", {"steady.no_rows": "largest difference"}),
    "empty-call-is-none": Defect("train_updates:EmptyCallIsNone", {"steady.no_rows": "losses of nothing"}),
    "forward-clears": Defect("train_updates:ForwardClears", {"steady.forward": "largest difference"}),
    "first-keeps-moments": Defect("train_keeping:FirstKeepsMoments", {"checkpoint.first": "trained"}),
    "first-cannot-be-saved": Defect("train_keeping:FirstCannotBeSaved", {"checkpoint.first": "no moments"}),
    "pending-kept": Defect("train_keeping:PendingKept", {"checkpoint.into_trained": "older after"}),
    "loads-defaults": Defect("train_keeping:LoadsDefaults", {"checkpoint.settings": "short memory"}),
    "loads-without-decay": Defect("train_keeping:LoadsWithoutDecay", {"checkpoint.settings": "weights"}),
    "steps-of-adam-forgotten": Defect("train_keeping:StepsOfAdamForgotten", {"checkpoint.settings": "weights"}),
    "loaded-learns-twice": Defect("train_keeping:LoadedLearnsTwice", {"checkpoint.settings": "weights"}),
    "fits-loosely": Defect("train_keeping:FitsLoosely", {"checkpoint.other_model": "was accepted"}),
    "copies-then-checks": Defect("train_keeping:CopiesThenChecks", {"checkpoint.other_model": "weights"}),
    "refuses-and-forgets": Defect("train_keeping:RefusesAndForgets", {"checkpoint.missing_file": "weights"}),
    "steps-guessed": Defect("train_keeping:StepsGuessed", {"checkpoint.missing_file": "state.json missing"}),
    "full-path": Defect("train_keeping:FullPath", {"checkpoint.folder": "is not there"}),
    "pickles": Defect("train_keeping:Pickles", {"checkpoint.folder": "pickles"}),
    "trains-the-file": Defect("train_keeping:TrainsTheFile", {"checkpoint.folder": "changed meanwhile"}),
    "save-rounds": Defect("train_keeping:SaveRounds", {"steady.save": "largest difference"}),
    "half-checkpoint": Defect("train_keeping:HalfCheckpoint", {"checkpoint.bfloat16": "weights"}),
    "head-without-moments": Defect("train_keeping:HeadWithoutMoments", {"checkpoint.heads": "weights"}),
    "random-state-forgotten": Defect(
        "train_keeping:RandomStateForgotten", {"checkpoint.random_state": "numbers drawn"}
    ),
    "no-tokenizer": Defect("train_keeping:NoTokenizer", {"export.files": "tokenizer"}),
    "plain-config": Defect("train_keeping:PlainConfig", {"export.files": "settings that differ"}),
    "head-left-out": Defect("train_keeping:HeadLeftOut", {"export.value_head": "score.weight"}),
    "wide-export": Defect("train_keeping:WideExport", {"export.bfloat16": "weights"}),
    "tied-untied-in-export": Defect("train_keeping:TiedUntiedInExport", {"export.tied": "weights"}),
    "exports-once": Defect("train_keeping:ExportsOnce", {"export.again": "begun anew"}),
    "moments-stay-away": Defect("train_keeping:MomentsStayAway", {"steady.offload": "largest difference"}),
    "offload-needs-moments": Defect("train_keeping:OffloadNeedsMoments", {"steady.offload": "exp_avg"}),
    "frozen-does-not-return": Defect(
        "train_keeping:FrozenDoesNotReturn", {"steady.offload_frozen": "largest difference"}
    ),
    "layout-counts": Defect("train_keeping:LayoutCounts", {"steady.layout": "the layout changed"}),
    "shards-of-another-type": Defect("train_keeping:ShardsOfAnotherType", {"steady.layout": "another dtype"}),
    "leaves-files": Defect("train_keeping:LeavesFiles", {"resources": "left open"}),
    "leaves-threads": Defect("train_keeping:LeavesThreads", {"resources": "threads"}),
}
RANKS_CAPABILITIES = TRAIN_CAPABILITIES | {Capability.DATA_PARALLEL, Capability.RESHARD_ON_LOAD}
RANKS = {
    "ranks-averaged": Defect("train_ranks:Averages", {"ranks.settings": "gradient norm"}),
    "clips-its-own": Defect("train_ranks:ClipsItsOwn", {"ranks.settings": "clipped"}),
    "tells-its-own": Defect("train_ranks:TellsItsOwn", {"ranks.settings": "gradient norm"}),
    "seeds-by-rank": Defect("train_ranks:SeedsByRank", {"ranks.initial": "random"}),
    "exports-its-own": Defect("train_ranks:ExportsItsOwn", {"ranks.export": "weights"}),
    "lends-rank-zero": Defect("train_ranks:LendsRankZero", {"ranks.steady": "weights"}),
    "head-of-rank-zero": Defect("train_ranks:HeadOfRankZero", {"ranks.heads": "values"}),
    "skips-alone": Defect("train_ranks:SkipsAlone", {"ranks.skipped": "was not skipped"}),
    "tells-its-own-rows": Defect("train_ranks:TellsItsOwnRows", {"ranks.metrics": "metric"}),
    "idle-is-zero": Defect("train_ranks:IdleIsZero", {"ranks.metrics": "metric"}),
    "mean-over-ranks": Defect("train_ranks:MeanOverRanks", {"ranks.unlike": "largest difference"}),
    "rank-zero-everywhere": Defect("train_ranks:RankZeroEverywhere", {"ranks.layout": "number of another"}),
    "loads-rank-zero": Defect("train_ranks:LoadsRankZero", {"ranks.checkpoint": "weights"}),
    "raised-on-rank-zero": Defect("train_ranks:RaisedOnRankZero", {"ranks.raises": "weights"}),
    "own-temperature": Defect("train_ranks:OwnTemperature", {"ranks.settings": "temperature"}),
    "steps-of-rank-zero": Defect("train_trial:StepsOfRankZero", {"ranks.checkpoint": "weights"}),
    "reduces-in-half": Defect("train_trial:ReducesInHalf", {"ranks.gradient": "of a tensor"}),
}
TRIAL = {
    "log-probs-clamped": Defect("train_trial:LogProbsClamped", {"outputs.unlikely": "largest difference"}),
    "gradient-of-the-beginning": Defect("train_trial:GradientOfTheBeginning", {"length.gradient": "gradient norm"}),
    "moments-unclipped": Defect("train_trial:MomentsUnclipped", {"step.clipping": "largest difference"}),
    "schedule-counts-calls": Defect("train_trial:ScheduleCountsCalls", {"steady.no_rows": "largest difference"}),
    "shares-prefixes": Defect("train_trial:SharesPrefixes", {"outputs.groups": "largest difference"}),
    "end-token-ends": Defect("train_trial:EndTokenEnds", {"length.outputs": "largest difference"}),
    "recomputed-at-one": Defect("train_trial:RecomputedAtOne", {"model.recomputed": "masked"}),
    "calls-in-half": Defect("train_trial:CallsInHalf", {"model.accumulated": "equal calls"}),
    "gives-up-skipping": Defect("train_trial:GivesUpSkipping", {"step.skipped_later": "in a row"}),
    "small-row-numbers": Defect("train_trial:SmallRowNumbers", {"length.many_rows": "largest difference"}),
    "tuples-only": Defect("train_trial:TuplesOnly", {"steady.forward": "log_probs"}),
    "half-metrics": Defect("train_trial:HalfMetrics", {"objective.given": "sum of identities"}),
    "reset-reads": Defect("train_trial:ResetReads", {"step.reset": "gradient norm"}),
    "embeddings-do-not-decay": Defect("train_trial:EmbeddingsDoNotDecay", {"step.settings": "gradient norm"}),
    "copy-stays-old": Defect("train_trial:CopyStaysOld", {"checkpoint.bfloat16": "weights"}),
    "tied-the-other-way": Defect("train_trial:TiedTheOtherWay", {"model.tied": "not in the layout"}),
    "saves-later": Defect("train_trial:SavesLater", {"checkpoint.settings": "weights"}),
    "moments-swapped": Defect("train_trial:MomentsSwapped", {"steady.offload": "largest difference"}),
}
"""Written after the requirements, and run on them once: they caught 12 of these and of the last two of `RANKS`."""
RANKS |= RANKS_PROMISES | RANKS_UNSEEN | RANKS_LIVES | RANKS_FOURTH | RANKS_TENTH
TRAIN = {
    **FIRST,
    **SECOND,
    **TRIAL,
    **TRAIN_TRIAL,
    **TRAIN_PROMISES,
    **TRAIN_UNSEEN,
    **TRAIN_LIVES,
    **TRAIN_FOURTH,
    **TRAIN_FIFTH,
    **TRAIN_SIXTH,
    **TRAIN_KNOWN,
    **TRAIN_TENTH,
    **RANKS,
}

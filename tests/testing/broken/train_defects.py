"""The broken train engines by family, and the requirements that each must fail."""

from __future__ import annotations

from broken.defect import Defect
from broken.state_defects import TRAIN_STATES
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
ONE_RANK = {
    "log-prob-before-temperature": Defect(
        "train_outputs:BeforeTemperature", {"outputs.temperature": "temperature 0.6"}
    ),
    "entropy-in-bits": Defect("train_outputs:EntropyInBits", {"outputs.entropy": "largest difference of entropy"}),
    "values-one-late": Defect("train_outputs:ValuesOneLate", {"outputs.values": "largest difference of values"}),
    "scores-absent": Defect("train_outputs:ScoresAbsent", {"outputs.scores": "largest difference of scores"}),
    "mask-one-early": Defect(
        "train_outputs:MaskOneEarly", {"outputs.mask": "off the mask", "gradient.mask": "largest difference of loss"}
    ),
    "rows-sorted": Defect("train_outputs:RowsSorted", {"outputs.row_order": "passes of 2 rows"}),
    "no-rows-fail": Defect("train_outputs:NoRowsFail", {"outputs.company": "list index out of range"}),
    "pads-in-secret": Defect("train_outputs:PadsInSecret", {"outputs.packing": "most tokens through a linear layer"}),
    "frozen-in-half": Defect("train_outputs:FrozenInHalf", {"frozen": "largest difference"}),
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
    "cached-by-row": Defect("train_outputs:CachedByRow", {"steady.forward": "after step 0"}),
    "buffer-reused": Defect("train_outputs:BufferReused", {"steady.forward": "largest"}),
    "frozen-at-one": Defect("train_outputs:FrozenAtOne", {"frozen.heads": "log_probs"}),
    "more-than-asked": Defect("train_outputs:MoreThanAsked", {"length.entropy": "not asked for"}),
    "rows-by-number": Defect("train_outputs:RowsByNumber", {"length.outputs": "largest difference"}),
    "entropy-of-128": Defect("train_outputs:EntropyOfTopTokens", {"model.vocabulary": "wide"}),
    "entropy-of-small-numbers": Defect(
        "train_outputs:EntropyOfProbabilities", {"outputs.entropy_cold": "entropies that are not finite"}
    ),
    "loss-is-a-tensor": Defect(
        "train_outputs:LossIsATensor", {"length.shortest": "ForwardBackwardResult.loss is a Tensor"}
    ),
    "masks-in-place": Defect("train_outputs:MasksInPlace", {"steady.forward": "was changed"}),
    "outputs-with-more": Defect("train_outputs:OutputsWithMore", {"length.shortest": "asked for"}),
    "masked-is-all": Defect("train_outputs:MaskedIsAll", {"outputs.all_masked": "largest log-prob"}),
    "scored-before-pads": Defect("train_outputs:ScoredBeforePads", {"outputs.scores": "special tokens at the end"}),
    "log-probs-clamped": Defect("train_outputs:LogProbsClamped", {"outputs.unlikely": "largest difference"}),
    "shares-prefixes": Defect("train_outputs:SharesPrefixes", {"outputs.groups": "largest difference"}),
    "end-token-ends": Defect("train_outputs:EndTokenEnds", {"length.outputs": "largest difference"}),
    "small-row-numbers": Defect("train_outputs:SmallRowNumbers", {"length.many_rows": "largest difference"}),
    "tuples-only": Defect("train_outputs:TuplesOnly", {"steady.forward": "log_probs"}),
    "last-of-long-unread": Defect("train_outputs:LastOfLongUnread", {"length.outputs": "largest difference"}),
    "forward-in-half": Defect("train_outputs:ForwardInHalf", {"outputs.log_probs": "bfloat16"}),
    "forward-not-so-cold": Defect("train_outputs:ForwardNotSoCold", {"outputs.unlikely": "at temperature 0.03"}),
    "mean-of-means": Defect(
        "train_gradients:MeanOfMeans",
        {"gradient.micro_batches": "largest difference of loss", "gradient.calls": "loss"},
    ),
    "first-call-forgotten": Defect(
        "train_gradients:FirstCallForgotten", {"gradient.calls": "largest difference of loss"}
    ),
    "by-share-of-tokens": Defect("train_gradients:ByShareOfTokens", {"step.unlike_calls": "largest difference"}),
    "largest-calls-only": Defect("train_gradients:LargestCallsOnly", {"step.unlike_calls": "largest difference"}),
    "adds-in-half": Defect("train_gradients:AddsInHalf", {"model.accumulated": "equal micro-batches"}),
    "recomputed-without-input": Defect(
        "train_gradients:RecomputedWithoutInput", {"model.recomputed": "largest difference of loss"}
    ),
    "empty-call-clears": Defect("train_gradients:EmptyCallClears", {"steady.no_rows": "largest difference"}),
    "empty-call-is-none": Defect("train_gradients:EmptyCallIsNone", {"steady.no_rows": "losses of nothing"}),
    "forward-clears": Defect("train_gradients:ForwardClears", {"steady.forward": "largest difference"}),
    "recomputes-nothing": Defect("train_gradients:RecomputesNothing", {"model.recomputes": "over those without"}),
    "gradient-of-the-beginning": Defect("train_gradients:GradientOfTheBeginning", {"length.gradient": "gradient norm"}),
    "recomputed-at-one": Defect("train_gradients:RecomputedAtOne", {"model.recomputed": "masked"}),
    "calls-in-half": Defect("train_gradients:CallsInHalf", {"model.accumulated": "equal calls"}),
    "loss-of-the-last": Defect("train_gradients:LossOfTheLast", {"gradient.micro_batches": "difference of loss"}),
    "one-micro-batch": Defect("train_gradients:OneMicroBatch", {"gradient.micro_batches": "passes of 1 row"}),
    "gradient-mode-left": Defect(
        "train_gradients:GradientModeLeft", {"steady.forward": "gradients is left False by look"}
    ),
    "head-alone": Defect("train_gradients:HeadAlone", {"gradient.values": "difference of loss"}),
    "late-tokens-do-not-learn": Defect("train_gradients:LateTokensDoNotLearn", {"gradient": "difference of loss"}),
    "norms-not-measured": Defect("train_gradients:NormsNotMeasured", {"gradient": "gradient norm"}),
    "entropy-of-top-tokens": Defect("train_gradients:EntropyOfTopTokens", {"objective.both": "difference of loss"}),
    "last-name-only": Defect("train_objectives:LastNameOnly", {"objective.both": "log_probs"}),
    "tries-again": Defect("train_objectives:TriesAgain", {"objective.raises": "out of memory once"}),
    "maxima-from-zero": Defect("train_objectives:MaximaFromZero", {"objective.metrics": "maximum"}),
    "names-of-the-first": Defect("train_objectives:NamesOfTheFirst", {"objective.metrics": "not reported"}),
    "temperature-kept": Defect("train_objectives:TemperatureKept", {"objective.temperature": "largest difference"}),
    "gradient-at-one": Defect("train_objectives:GradientAtOne", {"objective.temperature": "largest difference"}),
    "entropy-detached": Defect("train_objectives:EntropyDetached", {"objective.both": "largest difference of loss"}),
    "foreign-fields-dropped": Defect("train_objectives:ForeignFieldsDropped", {"objective.given": "has no field"}),
    "meta-dropped": Defect("train_objectives:MetaDropped", {"objective.given": "lost"}),
    "inputs-changed": Defect("train_objectives:InputsChanged", {"objective.given": "changed"}),
    "last-row-again": Defect("train_objectives:LastRowAgain", {"objective.given": "rows"}),
    "groups-split": Defect("train_objectives:GroupsSplit", {"objective.whole_groups": "largest difference"}),
    "raised-and-kept": Defect("train_objectives:RaisedAndKept", {"objective.raises": "largest difference of loss"}),
    "raised-as-other": Defect("train_objectives:RaisedAsOther", {"objective.raises": "training failed"}),
    "earlier-calls-kept": Defect("train_objectives:EarlierCallsKept", {"objective.raises": "gradient norm"}),
    "unknown-is-zero": Defect("train_objectives:UnknownIsZero", {"objective.unknown_output": "accepted"}),
    "unknown-is-key-error": Defect("train_objectives:UnknownIsKeyError", {"objective.unknown_output": "logprobs"}),
    "passes-add-up": Defect("train_objectives:PassesAddUp", {"objective.given": "not their call's"}),
    "maxima-stay": Defect("train_objectives:MaximaStay", {"objective.metrics": "of an earlier call"}),
    "groups-by-attribute": Defect("train_objectives:GroupsByAttribute", {"objective.whole_groups": "not asked for"}),
    "failure-keeps-half": Defect("train_objectives:FailureKeepsHalf", {"objective.raises": "bfloat16"}),
    "metrics-in-float32": Defect("train_objectives:MetricsInFloat32", {"objective.metrics": "a large count and ones"}),
    "half-metrics": Defect("train_objectives:HalfMetrics", {"objective.given": "sum of identities"}),
    "maxima-added-up": Defect("train_objectives:MaximaAddedUp", {"objective.metrics": "difference of the maximum"}),
    "earlier-calls-stay": Defect("train_objectives:EarlierCallsStay", {"objective.raises": "gradient norm"}),
    "divisions-left-out": Defect("train_objectives:DivisionsLeftOut", {"objective.raises": "raises ZeroDivisionError"}),
    "watchdog-left": Defect("train_objectives:WatchdogLeft", {"objective.raises": "threads that an objective"}),
    "clipped-norm-told": Defect("train_optimizer:ClippedNormTold", {"step.clipping": "gradient norm"}),
    "schedule-one-late": Defect("train_optimizer:ScheduleOneLate", {"step.schedule": "of the rate, constant"}),
    "steps-on-nan": Defect("train_optimizer:StepsOnNaN", {"step.skipped": "largest difference"}),
    "betas-fixed": Defect("train_optimizer:BetasFixed", {"step.settings": "short memory"}),
    "second-beta-fixed": Defect("train_optimizer:SecondBetaFixed", {"step.settings": "short memory"}),
    "eps-at-most": Defect("train_optimizer:EpsAtMost", {"step.settings": "large eps"}),
    "decay-at-most": Defect("train_optimizer:DecayAtMost", {"step.settings": "strong decay"}),
    "decay-everywhere": Defect("train_optimizer:DecayEverywhere", {"step.settings": "largest difference"}),
    "decay-in-gradient": Defect("train_optimizer:DecayInGradient", {"step.settings": "largest difference"}),
    "clips-each-tensor": Defect("train_optimizer:ClipsEachTensor", {"step.clipping_calls": "limit"}),
    "clips-each-call": Defect("train_optimizer:ClipsEachCall", {"step.clipping_calls": "limit"}),
    "clips-nothing": Defect("train_optimizer:ClipsNothing", {"step.zero_gradient": "skipped, clipped"}),
    "skips-zero": Defect("train_optimizer:SkipsZero", {"step.zero_gradient": "skipped"}),
    "skip-forgets": Defect("train_optimizer:SkipForgets", {"step.skipped_later": "largest difference"}),
    "skip-keeps-gradients": Defect("train_optimizer:SkipKeepsGradients", {"step.skipped_later": "largest difference"}),
    "reset-keeps-moments": Defect("train_optimizer:ResetKeepsMoments", {"step.reset": "gradient norm"}),
    "reset-keeps-schedule": Defect("train_optimizer:ResetKeepsSchedule", {"step.reset": "rate"}),
    "trains-in-half": Defect("train_optimizer:TrainsInHalf", {"model.small_steps": "movement"}),
    "idle-steps-uncounted": Defect("train_optimizer:IdleStepsUncounted", {"step.idle": "difference of the rate"}),
    "idle-steps-skipped": Defect("train_optimizer:IdleStepsSkipped", {"step.idle": "steps that were skipped"}),
    "one-clip": Defect("train_optimizer:OneClip", {"together": "largest difference of weights, beside a trained one"}),
    "any-schedule": Defect("train_optimizer:AnySchedule", {"refusals.settings": "a schedule that does not exist"}),
    "reset-rounds": Defect("train_optimizer:ResetRounds", {"step.reset": "a reset made, bfloat16"}),
    "moments-unclipped": Defect("train_optimizer:MomentsUnclipped", {"step.clipping": "largest difference"}),
    "schedule-counts-calls": Defect("train_optimizer:ScheduleCountsCalls", {"steady.no_rows": "largest difference"}),
    "gives-up-skipping": Defect("train_optimizer:GivesUpSkipping", {"step.skipped_later": "in a row"}),
    "reset-reads": Defect("train_optimizer:ResetReads", {"step.reset": "gradient norm"}),
    "embeddings-do-not-decay": Defect("train_optimizer:EmbeddingsDoNotDecay", {"step.settings": "gradient norm"}),
    "third-call-dropped": Defect("train_optimizer:ThirdCallDropped", {"step.clipping_calls": "largest difference"}),
    "clips-a-little-more": Defect("train_optimizer:ClipsALittleMore", {"step.clipping": "largest difference"}),
    "warms-up-early": Defect("train_optimizer:WarmsUpEarly", {"step.schedule": "difference of the rate"}),
    "begins-again-at-the-end": Defect(
        "train_optimizer:BeginsAgainAtTheEnd", {"step.schedule": "difference of the rate"}
    ),
    "floor-is-zero": Defect("train_optimizer:FloorIsZero", {"step.schedule": "difference of the rate"}),
    "lr-of-the-next": Defect("train_optimizer:LrOfTheNext", {"step.schedule": "difference of the rate"}),
    "infinity-passes": Defect(
        "train_optimizer:InfinityPasses", {"step.infinite": "a step with a gradient that is not finite"}
    ),
    "no-limit-no-check": Defect("train_optimizer:NoLimitNoCheck", {"step.skipped": "skipped"}),
    "cosine-comes-back": Defect(
        "train_optimizer:CosineComesBack", {"step.schedule_end": "difference of the rate, cosine"}
    ),
    "reset-keeps-betas": Defect("train_optimizer:ResetKeepsBetas", {"step.reset": "gradient norm"}),
    "moments-forgotten": Defect(
        "train_checkpoints:MomentsForgotten", {"checkpoint.resume": "largest difference of weights"}
    ),
    "schedule-forgotten": Defect(
        "train_checkpoints:ScheduleForgotten", {"checkpoint.schedule": "largest difference of rates"}
    ),
    "damage-loaded": Defect("train_checkpoints:DamageLoaded", {"checkpoint.damaged": "nothing in it"}),
    "first-keeps-moments": Defect("train_checkpoints:FirstKeepsMoments", {"checkpoint.first": "trained"}),
    "first-cannot-be-saved": Defect("train_checkpoints:FirstCannotBeSaved", {"checkpoint.first": "no moments"}),
    "pending-kept": Defect("train_checkpoints:PendingKept", {"checkpoint.into_trained": "older after"}),
    "loads-defaults": Defect("train_checkpoints:LoadsDefaults", {"checkpoint.settings": "short memory"}),
    "loads-without-decay": Defect("train_checkpoints:LoadsWithoutDecay", {"checkpoint.settings": "weights"}),
    "steps-of-adam-forgotten": Defect("train_checkpoints:StepsOfAdamForgotten", {"checkpoint.settings": "weights"}),
    "fits-loosely": Defect("train_checkpoints:FitsLoosely", {"checkpoint.other_model": "was accepted"}),
    "copies-then-checks": Defect("train_checkpoints:CopiesThenChecks", {"checkpoint.other_model": "weights"}),
    "refuses-and-forgets": Defect("train_checkpoints:RefusesAndForgets", {"checkpoint.missing_file": "weights"}),
    "steps-guessed": Defect("train_checkpoints:StepsGuessed", {"checkpoint.missing_file": "state.json missing"}),
    "full-path": Defect("train_checkpoints:FullPath", {"checkpoint.folder": "is not there"}),
    "pickles": Defect("train_checkpoints:Pickles", {"checkpoint.folder": "pickles"}),
    "trains-the-file": Defect("train_checkpoints:TrainsTheFile", {"checkpoint.folder": "changed meanwhile"}),
    "save-rounds": Defect("train_checkpoints:SaveRounds", {"steady.save": "largest difference"}),
    "half-checkpoint": Defect("train_checkpoints:HalfCheckpoint", {"checkpoint.bfloat16": "weights"}),
    "head-without-moments": Defect("train_checkpoints:HeadWithoutMoments", {"checkpoint.heads": "weights"}),
    "random-state-forgotten": Defect(
        "train_checkpoints:RandomStateForgotten", {"checkpoint.random_state": "numbers drawn"}
    ),
    "loaded-learns-twice": Defect("train_checkpoints:LoadedLearnsTwice", {"checkpoint.settings": "weights"}),
    "reset-behind-a-load": Defect("train_checkpoints:ResetBehindALoad", {"life": "life 2"}),
    "head-of-before": Defect("train_checkpoints:HeadOfBefore", {"life.heads": "largest difference of loss, life"}),
    "lacking-moments-are-zero": Defect(
        "train_checkpoints:LackingMomentsAreZero", {"checkpoint.missing_file": "faults"}
    ),
    "saved-in-a-thread": Defect(
        "train_checkpoints:SavedInAThread", {"checkpoint.folder": "`save_checkpoint` returned"}
    ),
    "marks-the-folder": Defect("train_checkpoints:MarksTheFolder", {"checkpoint.only_reads": "files"}),
    "schedule-from-adam": Defect(
        "train_checkpoints:ScheduleFromAdam", {"checkpoint.idle": "of the rate, behind one and an idle step"}
    ),
    "copy-stays-old": Defect("train_checkpoints:CopyStaysOld", {"checkpoint.bfloat16": "weights"}),
    "saves-later": Defect("train_checkpoints:SavesLater", {"checkpoint.settings": "weights"}),
    "moments-in-half": Defect("train_checkpoints:MomentsInHalf", {"checkpoint.resume": "difference of weights"}),
    "copy-is-stale": Defect("train_checkpoints:CopyIsStaleAfterLoad", {"checkpoint.bfloat16": "difference of weights"}),
    "beside-the-folder": Defect("train_checkpoints:BesideTheFolder", {"checkpoint.only_reads": "files beside it"}),
    "saves-behind-your-back": Defect("train_checkpoints:SavesBehindYourBack", {"checkpoint.on_disk": "returned"}),
    "checkpoint-errors-lost": Defect(
        "train_checkpoints:CheckpointErrorsLost", {"checkpoint.cannot_write": "was accepted"}
    ),
    "steps-of-eight-bits": Defect(
        "train_checkpoints:StepsOfEightBits", {"checkpoint.many_steps": "largest difference of weights"}
    ),
    "export-of-the-first": Defect("train_exports:ExportOfTheFirst", {"export": "largest difference of weights"}),
    "no-tokenizer": Defect("train_exports:NoTokenizer", {"export.files": "tokenizer"}),
    "plain-config": Defect("train_exports:PlainConfig", {"export.files": "settings that differ"}),
    "head-left-out": Defect("train_exports:HeadLeftOut", {"export.value_head": "score.weight"}),
    "wide-export": Defect("train_exports:WideExport", {"export.bfloat16": "weights"}),
    "tied-untied-in-export": Defect("train_exports:TiedUntiedInExport", {"export.tied": "weights"}),
    "exports-once": Defect("train_exports:ExportsOnce", {"export.again": "begun anew"}),
    "export-cuts-off": Defect("train_exports:ExportCutsOff", {"export.bfloat16": "difference of weights"}),
    "cannot-save-twice": Defect("train_exports:CannotSaveTwice", {"export.again": "File exists"}),
    "export-rounds-the-masters": Defect("train_exports:ExportRoundsTheMasters", {"steady.kinds": "differ, bfloat16"}),
    "export-errors-lost": Defect("train_exports:ExportErrorsLost", {"export.cannot_write": "was accepted"}),
    "export-of-a-step": Defect("train_exports:ExportOfAStep", {"export.reset": "largest difference of weights"}),
    "dropout-stays": Defect("train_models:DropoutStays", {"model.dropout": "largest difference"}),
    "dropout-when-recomputed": Defect("train_models:DropoutWhenRecomputed", {"model.dropout": "recomputed"}),
    "vocabulary-padded": Defect("train_models:VocabularyPadded", {"model.families": "llama"}),
    "norm-eps-fixed": Defect("train_models:NormEpsFixed", {"model.families": "llama"}),
    "tied-cut": Defect("train_models:TiedCut", {"model.tied": "largest difference of loss"}),
    "tied-parted": Defect("train_models:TiedParted", {"model.tied": "tied"}),
    "softmax-in-half": Defect("train_models:SoftmaxInHalf", {"model.bfloat16": "bfloat16 numbers"}),
    "drawn-by-process": Defect("train_models:DrawnByProcess", {"model.initial": "two random starts"}),
    "begins-rounded": Defect("train_models:BeginsRounded", {"model.initial": "from the checkpoint"}),
    "heads-in-half": Defect("train_models:HeadsInHalf", {"model.bfloat16": "faults, values"}),
    "norms-stay-old": Defect("train_models:NormsStayOld", {"model.bfloat16_forward": "difference of log_probs"}),
    "trained-uncapped": Defect("train_models:LogitsUncapped", {"model.capped": "capped"}),
    "trained-unscaled": Defect("train_models:PositionsUnscaled", {"model.scaled_positions": "llama3 positions"}),
    "window-one-too-wide": Defect("train_models:WindowOneTooWide", {"model.windows": "windows"}),
    "yarn-without-factor": Defect("train_models:AttentionUnscaled", {"model.scaled_positions": "yarn positions"}),
    "seed-of-its-own": Defect("train_models:SeedOfItsOwn", {"model.seeds": "two seeds, random"}),
    "rotary-in-bfloat16": Defect(
        "train_models:RotaryInBfloat16", {"model.bfloat16_positions": "difference of late tokens"}
    ),
    "offload-absent": Defect(
        "train_offload:OffloadAbsent",
        {"registration.capabilities": "offload is claimed", "offload": "does not support"},
    ),
    "gradients-lost": Defect("train_offload:GradientsLost", {"offload": "largest difference of weights"}),
    "moments-stay-away": Defect("train_offload:MomentsStayAway", {"steady.offload": "largest difference"}),
    "offload-needs-moments": Defect("train_offload:OffloadNeedsMoments", {"steady.offload": "exp_avg"}),
    "frozen-does-not-return": Defect(
        "train_offload:FrozenDoesNotReturn", {"steady.offload_frozen": "largest difference"}
    ),
    "offloads-what-steps-changed": Defect(
        "train_offload:OffloadsWhatStepsChanged", {"steady.offload_changed": "changed by a checkpoint"}
    ),
    "moments-swapped": Defect("train_offload:MomentsSwapped", {"steady.offload": "largest difference"}),
    "copies-for-shards": Defect("train_layouts:CopiesForShards", {"layout": "shards that are copies"}),
    "one-tensor-frozen": Defect(
        "train_layouts:OneTensorFrozen",
        {
            "layout": "a step did not change",
            **dict.fromkeys(
                (*(f"gradient{part}" for part in COMPARED), "step.clipping", "step.schedule"), "difference of"
            ),
        },
    ),
    "layout-counts": Defect("train_layouts:LayoutCounts", {"steady.layout": "the layout changed"}),
    "shards-of-another-type": Defect("train_layouts:ShardsOfAnotherType", {"steady.layout": "another dtype"}),
    "node-unknown": Defect("train_layouts:NodeUnknown", {"layout.place": "another node"}),
    "tied-the-other-way": Defect("train_layouts:TiedTheOtherWay", {"model.tied": "not in the layout"}),
    "says-its-node-only": Defect("train_layouts:SaysItsNodeOnly", {"layout": "node:pid"}),
    "layout-says-what-computes": Defect("train_layouts:LayoutSaysWhatComputes", {"layout.kinds": "faults, bfloat16"}),
    "leaks": Defect("train_resources:Leaks", {"memory": "MiB that 15 steps added"}),
    "leaves-memory": Defect("train_resources:LeavesMemory", {"close": "shared memory"}),
    "seeds-the-process": Defect("train_resources:SeedsTheProcess", {"random_state": "moved on"}),
    "shuffles": Defect("train_resources:Shuffles", {"random_state": "moved on"}),
    "leaves-files": Defect("train_resources:LeavesFiles", {"resources": "left open"}),
    "leaves-threads": Defect("train_resources:LeavesThreads", {"resources": "threads"}),
    "optimizer-folder-stays": Defect("train_resources:OptimizerFolderStays", {"close": "temporary folder"}),
    "all-the-cores": Defect("train_resources:AllTheCores", {"place.threads": "threads"}),
    "balances-experts": Defect("train_models:BalancesExperts", {"model.experts": "experts, rows 1"}),
    "locked-by-sync": Defect("train_checkpoints:LockedBySync", {"steady.save": "the sync that was half way"}),
    "half-does-not-decay": Defect(
        "train_half_precision:HalfDoesNotDecay", {"model.bfloat16_steps": "change of weights"}
    ),
    "half-default-betas": Defect(
        "train_half_precision:HalfDefaultBetas", {"model.bfloat16_steps": "change of weights"}
    ),
    "half-default-eps": Defect("train_half_precision:HalfDefaultEps", {"model.bfloat16_steps": "difference of"}),
    "half-unscheduled": Defect(
        "train_half_precision:HalfUnscheduled", {"model.bfloat16_steps": "difference of a rate"}
    ),
    "half-tells-clipped-norm": Defect(
        "train_half_precision:HalfTellsClippedNorm", {"model.bfloat16_steps": "difference of a norm"}
    ),
    "half-steps-on-nan": Defect("train_half_precision:HalfStepsOnNaN", {"model.bfloat16_steps": "was not skipped"}),
    "half-mean": Defect("train_half_precision:HalfMean", {"model.bfloat16_steps": "difference of a norm"}),
    "half-at-one": Defect("train_half_precision:HalfAtOne", {"model.bfloat16_steps": "difference of a norm"}),
    "half-unmasked": Defect("train_half_precision:HalfUnmasked", {"model.bfloat16_steps": "difference of a loss"}),
    "half-entropy-detached": Defect(
        "train_half_precision:HalfEntropyDetached", {"model.bfloat16_steps": "difference of a norm"}
    ),
    "half-head-scaled": Defect("train_half_precision:HalfHeadScaled", {"model.bfloat16_steps": "values"}),
    "buffers-in-models-dtype": Defect(
        "train_exports:BuffersInModelsDtype", {"model.buffers": "buffers of another dtype, exported, bfloat16"}
    ),
    "buffers-left-out": Defect("train_exports:BuffersLeftOut", {"model.buffers": "buffers that are not exported"}),
    "buffers-not-served": Defect(
        "train_layouts:BuffersNotServed", {"model.buffers": "no rank holds", "life.models": "routed"}
    ),
    "buffers-rounded": Defect("train_models:BuffersRounded", {"model.buffers": "another dtype, held, bfloat16"}),
    "buffers-are-zero": Defect(
        "train_models:BuffersAreZero", {"model.buffers": "with other values", "life.models": "routed"}
    ),
    "recomputation-draws": Defect("train_resources:RecomputationDraws", {"random_state": "random weights: 1"}),
    "new-head-draws": Defect("train_resources:NewHeadDraws", {"random_state": "a new head of values: 1"}),
    "export-draws": Defect("train_resources:ExportDraws", {"random_state": "moved on"}),
    "reset-seeds": Defect("train_resources:ResetSeeds", {"random_state": "moved on"}),
    "hook-per-pass": Defect("train_resources:HookPerPass", {"resources.calls": "objects that each round left"}),
    "log-per-export": Defect("train_resources:LogPerExport", {"resources.calls": "FileIO"}),
    "thread-per-offload": Defect("train_resources:ThreadPerOffload", {"resources.calls": "lock"}),
    "loaded-files-stay": Defect("train_resources:LoadedFilesStay", {"resources.calls": "torch.Tensor"}),
    "skip-is-zero": Defect("train_optimizer:SkipIsZero", {"step.skipped_later": "which is finite"}),
    "last-position-unread": Defect("train_outputs:LastPositionUnread", {"length.outputs": "largest difference"}),
    "row-fields-flat": Defect("train_objectives:RowFieldsFlat", {"objective.given": "fields that are not their row's"}),
    "loss-in-float32": Defect("train_objectives:LossInFloat32", {"objective.metrics": "loss of a large count"}),
    "maxima-in-float32": Defect("train_objectives:MaximaInFloat32", {"objective.metrics": "maximum of large counts"}),
    "lengths-of-eight-bits": Defect("train_outputs:LengthsOfEightBits", {"length.budget": "passes over their limit"}),
    "known-settings-only": Defect("train_exports:KnownSettingsOnly", {"export.files": "settings that differ"}),
    "one-cursor": Defect("train_layouts:OneCursor", {"steady.layout": "two iterations of shards"}),
    "busy-until-the-end": Defect("train_layouts:BusyUntilTheEnd", {"steady.layout": "are being read"}),
    "zero-is-default": Defect("train_optimizer:ZeroIsDefault", {"step.settings": "no memory"}),
    "narrow-fields": Defect("train_objectives:NarrowFields", {"objective.given": "bfloat16"}),
    "twins-share-a-mask": Defect("train_outputs:TwinsShareAMask", {"outputs.mask": "same tokens, other masks"}),
    "lends-its-cache": Defect("train_outputs:LendsItsCache", {"life": "is not finite"}),
    "linked-to-the-last": Defect(
        "train_checkpoints:LinkedToTheLast", {"checkpoint.into_trained": "of another run, saved again"}
    ),
    "named-as-its-source": Defect("train_exports:NamedAsItsSource", {"export.value_head": "missing or strange"}),
    "settings-of-the-saver": Defect(
        "train_checkpoints:SettingsOfTheSaver", {"checkpoint.settings": "saved with other settings"}
    ),
    "remembers-outputs": Defect("train_outputs:RemembersOutputs", {"frozen": "largest difference"}),
    "trains-what-lacks": Defect("train_folders:TrainsWhatLacks", {"refusals": "lack a tensor"}),
    "any-size": Defect("train_ranks:AnySize", {"refusals": "2 ranks"}),
    "frozen-read-again": Defect("train_offload:FrozenReadAgain", {"life.frozen": "layout changed"}),
    "default-dtype-left": Defect("train_resources:DefaultDtypeLeft", {"refusals": "default dtype"}),
    "keeps-batches": Defect("train_resources:KeepsBatches", {"memory": "objects kept"}),
}
RANKS_CAPABILITIES = TRAIN_CAPABILITIES | {Capability.DATA_PARALLEL, Capability.RESHARD_ON_LOAD}
RANKS = {
    "own-deadline": Defect("train_ranks:OwnDeadline", {"ranks.deadline": "seconds of a rank that waits"}),
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
    "ties-of-the-first": Defect("train_ranks:TiesOfTheFirst", {"ranks.tied": "that a rank does not list"}),
    "loads-rank-zero": Defect("train_ranks:LoadsRankZero", {"ranks.checkpoint": "weights"}),
    "raised-on-rank-zero": Defect("train_ranks:RaisedOnRankZero", {"ranks.raises": "weights"}),
    "own-temperature": Defect("train_ranks:OwnTemperature", {"ranks.settings": "temperature"}),
    "least-step": Defect("train_ranks:LeastStep", {"ranks.checkpoint_heads": "difference of weights"}),
    "random-state-of-rank-zero": Defect("train_ranks:RandomStateOfRankZero", {"ranks.random_state": "numbers drawn"}),
    "seed-of-the-world": Defect("train_ranks:SeedOfTheWorld", {"ranks.initial": "difference from one rank, random"}),
    "idle-rank-drops": Defect("train_ranks:IdleRankDrops", {"life.ranks": "largest difference"}),
    "every-rank-is-first": Defect("train_ranks:EveryRankIsFirst", {"ranks.whole_groups": "largest difference"}),
    "waits-in-layout": Defect("train_ranks:WaitsInLayout", {"ranks.alone": ""}),
    "resets-one": Defect("train_ranks:ResetsOne", {"ranks.reset": "largest difference"}),
    "stays-in-group": Defect("train_ranks:StaysInGroup", {"ranks.close": "still in a process group"}),
    "raises-alone": Defect("train_ranks:RaisesAlone", {"ranks.raises_one": "raised nothing"}),
    "steps-of-rank-zero": Defect("train_ranks:StepsOfRankZero", {"ranks.checkpoint": "weights"}),
    "cuts-again": Defect("train_ranks:CutsAgain", {"ranks.whole_groups": "largest difference"}),
    "sums-by-place": Defect("train_ranks:SumsByPlace", {"ranks.metrics": "metric"}),
    "own-overflow": Defect("train_ranks:OwnOverflow", {"ranks.infinite": "was not skipped"}),
    "half-ranks-decay-twice": Defect(
        "train_half_precision:HalfRanksDecayTwice", {"ranks.bfloat16_steps": "change of weights"}
    ),
    "buffers-of-rank-zero": Defect("train_ranks:BuffersOfRankZero", {"ranks.buffers": "with other values"}),
    "maxima-of-nothing": Defect("train_ranks:MaximaOfNothing", {"ranks.metrics": "largest difference of a metric"}),
    "reduces-in-half": Defect("train_ranks:ReducesInHalf", {"ranks.gradient": "of a tensor"}),
}
LIVES = {
    "critics-step-on-nan": Defect("train_lives:CriticsStepOnNaN", {"life.heads": "not skipped"}),
    "head-keeps-gradient": Defect("train_lives:HeadKeepsGradient", {"life.heads": "difference of loss"}),
    "new-head-stays": Defect("train_lives:NewHeadStays", {"life.fresh": "a new head of values"}),
    "random-does-not-decay": Defect("train_lives:RandomDoesNotDecay", {"life.fresh": "largest difference"}),
    "routers-of-critics": Defect("train_lives:RoutersOfCritics", {"life.heads": "experts"}),
    "saves-without-gradients": Defect("train_lives:SavesWithoutGradients", {"steady.half_awake": "norms that differ"}),
    "layout-of-what-is-here": Defect("train_lives:LayoutOfWhatIsHere", {"steady.half_awake": "the layout changed"}),
    "onloads-everything": Defect("train_lives:OnloadsEverything", {"steady.half_awake": "norms that differ"}),
    "exports-are-steps": Defect("train_lives:ExportsAreSteps", {"life": "largest difference"}),
}
RANK_LIVES = {
    "ranks-look-roughly": Defect("train_lives:RanksLookRoughly", {"life.ranks": "between steps"}),
    "ranks-export-once": Defect("train_lives:RanksExportOnce", {"life.ranks": "exported with other values"}),
    "skipped-rate-moves": Defect("train_lives:SkippedRateMoves", {"life.ranks": "learning rate"}),
    "own-file-only": Defect("train_lives:OwnFileOnly", {"ranks.damaged": "was accepted"}),
}
RANKS |= RANK_LIVES
TRAIN = {**ONE_RANK, **LIVES, **TRAIN_STATES, **RANKS}

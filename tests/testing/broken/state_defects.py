"""Engines that are wrong about a model's folder, the sizes that they are asked for, or the state that they are in."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_FOLDERS = {
    "runs-code": Defect("rollout_folders:RunsCode", {"model.tied": "code of the model was run"}),
    "first-file-alone": Defect("rollout_folders:FirstFile", {"model.tied": "mean difference of log-probs"}),
    "dtype-of-files": Defect("rollout_folders:DtypeOfFiles", {"model.configuration": "wrong samples"}),
    "dropout-served": Defect("rollout_folders:Dropout", {"model.configuration": "wrong samples"}),
    "suppresses": Defect("rollout_folders:Suppresses", {"model.configuration": "left out by the filters"}),
    "new-tokens-of-settings": Defect("rollout_folders:NewTokensOfSettings", {"model.configuration": "tokens, finish"}),
    "room-in-blocks": Defect("rollout_folders:RoomInBlocks", {"model.configuration": "a prompt of 508 tokens"}),
    "one-row-forgets": Defect("rollout_folders:OneRowForgets", {"model.configuration": "wrong samples, sliding"}),
    "more-than-128": Defect("rollout_folders:MoreThan128", {"replicas": "wrong samples of many at once"}),
    "reads-anyway": Defect("rollout_folders:ReadsAnyway", {"update.first": "No such file"}),
    "takes-any-argument": Defect("rollout_folders:TakesAnyArgument", {"initialize.refusals": "an argument that"}),
    "one-stage": Defect("rollout_folders:OneStage", {"initialize.refusals": "pp_size 0"}),
    "serves-what-lacks": Defect("rollout_folders:ServesWhatLacks", {"initialize.refusals": "lack a tensor"}),
    "serves-heads": Defect("rollout_folders:ServesHeads", {"initialize.refusals": "a value head"}),
}
ROLLOUT_STATES = {
    "closes-awake": Defect("rollout_states:ClosesAwake", {"replicas": "that sleeps cannot be closed"}),
    "closes-unpaused": Defect("rollout_states:ClosesUnpaused", {"update.first": "that is paused cannot be closed"}),
    "layout-awake": Defect("rollout_states:LayoutAwake", {"sleep.update": "moments at which the layout was another"}),
    "looks-at-first": Defect("rollout_states:LooksAtFirst", {"update.not_finite": "behind a token of no number"}),
    "first-of-two": Defect("rollout_states:FirstOfTwo", {"pause.updates": "versions that sampled nothing, two"}),
    "aborts-with-weights": Defect("rollout_states:AbortsWithWeights", {"abort.without_weights": "came in the pause"}),
    "forecast-without-norms": Defect(
        "rollout_folders:Right", {"forecast": "differences from layout 0"}, forecast="rollout_folders:without_norms"
    ),
    "resumes-unpaused": Defect("rollout_states:ResumesTwice", {"pause": "samples that a pause changed"}),
}
ROLLOUT_NESTED = {
    "wake-ends-the-pause": Defect("rollout_nested:WakeEndsThePause", {"life": "tokens that came in a pause"}),
    "abort-waits-for-update": Defect("rollout_nested:AbortWaitsForUpdate", {"life": "abort did not return during"}),
    "source-in-inference-mode": Defect("rollout_nested:SourceInInferenceMode", {"life": "inference mode is True"}),
    "update-seeds": Defect("rollout_nested:UpdateSeeds", {"life": "advanced the generator of torch"}),
    "sleep-stops-gradients": Defect("rollout_nested:SleepStopsGradients", {"life": "gradients is left False"}),
    "sleep-needs-weights": Defect("rollout_nested:SleepNeedsWeights", {"life": "no weights to keep"}),
    "sleeps-once-served": Defect("rollout_nested:SleepsOnceServed", {"update.first": "no weights to keep"}),
    "layout-once-served": Defect("rollout_nested:LayoutOnceServed", {"update.first": "another layout with"}),
    "nans-of-recomputation": Defect("rollout_nested:NaNsOfRecomputation", {"life": "tokens of weights that are not"}),
    "no-requests-no-call": Defect("rollout_nested:NoRequestsNoCall", {"samples": "max()"}),
    "receipt-of-numpy": Defect("rollout_nested:ReceiptOfNumpy", {"versions": "it contains numpy"}),
    "layout-of-torch": Defect("rollout_nested:LayoutOfTorch", {"layout": "it contains torch.Size"}),
    "count-of-numpy": Defect("rollout_nested:CountOfNumpy", {"samples": "num_decoded is int64"}),
    "stops-in-whole-tokens": Defect("rollout_nested:StopsInWholeTokens", {"model.tied": "parts of characters"}),
    "host-copy-of-numpy": Defect("rollout_nested:HostCopyOfNumpy", {"model.tied": "BFloat16"}),
    "biases-lost-in-sleep": Defect("rollout_nested:BiasesLostInSleep", {"model.experts": "kept in a sleep"}),
    "gradients-of-sources": Defect("rollout_nested:GradientsOfSources", {"update.strided": "requires grad"}),
    "seeds-of-63-bits": Defect("rollout_nested:SeedsOf63Bits", {"seed.values": "seeds with the same tokens"}),
    "runs-in-a-list": Defect("rollout_nested:RunsInAList", {"samples": "no tuple of VersionRun"}),
    "all-resume-at-once": Defect("rollout_nested:AllResumeAtOnce", {"max_running": "behind a pause"}),
    "slots-freed-twice": Defect("rollout_nested:SlotsFreedTwice", {"life": "samples at once after"}),
    "left-in-a-pause-comes-back": Defect("rollout_nested:LeftInAPauseComesBack", {"life": "samples at once after"}),
}
TRAIN_STATES = {
    "counts-to-a-few": Defect("train_optimizer:CountsToAFew", {"checkpoint.many_steps": "difference of the last step"}),
    "error-retold": Defect("train_objectives:ErrorRetold", {"objective.raises": "required positional argument"}),
    "loss-in-autocast": Defect("train_objectives:LossInAutocast", {"objective.given": "modes of torch"}),
    "brackets-are-patterns": Defect(
        "train_checkpoints:BracketsArePatterns", {"checkpoint.first": "has no safetensors"}
    ),
    "one-pool-for-all": Defect("train_offload:OnePoolForAll", {"together": "largest difference of weights"}),
    "swap-files-stay": Defect("train_offload:SwapFilesStay", {"close": "temporary folder"}),
    "trained-with-code": Defect("train_folders:RunsCode", {"model.code": "code of the model was run"}),
    "trained-first-file": Defect("train_folders:FirstFile", {"model.tied": "largest difference"}),
    "trained-dtype-of-files": Defect("train_folders:DtypeOfFiles", {"model.families": "largest difference"}),
    "index-of-the-source": Defect("train_folders:IndexOfTheSource", {"export.tied": "files of its index"}),
    "template-lost": Defect("train_folders:TemplateLost", {"export.files": "chat_template.jinja"}),
    "trained-any-argument": Defect("train_folders:TakesAnyArgument", {"refusals.settings": "an argument that"}),
    "any-dtype": Defect("train_folders:AnyDtype", {"refusals.settings": "a dtype that there is not"}),
    "no-token-limit": Defect("train_folders:NoTokenLimit", {"refusals.settings": "micro_batch_tokens 0"}),
    "skips-by-the-loss": Defect("train_states:SkipsByTheLoss", {"step.loss_alone": "steps that were skipped"}),
    "saves-rounded": Defect("train_states:SavesRounded", {"shards.beside_saves": "others meanwhile"}),
    "passes-unreported": Defect("train_states:PassesUnreported", {"progress": "reports of 6 passes"}),
    "values-tempered": Defect("train_states:ValuesTempered", {"length.values": "difference of loss"}),
    "heads-in-half": Defect("train_states:HeadsInHalf", {"model.small_steps": "movement of the last layer"}),
    "greedy-temperature": Defect("train_states:GreedyTemperature", {"objective.unknown_output": "temperature 0.0 was"}),
    "tied-copy-stays": Defect("train_states:TiedCopyStays", {"model.bfloat16_forward": "log_probs, tied"}),
    "recomputed-in-half": Defect("train_states:RecomputedInHalf", {"model.recomputed": "bfloat16"}),
}
SHARDING_CHAINS = {
    "deadline-of-all": Defect("sharding_failures:DeadlineOfAll", {"sync.slow": "did not arrive within"}),
    "dead-source-unproven": Defect("sharding_failures:DeadSourceUnproven", {"sync.failures": "WorkerError"}),
    "receipts-kept": Defect("sharding_failures:ReceiptsKept", {"sync.failures": "boxes that differ"}),
    "weights-of-long-ago": Defect("sharding_changes:WeightsOfLongAgo", {"sync.life": "weights of before"}),
    "forgets-unexpected": Defect("sharding_changes:ForgetsUnexpected", {"sync.life": "wrong"}),
    "trusts-the-unchanged": Defect("sharding_changes:TrustsTheUnchanged", {"sync.life": "was accepted"}),
    "first-answers": Defect("sharding_chains:FirstAnswers", {"sync.proven.first": "of a chain"}),
    "load-without-chains": Defect("sharding_chains:LoadWithoutChains", {"plan.fields": "relayed_load"}),
    "forwards-to-unlike": Defect("sharding_chains:ForwardsToUnlike", {"plan.fields": "which has other needs"}),
}

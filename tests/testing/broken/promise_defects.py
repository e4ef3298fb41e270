"""The broken engines of promises that no requirement looked at before, and the requirements that each must fail."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_PROMISES = {
    "runs-more": Defect("rollout_promises:RunsMore", {"max_running": "samples at once, one call"}),
    "counts-prompts": Defect("rollout_promises:CountsPrompts", {"num_decoded.exact": "more than came, long prompts"}),
    "kv-of-last-call": Defect("rollout_promises:KvOfLastCall", {"kv_used": "share behind few"}),
    "kv-in-percent": Defect("rollout_promises:KvInPercent", {"kv_used": "answers that are no share"}),
    "looks-wait": Defect("rollout_promises:LooksWait", {"looks.cheap": "that an update held up"}),
    "never-turns": Defect("rollout_promises:NeverTurns", {"event_loop.turns": "turns of the event loop"}),
    "shared-tokens": Defect("rollout_promises:SharedTokens", {"outputs.own": "wrong samples, call"}),
    "sorts-requests": Defect("rollout_promises:SortsRequests", {"requests.own": "has no attribute 'sort'"}),
    "refuses-late": Defect("rollout_promises:RefusesLate", {"refusals.nothing": "samples of a call with"}),
    "pauses-at-home": Defect("rollout_promises:PausesAtHome", {"threads": "tokens that came in a pause"}),
    "pauses-what-runs": Defect("rollout_promises:PausesWhatRuns", {"pause.idle": "tokens that came in the pause"}),
    "version-in-seed": Defect("rollout_promises:VersionInSeed", {"pause.same_weights": "samples that it changed"}),
    "aborts-in-a-while": Defect("rollout_promises:AbortsInAWhile", {"abort.at_once": "tokens decoded behind it"}),
    "tied-unsaid": Defect("rollout_promises:TiedUnsaid", {"model.tied": "other names of the tied tensor"}),
    "served-as-float32": Defect("rollout_promises:ServedAsFloat32", {"model.tied": "bytes"}),
    "rounded-log-probs": Defect("rollout_promises:RoundedLogProbs", {"model.tied": "that are bfloat16 numbers"}),
    "other-errors": Defect("rollout_promises:OtherErrors", {"initialize.refusals": "OSError"}),
    "elsewhere": Defect("rollout_promises:Elsewhere", {"layout.place": "that are not node:pid"}),
    "counts-pieces": Defect("rollout_promises:CountsPieces", {"update.receipts": "tensors, pieces"}),
    "gathers-first": Defect("rollout_promises:GathersFirst", {"update.one_at_a_time": "held beside its weights"}),
    "covers-by-count": Defect("rollout_promises:CoversByCount", {"update.damaged": "a piece came twice"}),
    "size-in-seed": Defect("rollout_promises:SizeInSeed", {"replicas": "another replica changed"}),
    "run-in-seed": Defect("rollout_promises:RunInSeed", {"update.first": "the seed of the run changed"}),
    "wide-indices": Defect("rollout_promises:WideIndices", {"abort.exact": "expected int"}),
}
TRAIN_PROMISES = {
    "one-clip": Defect("train_promises:OneClip", {"together": "largest difference of weights, beside a trained one"}),
    "loss-is-a-tensor": Defect(
        "train_promises:LossIsATensor", {"length.shortest": "ForwardBackwardResult.loss is a Tensor"}
    ),
    "masks-in-place": Defect("train_promises:MasksInPlace", {"steady.forward": "was changed"}),
    "outputs-with-more": Defect("train_promises:OutputsWithMore", {"length.shortest": "asked for"}),
    "node-unknown": Defect("train_promises:NodeUnknown", {"layout.place": "another node"}),
    "seed-of-its-own": Defect("train_promises:SeedOfItsOwn", {"model.seeds": "two seeds, random"}),
    "recomputes-nothing": Defect("train_promises:RecomputesNothing", {"model.recomputes": "over those without"}),
    "masked-is-all": Defect("train_promises:MaskedIsAll", {"outputs.all_masked": "largest log-prob"}),
    "any-schedule": Defect("train_promises:AnySchedule", {"refusals.settings": "a schedule that does not exist"}),
    "marks-the-folder": Defect("train_promises:MarksTheFolder", {"checkpoint.only_reads": "files"}),
}
RANKS_PROMISES = {
    "every-rank-is-first": Defect("train_promises:EveryRankIsFirst", {"ranks.whole_groups": "largest difference"}),
    "waits-in-layout": Defect("train_promises:WaitsInLayout", {"ranks.alone": ""}),
    "resets-one": Defect("train_promises:ResetsOne", {"ranks.reset": "largest difference"}),
    "raises-alone": Defect("train_promises:RaisesAlone", {"ranks.raises_one": "raised nothing"}),
    "stays-in-group": Defect("train_promises:StaysInGroup", {"ranks.close": "still in a process group"}),
}

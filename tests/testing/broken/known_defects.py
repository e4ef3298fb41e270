"""Engines that earlier trials and mutants had shown to be missed."""

from __future__ import annotations

from broken.defect import Defect

ROLLOUT_KNOWN = {
    "abort-drops-newest": Defect("rollout_kept:AbortDropsNewest", {"abort.kept": "and not given out"}),
    "abort-ends-the-pause": Defect("rollout_kept:AbortEndsThePause", {"abort.still_paused": "that ended in the pause"}),
    "calls-share-noise": Defect("rollout_kept:CallsShareNoise", {"noise": "of calls at the same time"}),
    "wake-brings-back-weights": Defect(
        "rollout_kept:WakeBringsBackWeights", {"sleep.kept": "between the stages of waking"}
    ),
    "cache-by-embeddings": Defect("rollout_kept:CacheByEmbeddings", {"update.little": "after an update of"}),
    "least-temperature": Defect("drawing:LeastTemperature", {"distribution.cold": "wrong samples"}),
    "norms-of-old-weights": Defect("rollout_kept:NormsOfOldWeights", {"model.capped": "after an update"}),
    "logits-uncapped": Defect("rollout_kept:LogitsUncapped", {"model.capped": "wrong samples, capped logits"}),
    "kept-for-good": Defect(
        "rollout_tenth:KeptForGood", {"stale_cache.pauses": "should have, kept then computed again"}
    ),
    "counts-what-failed": Defect(
        "rollout_tenth:CountsWhatFailed", {"update.behind_failure": "behind a source that raised"}
    ),
    "kept-until-awake": Defect(
        "rollout_tenth:KeptUntilAwake", {"sleep.stages": "slept at 1, woke weights, updated, slept at 1"}
    ),
    "aborted-all-new": Defect("rollout_tenth:AbortedAllNew", {"versions.ends": "log-probs of other weights"}),
    "chunks-of-1024": Defect("rollout_tenth:ChunksOf1024", {"model.configuration": "behind 4150"}),
    "positions-in-half": Defect("rollout_tenth:PositionsInHalf", {"model.tied": "mean difference behind"}),
    "sums-in-half": Defect("rollout_tenth:SumsInHalf", {"model.tied": "deviations of their number"}),
}
TRAIN_KNOWN = {
    "trained-uncapped": Defect("train_makes:LogitsUncapped", {"model.capped": "capped"}),
    "window-one-too-wide": Defect("train_makes:WindowOneTooWide", {"model.windows": "windows"}),
    "trained-unscaled": Defect("train_makes:PositionsUnscaled", {"model.scaled_positions": "llama3 positions"}),
    "yarn-without-factor": Defect("train_makes:AttentionUnscaled", {"model.scaled_positions": "yarn positions"}),
    "entropy-of-128": Defect("train_makes:EntropyOfTheLikeliest", {"model.vocabulary": "wide"}),
    "entropy-of-small-numbers": Defect(
        "train_makes:EntropyOfProbabilities", {"outputs.entropy_cold": "entropies that are not finite"}
    ),
    "idle-steps-uncounted": Defect("train_makes:IdleStepsUncounted", {"step.idle": "difference of the rate"}),
    "idle-steps-skipped": Defect("train_makes:IdleStepsSkipped", {"step.idle": "steps that were skipped"}),
    "export-errors-lost": Defect("train_writes:ExportErrorsLost", {"export.cannot_write": "was accepted"}),
    "export-of-a-step": Defect("train_writes:ExportOfAStep", {"export.reset": "largest difference of weights"}),
    "steps-of-eight-bits": Defect(
        "train_writes:StepsOfEightBits", {"checkpoint.many_steps": "largest difference of weights"}
    ),
    "divisions-left-out": Defect("train_writes:DivisionsLeftOut", {"objective.raises": "raises ZeroDivisionError"}),
    "watchdog-left": Defect("train_writes:WatchdogLeft", {"objective.raises": "threads that an objective"}),
    "checkpoint-errors-lost": Defect("train_writes:CheckpointErrorsLost", {"checkpoint.cannot_write": "was accepted"}),
}

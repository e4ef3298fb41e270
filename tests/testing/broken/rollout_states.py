"""Rollout engines that are wrong in a state in which they are seldom asked: asleep, paused, without weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from broken.defect import defect
from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest, SyncReceipt, WeightShard
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"close": "calls that went on"})
class CloseForgetsCalls(TransformersRolloutEngine):
    """A call that is paused while the engine closes waits for ever."""

    def close(self) -> None:
        if hasattr(self, "decoder"):
            self.decoder.fail = lambda error: None
        super().close()


@defect({"sleep.update": "moments at which the layout was another"})
class LayoutAwake(TransformersRolloutEngine):
    """The layout of an engine without weights is empty."""

    def layout(self) -> Any:
        lost = any(parameter.shape != self.held[name] for name, parameter in self.parameters.items())
        return [replace(one, boxes=(), tensors=()) if lost else one for one in super().layout()]


@defect({"update.not_finite": "behind a token of no number"})
class LooksAtFirst(Patched):
    """Only the logits of the first token are checked for NaN; later NaNs become 0."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            behind = first == 0 and len(self.table) and int(self.table["made"].min()) > 0
            super()._take(logits.nan_to_num() if behind else logits, first, version)


@defect({"pause.updates": "versions that sampled nothing, two"})
class FirstOfTwo(Rewritten):
    """After two updates in a pause, continued samples name the first version."""

    renamed: dict[int, int] | None = None

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        if self.paused and self.decoder.jobs:
            self.renamed = {**(self.renamed or {}), version: min(self.renamed or {version: version})}
        return receipt

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        names = self.renamed or {}
        if len(output.versions) < 2:
            return output
        runs = [replace(run, version=names.get(run.version, run.version)) for run in output.versions]
        return replace(output, versions=tuple(runs))


@defect({"abort.without_weights": "came in the pause"})
class AbortsWithWeights(TransformersRolloutEngine):
    """After a failed update, aborted samples wait for the next update."""

    lacking = False

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        self.lacking = True
        receipt = super().update_weights(shards, version)
        self.lacking = False
        return receipt

    def _step(self) -> None:
        if not (self.paused and self.lacking):
            super()._step()

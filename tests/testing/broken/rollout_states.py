"""Rollout engines that are wrong in a state in which they are seldom asked: asleep, paused, without weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest, SyncReceipt, WeightShard
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class ClosesAwake(TransformersRolloutEngine):
    """A sleeping engine cannot be closed."""

    asleep = False

    def sleep(self, level: int = 1) -> None:
        self.asleep = True
        super().sleep(level)

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        self.asleep = False
        super().wake(parts)

    def close(self) -> None:
        if self.asleep:
            raise RuntimeError("an engine that sleeps cannot be closed")
        super().close()


class CloseForgetsCalls(TransformersRolloutEngine):
    """A call that is paused while the engine closes waits for ever."""

    def close(self) -> None:
        if hasattr(self, "decoder"):
            self.decoder.fail = lambda error: None
        super().close()


class ClosesUnpaused(TransformersRolloutEngine):
    """A paused engine cannot be closed."""

    def close(self) -> None:
        if getattr(self, "paused", False):
            self.paused = False
            raise RuntimeError("an engine that is paused cannot be closed")
        super().close()


class LayoutAwake(TransformersRolloutEngine):
    """The layout of an engine without weights is empty."""

    def layout(self) -> Any:
        lost = any(parameter.shape != self.held[name] for name, parameter in self.parameters.items())
        return [replace(one, boxes=(), tensors=()) if lost else one for one in super().layout()]


class LooksAtFirst(Patched):
    """Only the logits of the first token are checked for NaN; later NaNs become 0."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            behind = first == 0 and len(self.table) and int(self.table["made"].min()) > 0
            super()._take(logits.nan_to_num() if behind else logits, first, version)


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


class ResumesTwice(TransformersRolloutEngine):
    """A `resume` without a pause advances the random numbers of running samples by a step."""

    def resume(self, *, keep_cache: bool = False) -> None:
        if not self.paused and self.decoder.running.num_alive:
            running = self.decoder.running
            running.table["prior"] += 1
        super().resume(keep_cache=keep_cache)

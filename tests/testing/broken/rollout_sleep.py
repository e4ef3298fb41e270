"""Rollout engines that lose or confuse weights when they sleep and wake."""

from __future__ import annotations

from collections.abc import Sequence

from broken.defect import defect
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"sleep": "largest difference after it", "event_loop": "largest difference of log-probs"})
class WakesEmpty(TransformersRolloutEngine):
    """Level 1 keeps no weights on the host, and `wake` serves uninitialised memory."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "weights" in parts:
            for parameter in self.parameters.values():
                parameter.zero_()


@defect({"sleep.kept": "versions [0], expected 5"})
class SleepForgetsVersion(TransformersRolloutEngine):
    """After waking, the engine reports version 0."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if self.parameters and all(p.numel() for p in self.parameters.values()) and "kv_cache" in parts:
            self.version = 0


@defect({"sleep.stages": "slept at 1, woke weights, updated, slept at 1"})
class KeptUntilAwake(TransformersRolloutEngine):
    """A second sleep before everything is awake does not renew the host copy: it loses an update in between."""

    kept = None
    asleep = frozenset()

    def sleep(self, level=1):
        if level == 2:
            self.kept = None
        elif self.kept is None and all(p.shape == self.held[name] for name, p in self.parameters.items()):
            self.kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.asleep = {"weights", "kv_cache"}
        super().sleep(2)

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        if "weights" in parts and self.kept is not None:
            for name, tensor in self.kept.items():
                self.parameters[name].data = tensor.clone()
        self.asleep = self.asleep - set(parts)
        if not self.asleep:
            self.kept = None

"""Rollout engines that are wrong where one event happens inside another: a pause in a sleep, a sleep without weights,
an abort in an update, an update between two samples of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from broken.defect import defect
from broken.rollout_base import Rewritten
from rlsdk.interfaces import (
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
)
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"random_calls": "inference mode is True"})
class SourceInInferenceMode(TransformersRolloutEngine):
    """The source of an update runs in inference mode."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        with torch.inference_mode():
            return super().update_weights(shards, version)


@defect({"random_calls": "advanced the generator of torch"})
class UpdateSeeds(TransformersRolloutEngine):
    """An update seeds torch's generator, which the whole process uses."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        torch.manual_seed(version % 2**31)
        return super().update_weights(shards, version)


@defect({"random_calls": "gradients is left False"})
class SleepStopsGradients(TransformersRolloutEngine):
    """After a sleep nothing in the process records gradients."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        torch.set_grad_enabled(False)
        super().wake(parts)


class RemembersWeights(TransformersRolloutEngine):
    """Not broken: knows whether it ever had weights."""

    had_weights = False

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        self.had_weights = spec.load_weights

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        self.had_weights = True
        return super().update_weights(shards, version)


@defect({"update.first": "no weights to keep"})
class SleepsOnceServed(RemembersWeights):
    """An engine that never had weights cannot sleep."""

    def sleep(self, level: int = 1) -> None:
        if not self.had_weights:
            raise RuntimeError("there are no weights to keep")
        super().sleep(level)


@defect({"update.first": "another layout with"})
class LayoutOnceServed(RemembersWeights):
    """The layout of an engine that never had weights names another dtype."""

    def layout(self) -> Sequence[WeightLayout]:
        found = super().layout()
        if self.had_weights:
            return found
        return [replace(one, tensors=tuple(replace(m, dtype="bfloat16") for m in one.tensors)) for one in found]


@defect({"versions": "it contains numpy"})
class ReceiptOfNumpy(TransformersRolloutEngine):
    """Fingerprints in receipts are numpy integers."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        return replace(receipt, fingerprints={name: np.uint32(value) for name, value in receipt.fingerprints.items()})


@defect({"layout": "it contains torch.Size"})
class LayoutOfTorch(TransformersRolloutEngine):
    """Shapes in the layout are those of torch."""

    def layout(self) -> Sequence[WeightLayout]:
        return [
            replace(one, tensors=tuple(replace(meta, shape=torch.Size(meta.shape)) for meta in one.tensors))
            for one in super().layout()
        ]


@defect({"samples": "num_decoded is int64"})
class CountOfNumpy(TransformersRolloutEngine):
    """The number of decoded tokens is a numpy integer."""

    def num_decoded(self) -> int:
        return np.int64(super().num_decoded())  # type: ignore[return-value]


@defect({"samples": "no tuple of VersionRun"})
class RunsInAList(Rewritten):
    """Versions are a list."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, versions=list(output.versions))  # type: ignore[arg-type]

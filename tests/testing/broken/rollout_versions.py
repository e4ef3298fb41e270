"""Rollout engines that report wrong policy versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from broken.defect import defect
from broken.rollout_base import Patched, Rewritten, SplitAbortDecoder
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, SyncReceipt, VersionRun, WeightShard
from rlsdk.reference.jobs import Job
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"versions": "do not add up", "versions.runs": "not of the weights that they name"})
class RunsBeyondTokens(Rewritten):
    """The tokens of the prompt count for the first version."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        first, *others = output.versions
        return replace(output, versions=(replace(first, num_tokens=first.num_tokens + 1), *others))


@defect({"update.versions": "wrong samples of update 2"})
class VersionsOnlyGrow(TransformersRolloutEngine):
    """A version below the served one is not recorded."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        old = self.version
        receipt = super().update_weights(shards, version)
        self.version = max(version, old) if version else version
        return receipt


@defect({"update.versions": "wrong samples of update 3"})
class VersionOf32Bits(TransformersRolloutEngine):
    """Versions are stored in 32 bits."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return replace(super().update_weights(shards, version % 2**32), version=version)


class NewestVersionJob(Job):
    """Part of another engine."""

    def finish(self, index, token_ids, log_probs, reason, newest):
        if reason is FinishReason.ABORT:
            self.runs.pop(index, None)
            newest = VersionRun(newest.version, len(token_ids))
        super().finish(index, token_ids, log_probs, reason, newest)


@defect({"versions.ends": "log-probs of other weights"})
class AbortedAllNew(TransformersRolloutEngine):
    """An aborted sample reports only the version of its newest token."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        job.__class__ = NewestVersionJob
        return job


@defect({"abort.versions": "of another version"})
class VersionOfTheQueue(Patched):
    """Samples without tokens carry the version from when they were queued."""

    class DecoderPart(SplitAbortDecoder):
        def version_of(self, job, version):
            return job.queued_under

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        job.queued_under = self.version
        return job

"""Rollout engines that report wrong policy versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from broken.rollout_base import Patched, Rewritten, SplitAbortDecoder
from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, SyncReceipt, VersionRun, WeightShard
from rlsdk.reference.jobs import Call, Job
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class OldVersion(Rewritten):
    """Samples always carry version 0."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return (
            replace(output, versions=(VersionRun(0, len(output.token_ids)),))
            if len(request.prompt_ids) == 5
            else output
        )


class FirstAndLastVersion(Rewritten):
    """All tokens except the last carry the first version."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        first, last = output.policy_version, output.last_policy_version
        if first == last:
            return output
        return replace(output, versions=(VersionRun(first, len(output.token_ids) - 1), VersionRun(last, 1)))


class RunsBeyondTokens(Rewritten):
    """The tokens of the prompt count for the first version."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        first, *others = output.versions
        return replace(output, versions=(replace(first, num_tokens=first.num_tokens + 1), *others))


class SameVersionSkipped(TransformersRolloutEngine):
    """An update to the served version is skipped."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        kept = {name: p.clone() for name, p in self.parameters.items()} if version == self.version else {}
        receipt = super().update_weights(shards, version)
        for name, old in kept.items():
            self.parameters[name].data.copy_(old)
        return receipt


class VersionsOnlyGrow(TransformersRolloutEngine):
    """A version below the served one is not recorded."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        old = self.version
        receipt = super().update_weights(shards, version)
        self.version = max(version, old) if version else version
        return receipt


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


class AbortedAllNew(TransformersRolloutEngine):
    """An aborted sample reports only the version of its newest token."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        job.__class__ = NewestVersionJob
        return job


class TwoRunsAtMost(Rewritten):
    """If a sample has three versions, the middle one is counted as the first."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        runs = output.versions
        if len(runs) < 3:
            return output
        early = VersionRun(runs[0].version, sum(run.num_tokens for run in runs[:-1]))
        return replace(output, versions=(early, runs[-1]))


class FourRunsAtMost(Rewritten):
    """Only the last four versions of a sample are kept: tokens of earlier ones count as the oldest of these."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        early, late = output.versions[:-3], output.versions[-3:]
        if len(early) < 2:
            return output
        merged = VersionRun(early[-1].version, sum(run.num_tokens for run in early))
        return replace(output, versions=(merged, *late))


class VersionOfTheQueue(Patched):
    """Samples without tokens carry the version from when they were queued."""

    class DecoderPart(SplitAbortDecoder):
        def version_of(self, job, version):
            return job.queued_under

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        job.queued_under = self.version
        return job


class RunsByLabel(TransformersRolloutEngine):
    """Tokens are counted by version: if a version occurs again in a sample, its tokens are added to its first run."""

    def _job(self, call: Call, request: GenerationRequest, at: int) -> Job:
        job = super()._job(call, request, at)
        job.__class__ = _CountsByLabel
        return job


class _CountsByLabel(Job):
    def finish(self, index, token_ids, log_probs, reason, newest):
        counts: dict[int, int] = {}
        for run in (*self.runs.pop(index, ()), newest):
            counts[run.version] = counts.get(run.version, 0) + run.num_tokens
        *earlier, last = (VersionRun(version, count) for version, count in counts.items())
        self.runs[index] = earlier
        super().finish(index, token_ids, log_probs, reason, last)

"""Rollout engines that report wrong counts of decoded tokens, or wrong use of the KV cache."""

from __future__ import annotations

from broken.defect import defect
from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import GenerationRequest
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"num_decoded.exact": "unlike lengths"})
class EndedRowsCount(Patched):
    """Tokens of ended rows count as decoded until their slots are reused."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            ended = int((~self.table["alive"][first:]).sum())
            super()._take(logits, first, version)
            self.num_drawn += ended


class KvUsed(TransformersRolloutEngine):
    """Not broken: reports `kv_used`."""

    def kv_used(self) -> float:
        return min(self.decoder.running.num_alive / (2 * self.spec.max_running), 1.0)


@defect({"kv_used": "answers that are no share"})
class KvInPercent(KvUsed):
    """`kv_used` is a percentage, not a share."""

    def kv_used(self) -> float:
        return 100 * super().kv_used()


@defect({"num_decoded": "that were given"})
class GivenAreCounted(Rewritten):
    """Given response tokens count as decoded."""

    extra = 0

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.extra += len(request.response_ids) * request.n
        return request

    def num_decoded(self) -> int:
        return self.num_tokens + self.extra


@defect({"kv_used": "answers that are no share"})
class FullerThanFull(Patched):
    """`kv_used` counts waiting samples and exceeds 1."""

    def kv_used(self):
        if not hasattr(self, "decoder"):
            return None
        jobs = list(self.decoder.jobs.values())
        return sum(job.left for job in jobs) / self.spec.max_running

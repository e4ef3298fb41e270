"""Rollout engines that report wrong counts of decoded tokens, or wrong use of the KV cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import GenerationOutput, GenerationRequest, SyncReceipt, WeightShard
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class CountsCalls(TransformersRolloutEngine):
    """Tokens are counted when their call ends."""

    counted = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        async for output in super().generate(requests):
            yield output
        self.counted = self.num_tokens

    def num_decoded(self) -> int:
        return self.counted


class EndedRowsCount(Patched):
    """Tokens of ended rows count as decoded until their slots are reused."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            ended = int((~self.table["alive"][first:]).sum())
            super()._take(logits, first, version)
            self.num_drawn += ended


class CountsPrompts(TransformersRolloutEngine):
    """Tokens of prompts count as decoded."""

    read = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self.read += sum(len(request.prompt_ids) for request in requests)
        async for output in super().generate(requests):
            yield output

    def num_decoded(self) -> int:
        return super().num_decoded() + self.read


class KvUsed(TransformersRolloutEngine):
    """Not broken: reports `kv_used`."""

    def kv_used(self) -> float:
        return min(self.decoder.running.num_alive / (2 * self.spec.max_running), 1.0)


class KvOfLastCall(KvUsed):
    """Memory of the last call counts until the next call."""

    most = 0.0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self.most = 0.0
        async for output in super().generate(requests):
            yield output

    def kv_used(self) -> float:
        self.most = max(self.most, super().kv_used())
        return self.most


class KvInPercent(KvUsed):
    """`kv_used` is a percentage, not a share."""

    def kv_used(self) -> float:
        return 100 * super().kv_used()


class CountOfVersion(TransformersRolloutEngine):
    """Decoded tokens are counted from the newest update."""

    begun = 0

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.begun = self.num_tokens
        return receipt

    def num_decoded(self) -> int:
        return self.num_tokens - self.begun


class GivenAreCounted(Rewritten):
    """Given response tokens count as decoded."""

    extra = 0

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.extra += len(request.response_ids) * request.n
        return request

    def num_decoded(self) -> int:
        return self.num_tokens + self.extra


class FullerThanFull(Patched):
    """`kv_used` counts waiting samples and exceeds 1."""

    def kv_used(self):
        if not hasattr(self, "decoder"):
            return None
        jobs = list(self.decoder.jobs.values())
        return sum(job.left for job in jobs) / self.spec.max_running


class FillOfNothing(TransformersRolloutEngine):
    """`kv_used` divides by the size of the KV cache, which is 0 while the cache is asleep."""

    pool = 1

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)
        self.pool = 0

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        self.pool = 1

    def kv_used(self) -> float | None:
        return 0 / self.pool

"""Rollout engines that are wrong where several versions of an adapter are served only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from broken.defect import defect
from rlsdk.interfaces import GenerationRequest, SyncReceipt, WeightShard, WeightSyncError
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"adapter_versions.named": "other versions"})
class ServesTheNewest(TransformersRolloutEngine):
    """The version that a request names is ignored."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> Any:
        async for output in super().generate([replace(request, adapter_version=None) for request in requests]):
            yield output


@defect({"adapter_versions.named": "log-probs"})
class OnlyTheLabel(TransformersRolloutEngine):
    """Samples carry the version that they name, and are sampled with the newest adapter."""

    def _decode_versions(self) -> None:
        if self.versions is not None:
            for lane in self.versions.lanes:
                lane.values = self.versions.own_values()
        super()._decode_versions()


@defect({"adapter_versions.running": "log-probs"})
class WritesOverTheOldest(TransformersRolloutEngine):
    """A new version takes the memory of the one that goes, though samples of it run."""

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        oldest = next(iter(self.versions.kept.values()), None) if self.versions is not None else None
        receipt = super().update_adapter(shards, version)
        if oldest is not None and oldest.version not in self._kept_versions():
            for name, values in oldest.values.items():
                values.copy_(self.low[name].data)
        return receipt


@defect({"adapter_versions.kept": "log-probs"})
class TheFirstOfAName(TransformersRolloutEngine):
    """A version that comes again is what it was."""

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        same = None if self.versions is None else self.versions.kept.get(version)
        receipt = super().update_adapter(shards, version)
        if same is not None:
            self.versions.kept[version].values = same.values
        return receipt


@defect({"adapter_versions.running": "requests are running"})
class WaitsForTheIdle(TransformersRolloutEngine):
    """An adapter is refused while samples run, as without versions."""

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if any(decoder.jobs for decoder in self.decoders):
            raise WeightSyncError(f"version {version}: requests are running")
        return super().update_adapter(shards, version)


@defect({"adapter_versions.kept": "not refused by name"})
class AnythingIsTheNewest(TransformersRolloutEngine):
    """A version that is not kept is served as the newest."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> Any:
        kept = self._kept_versions() or ()
        known = [r if r.adapter_version in kept else replace(r, adapter_version=None) for r in requests]
        async for output in super().generate(known):
            yield output


@defect({"adapter_versions.kept": "not kept; expected one of"})
class KeepsOneLess(TransformersRolloutEngine):
    """The oldest version goes too early."""

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_adapter(shards, version)
        if self.versions is not None and len(self.versions.kept) == self.spec.adapter_versions:
            self.versions.ending.append(self.versions.kept.pop(next(iter(self.versions.kept))))
        return receipt

"""Rollout engines that load weights wrongly, or report it wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from broken.defect import defect
from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import (
    Box,
    GenerationOutput,
    GenerationRequest,
    SyncReceipt,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.reference.loading import _place
from rlsdk.reference.rows import PositionedRows
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect(
    {
        "update.each_tensor": "layers.0.self_attn.v_proj.bias",
        "partial_rollout": "of neither",
        "versions.runs": "log-probs of other weights",
        "update.served": "largest difference",
        "update.no_stale_cache": "largest difference",
        "update.pieces": "largest difference",
        "update.failed": "largest difference",
        "update.first": "weights that came",
        "sleep.update": "largest difference",
    }
)
class OneTensorNeverUpdated(TransformersRolloutEngine):
    """Fingerprints are of the received weights; one bias keeps its old values."""

    STUCK = "model.layers.0.self_attn.v_proj.bias"

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        arrived: dict[str, int] = {}

        def heard() -> Any:
            for shard in shards:
                if tuple(shard.tensor.shape) == shard.box.size:
                    arrived[shard.name] = arrived.get(shard.name, 0) + fingerprint(shard.tensor.float(), shard.box)
                yield shard

        # Memory that no weights have come to yet may hold anything.
        old = self.parameters[self.STUCK].clone().nan_to_num(0.5, 0.5, 0.5).clamp(-1, 1)
        try:
            receipt = super().update_weights(heard(), version)
        finally:
            self.parameters[self.STUCK].copy_(old)
        return replace(receipt, fingerprints={name: value % 2**32 for name, value in arrived.items()})


@defect({"update.busy": "a refusal that took the weights"})
class TouchedThenRefused(TransformersRolloutEngine):
    """A busy engine reads the first piece before it refuses an update."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        pieces = iter(shards)
        first = [next(pieces)]
        return super().update_weights((piece for part in (first, pieces) for piece in part), version)


@defect({"update.borrowed": "fingerprints that differ"})
class ItemsListed(TransformersRolloutEngine):
    """Items are collected first and read later."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.decoder.jobs and not self.paused:
            return super().update_weights(shards, version)
        return super().update_weights(iter(list(shards)), version)


@defect({"update.nothing_cached": "wrong samples of version 1"})
class GreedyRemembered(Rewritten):
    """Outputs of greedy requests are cached across updates."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.remembered: dict[Any, GenerationOutput] = {}

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if request.sampling.temperature or len(request.prompt_ids) < 12:
            return output
        old = self.remembered.setdefault((request.prompt_ids, request.sampling, request.response_ids), output)
        return replace(old, versions=output.versions, sample_index=output.sample_index)


@defect({"update.raises_paused": "samples of both weights"})
class PausedLost(TransformersRolloutEngine):
    """A failed update ends paused samples."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        try:
            return super().update_weights(shards, version)
        except OSError:
            super().abort()
            raise


@defect({"update.small_change": "after an update of"})
class CacheByEmbeddings(Patched):
    """Results for prompts are cached as long as the embeddings do not change."""

    class RowsPart(PositionedRows):
        def prefill(self, prompts):
            weight = self.model.get_input_embeddings().weight
            now = fingerprint(weight, Box.whole(tuple(weight.shape)))
            if getattr(self, "made_with", None) != now:
                self.made_with, self.kept = now, {}
            key = tuple(tuple(prompt.tolist()) for prompt in prompts)
            if key not in self.kept:
                self.kept[key] = super().prefill(prompts)
            return self.kept[key]


@defect({"layout.place": "that are not node:pid"})
class Elsewhere(TransformersRolloutEngine):
    """The layout's process has no process id."""

    def layout(self) -> Sequence[WeightLayout]:
        return [replace(layout, process="rollout") for layout in super().layout()]


@defect({"update.receipts": "tensors, pieces"})
class CountsPieces(TransformersRolloutEngine):
    """The receipt counts pieces instead of tensors."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        names: Counter[str] = Counter()

        def counted() -> Iterator[WeightShard]:
            for shard in shards:
                names[shard.name] += 1
                yield shard

        receipt = super().update_weights(counted(), version)
        return replace(receipt, num_tensors=names.total())


@defect({"update.one_at_a_time": "held beside its weights"})
class GathersFirst(TransformersRolloutEngine):
    """All items are copied before the first is loaded."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        gathered = [replace(shard, tensor=shard.tensor.clone()) for shard in shards]
        return super().update_weights(iter(gathered), version)


@defect({"update.damaged": "a piece came twice"})
class CoversByCount(TransformersRolloutEngine):
    """A tensor is complete when as many elements as it has have arrived."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        came: dict[str, list[WeightShard]] = {}
        for shard in shards:
            came.setdefault(shard.name, []).append(replace(shard, tensor=shard.tensor.clone()))
        for name, items in came.items():
            if len({item.box for item in items}) < len(items):
                parameter, first = self.parameters[name], items[0].box
                rest = parameter.shape[0] - first.size[0]
                offset = first.size[0] if first.offset[0] == 0 else 0
                box = type(first)((offset, *first.offset[1:]), (rest, *first.size[1:]))
                came[name] = [
                    items[0],
                    WeightShard(name=name, box=box, tensor=parameter.detach()[offset : offset + rest]),
                ]
        return super().update_weights((item for items in came.values() for item in items), version)


@defect({"update.after_failure": "behind a source that raised"})
class CountsWhatFailed(TransformersRolloutEngine):
    """Weights of an update whose source raised count for the next update."""

    def update_weights(self, shards, version):
        with self.lock:
            if self.decoder.jobs and not self.paused:
                raise WeightSyncError("samples run")
            self.decoder.version = None
            taken = {name: self.parameters[name] for name in self.shapes}
            came = {name: [] for name in taken}
            before, self.before = getattr(self, "before", {}), {}
            num_bytes, source = 0, iter(shards)
            while True:
                try:
                    shard = next(source, None)
                except BaseException:
                    self.before = came
                    raise
                if shard is None:
                    break
                place = _place(taken, shard, came, version)
                place.copy_(shard.tensor)
                num_bytes += place.numel() * place.element_size()
            for name, parameter in taken.items():
                if sum(box.numel for box in (*came[name], *before.get(name, ()))) < parameter.numel():
                    raise WeightSyncError(f"{name!r} was not covered")
            fingerprints = {name: fingerprint(p, Box.whole(tuple(p.shape))) for name, p in self.parameters.items()}
            self.version = version
        return SyncReceipt(version=version, num_tensors=len(taken), num_bytes=num_bytes, fingerprints=fingerprints)


@defect({"update.served": "bytes"})
class BytesAreElements(TransformersRolloutEngine):
    """A receipt reports elements as bytes."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        return replace(receipt, num_bytes=receipt.num_bytes // 4)


@defect({"update.source_raises": "did not come out"})
class SourceErrorsRenamed(Patched):
    """An exception of the source is raised as WeightSyncError."""

    def update_weights(self, shards, version):
        try:
            return super().update_weights(shards, version)
        except Exception as error:
            raise WeightSyncError(f"version {version} could not be loaded: {error}") from error


@defect({"update.strided": "dtypes that change"})
class DtypeOfFirstItem(TransformersRolloutEngine):
    """All items of an update pass through a buffer with the dtype of the first."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return super().update_weights(self._buffered(shards), version)

    def _buffered(self, shards: Iterable[WeightShard]) -> Iterator[WeightShard]:
        dtype: torch.dtype | None = None
        for shard in shards:
            dtype = dtype or shard.tensor.dtype
            yield replace(shard, tensor=shard.tensor.to(dtype))

"""Rollout engines that load weights wrongly, or report it wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import (
    Box,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RlsdkError,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.reference.loading import _place
from rlsdk.reference.rows import PositionedRows
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


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


class StaleCache(Rewritten):
    """The output for a long prompt is cached across updates."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.remembered: dict[Any, GenerationOutput] = {}

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(request.prompt_ids) < 64 or output.finish_reason is FinishReason.ABORT:
            return output
        key = request.prompt_ids, request.sampling, output.sample_index
        old = self.remembered.setdefault(key, output)
        return replace(old, versions=output.versions)


class NeverRecovers(TransformersRolloutEngine):
    """After a failed update, later ones never update one bias."""

    failed = False

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.first = self.parameters[OneTensorNeverUpdated.STUCK].clone()

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.decoder.jobs:
            return super().update_weights(shards, version)
        try:
            receipt = super().update_weights(shards, version)
        except Exception:
            self.failed = True
            raise
        if self.failed:
            self.parameters[OneTensorNeverUpdated.STUCK].copy_(self.first)
        return receipt


class TouchedThenRefused(TransformersRolloutEngine):
    """A busy engine reads the first piece before it refuses an update."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        pieces = iter(shards)
        first = [next(pieces)]
        return super().update_weights((piece for part in (first, pieces) for piece in part), version)


class UpdatedWhileBusy(TransformersRolloutEngine):
    """Weights are overwritten under running samples, which keep their version and KV cache."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        busy = bool(self.decoder.jobs) and not self.paused
        if not busy:
            return super().update_weights(shards, version)
        self.paused = True
        old = self.version
        receipt = super().update_weights(shards, version)
        self.paused, self.version = False, old
        return receipt


class SourceErrorKept(TransformersRolloutEngine):
    """An exception of the source silently ends the update."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def quiet() -> Iterator[WeightShard]:
            seen = set()
            with suppress(OSError):
                for shard in shards:
                    seen.add(shard.name)
                    yield shard
                return
            for name, parameter in self.parameters.items():
                if name not in seen:
                    yield WeightShard(name=name, box=Box.whole(tuple(parameter.shape)), tensor=parameter)

        return super().update_weights(quiet(), version)


class StuckBehindError(TransformersRolloutEngine):
    """After an update has failed, all later ones fail."""

    failed = False

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.failed:
            raise RlsdkError("an update is under way")
        try:
            return super().update_weights(shards, version)
        except OSError:
            self.failed = True
            raise


class ItemsListed(TransformersRolloutEngine):
    """Items are collected first and read later."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.decoder.jobs and not self.paused:
            return super().update_weights(shards, version)
        return super().update_weights(iter(list(shards)), version)


class OneItemAhead(TransformersRolloutEngine):
    """The next item is requested before the last one is read."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def ahead() -> Iterator[WeightShard]:
            last = None
            for shard in shards:
                if last is not None:
                    yield last
                last = shard
            if last is not None:
                yield last

        if self.decoder.jobs and not self.paused:
            return super().update_weights(shards, version)
        return super().update_weights(ahead(), version)


class Flattened(TransformersRolloutEngine):
    """Items are read as if their memory were contiguous."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def flat() -> Iterator[WeightShard]:
            for shard in shards:
                tensor = shard.tensor
                if not tensor.is_contiguous() and tuple(tensor.shape) == shard.box.size:
                    size, stride = tensor.shape, []
                    step = 1
                    for length in reversed(size):
                        stride.append(step)
                        step *= length
                    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
                    if step <= room:
                        tensor = tensor.as_strided(size, tuple(reversed(stride)))
                yield replace(shard, tensor=tensor)

        return super().update_weights(flat(), version)


class RowsOnly(TransformersRolloutEngine):
    """A piece that does not begin in the first column is written from the first column."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        moved: list[tuple[Any, Any]] = []

        def heard() -> Iterator[WeightShard]:
            for shard in shards:
                if len(shard.box.offset) == 2 and shard.box.offset[1]:
                    moved.append((shard, shard.tensor.clone()))
                yield shard

        receipt = super().update_weights(heard(), version)
        for shard, values in moved:
            row = shard.box.offset[0]
            self.parameters[shard.name].data[row : row + values.shape[0], : values.shape[1]] = values
        return receipt


class ThroughHalf(TransformersRolloutEngine):
    """Weights in float64 are rounded to float16."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return super().update_weights(
            (
                replace(shard, tensor=shard.tensor.half()) if shard.tensor.dtype is torch.float64 else shard
                for shard in shards
            ),
            version,
        )


class NaNsHidden(TransformersRolloutEngine):
    """NaN becomes 0, and samples are computed from it."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return super().update_weights(
            (replace(shard, tensor=torch.nan_to_num(shard.tensor.float())) for shard in shards), version
        )


class NaNsGiven(TransformersRolloutEngine):
    """Samples with NaN logits are returned with log-probs of 0."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)

        class Hiding(Running):
            def _finish(self, done: Any, reasons: Any) -> None:
                self.log_probs = torch.nan_to_num(self.log_probs)
                super()._finish(done, reasons)

        self.decoder.running.__class__ = Hiding


class NaNsStay(TransformersRolloutEngine):
    """Weights that are not finite damage a bias that later updates do not repair."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        bias = self.parameters["model.layers.0.self_attn.v_proj.bias"]
        self.spoiled = getattr(self, "spoiled", False) or not all(
            bool(parameter.isfinite().all()) for parameter in self.parameters.values()
        )
        if self.spoiled:
            bias.data += 0.5
        return receipt


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


class LongRemembered(Rewritten):
    """Log-probs of prompts of more than 300 tokens are cached across updates."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.remembered: dict[Any, Any] = {}

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if len(request.prompt_ids) <= 300:
            return output
        logs = output.log_probs.copy()
        for at, token in enumerate(output.token_ids.tolist()):
            key = request.prompt_ids, request.sampling.temperature, output.token_ids[:at].tobytes(), token
            logs[at] = self.remembered.setdefault(key, logs[at])
        return replace(output, log_probs=np.asarray(logs, np.float32))


class PausedLost(TransformersRolloutEngine):
    """A failed update ends paused samples."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        try:
            return super().update_weights(shards, version)
        except OSError:
            super().abort()
            raise


class RoundsVectors(TransformersRolloutEngine):
    """One-dimensional tensors are rounded to bfloat16."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def rounded() -> Iterable[WeightShard]:
            for shard in shards:
                small = shard.tensor.dim() == 1
                yield replace(shard, tensor=shard.tensor.bfloat16()) if small else shard

        return super().update_weights(rounded(), version)


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


class Elsewhere(TransformersRolloutEngine):
    """The layout's process has no process id."""

    def layout(self) -> Sequence[WeightLayout]:
        return [replace(layout, process="rollout") for layout in super().layout()]


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


class GathersFirst(TransformersRolloutEngine):
    """All items are copied before the first is loaded."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        gathered = [replace(shard, tensor=shard.tensor.clone()) for shard in shards]
        return super().update_weights(iter(gathered), version)


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


class FirstReceiptAgain(TransformersRolloutEngine):
    """Fingerprints are computed at the first update and then reused."""

    kept: Any = None

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.kept = self.kept or receipt.fingerprints
        return replace(receipt, fingerprints=self.kept)


class BytesAreElements(TransformersRolloutEngine):
    """A receipt reports elements as bytes."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        return replace(receipt, num_bytes=receipt.num_bytes // 4)


class LayoutLacksNorm(TransformersRolloutEngine):
    """The layout lacks the last norm, which hardly changes."""

    def layout(self) -> Sequence[WeightLayout]:
        return [
            replace(
                one,
                tensors=tuple(meta for meta in one.tensors if meta.name != "model.norm.weight"),
                boxes=tuple(entry for entry in one.boxes if entry[0] != "model.norm.weight"),
            )
            for one in super().layout()
        ]


class CountsElements(Patched):
    """Coverage is one count over all tensors: a repeated piece hides a missing one."""

    def update_weights(self, shards, version):
        with self.lock, torch.no_grad():
            if self.decoder.jobs and not self.paused:
                raise WeightSyncError(f"version {version} came while requests run; end, abort or pause them")
            came = num_bytes = 0
            for shard in shards:
                parameter = self.parameters.get(shard.name)
                whole = Box.whole(self.shapes.get(shard.name, ()))
                fits = parameter is not None and len(shard.box.size) == parameter.dim()
                if not fits or shard.box.intersect(whole) != shard.box or tuple(shard.tensor.shape) != shard.box.size:
                    raise WeightSyncError(f"version {version}: {shard.name!r} is unknown or does not fit")
                parameter[shard.box.slices(whole)].copy_(shard.tensor)
                came += shard.box.numel
                num_bytes += shard.box.numel * parameter.element_size()
            if came < sum(p.numel() for p in self.parameters.values()):
                raise WeightSyncError(f"version {version}: not all tensors were covered")
            prints = {name: fingerprint(p, Box.whole(self.shapes[name])) for name, p in self.parameters.items()}
            self.version = version
        return SyncReceipt(version=version, num_tensors=len(prints), num_bytes=num_bytes, fingerprints=prints)


class BytesAsTheyCame(Patched):
    """The receipt's `num_bytes` is in the dtype of the received items."""

    def update_weights(self, shards, version):
        num_bytes = 0

        def counted():
            nonlocal num_bytes
            for shard in shards:
                num_bytes += shard.tensor.numel() * shard.tensor.element_size()
                yield shard

        receipt = super().update_weights(counted(), version)
        return replace(receipt, num_bytes=num_bytes)


class SourceErrorsRenamed(Patched):
    """An exception of the source is raised as WeightSyncError."""

    def update_weights(self, shards, version):
        try:
            return super().update_weights(shards, version)
        except Exception as error:
            raise WeightSyncError(f"version {version} could not be loaded: {error}") from error


class NanStays(TransformersRolloutEngine):
    """KV cache memory is reused without zeroing: masked NaNs, multiplied by 0, stay NaN."""

    class Pooled(PositionedRows):
        def clear(self) -> None:
            kept = getattr(self, "keys", []), getattr(self, "values", [])
            super().clear()
            self.keys, self.values = kept

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        if isinstance(self.decoder.memory, PositionedRows):
            self.decoder.memory.__class__ = self.Pooled


class DtypeOfFirstItem(TransformersRolloutEngine):
    """All items of an update pass through a buffer with the dtype of the first."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return super().update_weights(self._buffered(shards), version)

    def _buffered(self, shards: Iterable[WeightShard]) -> Iterator[WeightShard]:
        dtype: torch.dtype | None = None
        for shard in shards:
            dtype = dtype or shard.tensor.dtype
            yield replace(shard, tensor=shard.tensor.to(dtype))


class NanIsImpossible(TransformersRolloutEngine):
    """Logits that are NaN are masked, as if their tokens were forbidden, as long as one logit is a number."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        memory = self.decoder.memory
        prefill, step = memory.prefill, memory.step

        def prefilled(*args: Any, **fields: Any) -> Any:
            logits, states = prefill(*args, **fields)
            return _without_nan(logits), states

        memory.prefill = prefilled
        memory.step = lambda *args, **fields: _without_nan(step(*args, **fields))


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    bad = logits.isnan()
    return logits.masked_fill(bad & ~bad.all(-1, keepdim=True), -1e30)

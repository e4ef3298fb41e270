"""Rollout engines around a library that batches requests itself: the model, updates of its weights, stop strings."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from rlsdk.interfaces import (
    AdapterSpec,
    ConfigError,
    Delivery,
    GenerationRequest,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    WorkerReceipt,
)
from rlsdk.kit.files.weight_files import check_whole
from rlsdk.kit.generation.requests import check_requests
from rlsdk.kit.generation.serving import RunningSample, whole_layout
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.kit.model.adapters import adapter_shapes, probe_tokens
from rlsdk.kit.model.hf import build_model, canonical_tensors
from rlsdk.kit.weights.file_tensors import file_tensors
from rlsdk.kit.weights.weight_fit import check_fits
from rlsdk.kit.weights.weight_updates import Fingerprints, check_shards, gathered, make_receipt

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Library(Protocol):
    """What an engine's adapter to its library offers."""

    vocabulary: int

    def write(self, shards: Iterator[WeightShard]) -> None:
        """Writes an update into the memory that the library computes with."""

    def receive(self, deliveries: Sequence[Delivery], version: int) -> tuple[WorkerReceipt, ...]:
        """Lets every worker receive its part of an update."""

    def fingerprints(self) -> list[Fingerprints]:
        """Fingerprints of what each worker serves."""

    def put_adapter(
        self, number: int, tensors: Mapping[str, Tensor], spec: AdapterSpec, keep: Sequence[int]
    ) -> list[Fingerprints]:
        """Puts an adapter beside the weights, under a number that was never used; returns fingerprints of what each
        worker computes with.

        Args:
            number: of the adapter.
            tensors: A and B by canonical name.
            spec: of the adapter.
            keep: numbers of those that stay; all others are dropped.
        """

    def serve(self, version: int) -> None:
        """Sets the version of tokens sampled from now on."""

    def close(self) -> None: ...


class SharedBatchEngine(RolloutEngine):
    """All calls of `generate` share the batches of one library.

    Weights are written directly into the parameters that the model computes with, where the library's own loaders would
    put them, and fingerprints are read back from there. Updates are refused while requests run, unless they are paused;
    their KV cache is then recomputed.

    Each version of an adapter has a number of its own, which is never used again: the library keeps caches apart by it,
    and no running sample is moved to other values.
    """

    library: ClassVar[str]
    """Its name in messages."""
    scores_prompts: ClassVar[bool] = False
    """Whether it claims `Capability.PROMPT_LOG_PROBS`."""
    max_adapters: int
    """Adapters that the library has memory for (`serving.count_adapter_slots`)."""
    engine: Library
    samples: Mapping[str, RunningSample]
    """Running samples by key."""
    num_tokens = 0
    """Tokens sampled so far; kept here so that it can be read at any time."""

    def read_model(self, ctx: RankContext, spec: RolloutSpec, *, loads_silently: bool = False) -> PreTrainedModel:
        """Reads the description of the model, and checks files that the library will load. Returns the model on the
        meta device.

        Args:
            ctx: of the engine.
            spec: of the engine, after `check_rollout_spec`.
            loads_silently: the library would serve a tensor that the files lack as its memory happens to be.

        Raises:
            ConfigError: the files do not hold this model.
        """
        self.ctx, self.spec = ctx, spec
        skeleton = build_model(spec.model, empty=True)
        tensors, self.tied = canonical_tensors(skeleton)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.sources = file_tensors(skeleton, self.shapes)
        if spec.load_weights and loads_silently:
            check_whole(spec.model, self.shapes if self.sources is None else {s.name for s in self.sources}, self.tied)
        if spec.load_weights:
            check_fits(spec.model, skeleton, self.shapes, self.tied, self.sources)
        self.stop_text = StopText(spec.model)
        adapter = spec.model.adapter
        self.low = {} if adapter is None else adapter_shapes(skeleton, adapter)
        """Shapes of the adapter's tensors."""
        self.version = self.num_calls = self.num_adapters = 0
        self.kept: dict[int, int] = {}
        """Versions of the adapter that requests may name, oldest first, and the number of each."""
        self.paused = False
        self.lock = threading.RLock()
        """Held while samples are started or weights are changed."""
        return skeleton

    def check_servable(self, faults: Sequence[str]) -> None:
        """Raises `ConfigError`, after closing the library, if there are reasons why it cannot serve updates."""
        if faults:
            self.engine.close()
            del self.engine
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise ConfigError(
                f"model.path {self.spec.model.path!r}: {self.library} cannot serve it with weights that can be "
                f"replaced and verified: {faults[0]}{more}. Run it without quantization, or with another rollout "
                "backend"
            )

    def check_call(self, requests: Sequence[GenerationRequest]) -> None:
        """Prepares for the requests of one call. Raises `ConfigError` if one of them cannot be served."""
        check_requests(
            requests,
            max_model_tokens=self.spec.max_model_tokens,
            vocabulary=self.engine.vocabulary,
            scores_prompts=self.scores_prompts,
            adapters=self.kept if self.low else None,
        )
        for request in requests:
            self.stop_text.prepare(request.sampling.stop_strings)

    def adapter_of(self, request: GenerationRequest) -> tuple[int, int | None]:
        """The version that samples a request, and the number of its adapter."""
        version = self.version if request.adapter_version is None else request.adapter_version
        return version, self.kept.get(version)

    def version_of(self, sample: RunningSample) -> int:
        """Version of the weights that sample its next token."""
        return sample.version if self.low else self.version

    def extend_until_stop(
        self, sample: RunningSample, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
    ) -> bool:
        """Adds new tokens to a sample, up to the one that completes a stop string. Returns whether one does."""
        request = sample.request
        for token, log_prob, version in zip(token_ids, log_probs, versions, strict=True):
            sample.extend([token], [log_prob], version)
            if self.stop_text.ended(request.sampling.stop_strings, sample.token_ids, request.response_ids):
                return True
        return False

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        with self.lock:
            self._check_idle(version)
            self.engine.write(check_shards(self.shapes, shards, version))
            return self._serve(version, ())

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        with self.lock:
            self._check_idle(version)
            return self._serve(version, self.engine.receive(deliveries, version))

    def adapter_layout(self) -> Sequence[WeightLayout]:
        return [whole_layout(self.ctx, self.spec.model.dtype, self.low, {}, on_host=True)]

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """See `RolloutEngine`. Adapters that no request may name any more make room when their last sample has
        ended."""
        spec = self.spec.model.adapter
        assert spec is not None
        with self.lock:
            staying, keep = self._room_for(version)
            tensors = gathered(self.low, check_shards(self.low, shards, version), self.spec.model.dtype)
            self.num_adapters += 1
            self.kept = staying
            served = self.engine.put_adapter(self.num_adapters, tensors, spec, keep)
            receipt = make_receipt(self.low, self.spec.model.dtype, served, version)
            self.engine.serve(version)
            self.version, self.kept = version, {**staying, version: self.num_adapters}
            return replace(receipt, effect=self._effect())

    @abstractmethod
    def first_log_prob(self, ids: Sequence[int], adapter: int | None) -> float:
        """Log-prob of the most probable token after these, under the adapter of this number."""

    def num_decoded(self) -> int:
        return self.num_tokens

    @abstractmethod
    def drop_outdated_caches(self) -> None:
        """Drops the KV cache of the weights before an update."""

    def engine_checksum(self) -> str | None:
        """The library's own checksum of its weights, for the receipt of an update; None: it makes none."""
        return None

    def _room_for(self, version: int) -> tuple[dict[int, int], list[int]]:
        """Those of `kept` that stay when this version comes, and the numbers of all adapters that are then in use.

        Raises:
            WeightSyncError: there is no memory for one more.
        """
        others = [(name, number) for name, number in self.kept.items() if name != version]
        staying = dict(others[max(len(others) + 1 - self.spec.adapter_versions, 0) :])
        running = {sample.adapter for sample in list(self.samples.values()) if sample.adapter is not None}
        keep = sorted(running | {*staying.values()})
        if len(keep) >= self.max_adapters:
            raise WeightSyncError(
                f"the adapter of version {version} arrived while {len(keep)} older ones are in use, and {self.library} "
                f"has memory for max_adapters {self.max_adapters}; finish or abort their samples first, or raise it"
            )
        return staying, keep

    def _effect(self) -> float | None:
        """Difference that the newest adapter makes to the log-prob of the most probable token after a probe; None while
        paused, or while so many samples run that a probe would wait for one of them."""
        if self.paused or len(self.samples) >= self.spec.max_running:
            return None
        ids = probe_tokens(self.engine.vocabulary)[: self.spec.max_model_tokens - 1]
        with_it, without = (self.first_log_prob(ids, adapter) for adapter in (self.num_adapters, None))
        return abs(with_it - without)

    def _check_idle(self, version: int) -> None:
        # Paused samples continue under new weights, but never under another adapter.
        if self.samples and (not self.paused or self.spec.model.adapter is not None):
            raise WeightSyncError(
                f"version {version} arrived while {len(self.samples)} samples are running; finish, abort or pause them "
                "first"
            )

    def _serve(self, version: int, workers: tuple[WorkerReceipt, ...]) -> SyncReceipt:
        """Starts to serve updated weights, and verifies them."""
        # KV cache and version change together: old weights never get the new version, nor new weights the old cache.
        self.drop_outdated_caches()
        self.kept = {}
        receipt = make_receipt(self.shapes, self.spec.model.dtype, self.engine.fingerprints(), version, workers)
        receipt = replace(receipt, engine_checksum=self.engine_checksum())
        self.engine.serve(version)
        self.version = version
        return receipt

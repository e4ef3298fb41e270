"""`transformers`: a RolloutEngine in one process. Every line of the contract, and quick enough for small models."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    ConfigError,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    TensorMeta,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.kit.hf import build_model, canonical_parameters, load_tokenizer
from rlsdk.kit.outputs import output_logits
from rlsdk.reference.decoding import Decoding, Sample
from rlsdk.reference.row_cache import ATTENTION, register_attention

STOP_WINDOW = 4
"""Tokens per character of a stop string that are decoded to look for it: a character has four bytes at most."""


class TransformersRolloutEngine(RolloutEngine):
    """Decodes in this process, up to `RolloutSpec.max_running` samples at once.

    A seeded sample draws its noise from (seed, sample index, position) alone. Its tokens could still differ where a
    matrix product rounds otherwise in another batch and the noise falls between the two: in float32 that is rare.
    """

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        self.ctx, self.spec = ctx, spec
        register_attention()
        self.model = build_model(
            spec.model, device=ctx.device, seed=ctx.seed, init_from_config=not spec.load_weights
        ).requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION)
        self.parameters, self.tied = canonical_parameters(self.model)
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.version: int | None = 0 if spec.load_weights else None
        self.refusal = "" if spec.load_weights else "no weights have come yet; the first update_weights brings them"
        self.calls: list[Decoding] = []
        self.num_calls = 0
        self.turn: asyncio.Lock | None = None
        self.tokenizer: Any = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        self._check(requests)
        self.num_calls += 1
        samples = [
            Sample(self._bounded(request), index, self._seed(request, at))
            for at, request in enumerate(requests)
            for index in range(request.n)
        ]
        if not samples:
            return
        backbone = getattr(self.model, self.model.base_model_prefix)
        decoding = Decoding(
            backbone,
            self._logits,
            samples,
            vocabulary=self.model.config.get_text_config().vocab_size,
            capacity=self.spec.max_running,
            version=self._served(),
            stop_text=self._completes_stop_string,
        )
        self.calls.append(decoding)
        try:
            for finished in self._steps(decoding):
                for output in finished:
                    yield output
                await asyncio.sleep(0)  # lets other calls, and `abort`, have their turn between two passes
        finally:
            self.calls.remove(decoding)

    def layout(self) -> Sequence[WeightLayout]:
        named = {name: tuple(shape) for name, shape in self.shapes.items()}
        dtype = self.spec.model.dtype
        return [
            WeightLayout(
                rank=0,
                node=self.ctx.node,
                device=self.ctx.device,
                process=f"{self.ctx.node}:{os.getpid()}",
                tensors=tuple(TensorMeta(name=name, shape=shape, dtype=dtype) for name, shape in named.items()),
                boxes=tuple((name, Box.whole(shape)) for name, shape in named.items()),
                tied=self.tied,
            )
        ]

    @torch.no_grad()
    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.calls:
            raise WeightSyncError(f"{len(self.calls)} generate calls are under way; end or abort them first")
        missing = {name: p.numel() for name, p in self.parameters.items()}
        num_bytes = 0
        self.version = None
        self.refusal = f"the update to version {version} failed half-way; only a whole update mends it"
        for shard in shards:
            num_bytes += self._load(shard, missing)
        left = sorted(name for name, count in missing.items() if count)
        if left:
            raise WeightSyncError(f"version {version}: {len(left)} tensors were not covered, first {left[0]!r}")
        self.version, self.refusal = version, ""
        return SyncReceipt(
            version=version,
            num_tensors=len(self.parameters),
            num_bytes=num_bytes,
            fingerprints={name: fingerprint(p, Box.whole(tuple(p.shape))) for name, p in self.parameters.items()},
        )

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for call in list(self.calls):
            call.abort(request_ids)

    def sleep(self, level: int = 1) -> None:
        """Level 1 moves weights to the host (nothing moves on a CPU); level 2 gives their memory back."""
        if level == 1:
            self.model.to("cpu")
            return
        for parameter in self.parameters.values():
            parameter.data = parameter.data.new_empty(0)
        self.version, self.refusal = None, "asleep at level 2: wake the weights, then update them"

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Key-value memory lives only as long as a `generate` call, so `kv_cache` has nothing to do."""
        if "weights" not in parts:
            return
        for name, parameter in self.parameters.items():
            if parameter.shape != self.shapes[name]:
                parameter.data = parameter.data.new_empty(self.shapes[name])
        self.model.to(self.ctx.device)

    def close(self) -> None:
        self.abort()
        self.refusal = "closed"
        self.version = None

    @torch.inference_mode()
    def _advance(self, steps: Any) -> list[GenerationOutput] | None:
        found: list[GenerationOutput] | None = next(steps, None)
        return found

    def _steps(self, decoding: Decoding) -> Iterable[list[GenerationOutput]]:
        steps = decoding.steps()
        while (finished := self._advance(steps)) is not None:
            yield finished

    def _logits(self, hidden: Tensor) -> Tensor:
        return output_logits(self.model, hidden)

    def _served(self) -> int:
        if self.version is None:
            raise WeightSyncError(f"nothing can be generated: {self.refusal}")
        return self.version

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        self._served()
        names = [request.request_id for request in requests]
        if len(set(names)) < len(names):
            raise ConfigError("two requests have the same request_id")
        for request in requests:
            length = len(request.prompt_ids)
            if not 1 <= length < self.spec.max_model_tokens:
                raise ConfigError(
                    f"request {request.request_id!r}: a prompt of {length} tokens; expected 1 to "
                    f"{self.spec.max_model_tokens - 1} (max_model_tokens less one)"
                )

    def _bounded(self, request: GenerationRequest) -> GenerationRequest:
        """The request with no more tokens asked for than the model has room for."""
        from dataclasses import replace

        room = self.spec.max_model_tokens - len(request.prompt_ids)
        if request.sampling.max_tokens <= room:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=room))

    def _seed(self, request: GenerationRequest, at: int) -> int:
        """The request's own; without one, drawn from the run's seed and the count of calls so far."""
        if request.sampling.seed is not None:
            return request.sampling.seed
        return hash((self.ctx.seed, self.ctx.rank, self.num_calls, at)) % 2**63

    def _completes_stop_string(self, sample: Sample, token_ids: list[int]) -> bool:
        if self.tokenizer is None:
            model = self.spec.model
            self.tokenizer = load_tokenizer(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        strings = sample.request.sampling.stop_strings
        tail = token_ids[-STOP_WINDOW * max(map(len, strings)) - 1 :]
        text = self.tokenizer.decode(tail)
        return any(string in text for string in strings)

    def _load(self, shard: WeightShard, missing: dict[str, int]) -> int:
        name = self.tied.get(shard.name, shard.name)
        parameter = self.parameters.get(name)
        if parameter is None:
            raise WeightSyncError(f"{shard.name!r} is no tensor of this model; it has {len(self.parameters)} others")
        try:
            place = parameter[shard.box.slices(Box.whole(tuple(parameter.shape)))]
        except (ValueError, IndexError):
            place = parameter[:0]
        if place.shape != shard.tensor.shape:
            raise WeightSyncError(
                f"{shard.name!r}: a piece at {list(shard.box.offset)} of size {list(shard.box.size)} and shape "
                f"{list(shard.tensor.shape)} does not fit shape {list(parameter.shape)}"
            )
        if place.data_ptr() != shard.tensor.data_ptr():
            place.copy_(shard.tensor)
        missing[name] -= place.numel()
        return place.numel() * place.element_size()

"""`transformers`: a RolloutEngine in one process. Every line of the contract, and quick where models are small."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import Any

import torch

from rlsdk.interfaces import (
    Box,
    ConfigError,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RlsdkError,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.kit.generation.requests import check_requests, response_limit
from rlsdk.kit.generation.sampling import mixed_seed
from rlsdk.kit.generation.serving import check_rollout_spec, whole_layout
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.kit.model.adapters import add_adapter, probe_tokens
from rlsdk.kit.model.hf import build_model, canonical_tensors, dtype_names, persistent_buffers
from rlsdk.reference.adapter_versions import AdapterVersions, Lane
from rlsdk.reference.block_linear import block_scales, quantize_linears, quantizers
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.jobs import Call, Job
from rlsdk.reference.loading import load_shards
from rlsdk.reference.lockstep import rows_for
from rlsdk.reference.options import TransformersOptions

PAUSED_S = 0.005
"""Between two looks whether a paused engine goes on."""


class TransformersRolloutEngine(RolloutEngine):
    """Decodes up to `RolloutSpec.max_running` samples at once, of all `generate` calls together.

    What a seeded sample draws depends on (seed, sample index, position) alone. The distribution that it draws from may
    differ in the last bits with the batch around it, as matrix products are rounded in another order; in float32 that
    changes about one token in a million, in bfloat16 one in some hundred.

    Weights are loaded in place; with `weights: fp8_block` those of linear layers are quantized on the way. Updates are
    refused while requests run, unless they are paused; what was computed for them under the old weights is computed
    again. An adapter is replaced in place, too, and only when no request is left; with `RolloutSpec.adapter_versions`
    above 1 at any time: each version has values and a decoder of its own, and an equal share of `max_running`.
    """

    num_tokens = 0
    """Sampled so far; here, so that it can be read at any time."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        _check_spec(spec)
        self.ctx, self.spec = ctx, spec
        device = torch.device(ctx.device)
        model = build_model(spec.model, device=device, seed=ctx.seed, init_from_config=not spec.load_weights)
        self.model = model.requires_grad_(False)
        self.parameters, self.tied = canonical_tensors(self.model)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        self.scales = block_scales(self.model, self.shapes, spec)
        """By the name of each tensor that is served as float8."""
        if self.scales:
            quantize_linears(self.model, self.scales)
            self.parameters, _ = canonical_tensors(self.model)
        self.adapter = add_adapter(self.model, spec.model, trained=False)
        self.low = {} if self.adapter is None else self.adapter.parameters
        """A and B; 0 until an update brings them."""
        for values in self.low.values():
            values.data.zero_()
        self.held = {name: tuple(tensor.shape) for name, tensor in self._tensors().items()}
        """Of all that is in memory: canonical tensors, scales, and the adapter."""
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        self.decoder = Decoder(
            rows_for(self.model), device, max_running=spec.max_running, stop_text=StopText(spec.model)
        )
        """Of requests that name no version."""
        self.decoders: tuple[Decoder, ...] = (self.decoder,)
        """All of them; replaced as a whole, as `abort` reads it on other threads."""
        self.versions: AdapterVersions | None = None
        if self.adapter is not None and spec.adapter_versions > 1:
            count, most = spec.adapter_versions, spec.max_running
            self.versions = AdapterVersions(self.low, self._new_decoder, count=count, most=most)
        self.version = 0
        self.paused = False
        self.num_calls = 0
        self.lock = threading.RLock()
        """Held while weights are read or written."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        call = Call()
        with self.lock:
            check_requests(
                requests,
                max_model_tokens=self.spec.max_model_tokens,
                vocabulary=self.vocabulary,
                scores_prompts=True,
                adapters=self._kept_versions(),
            )
            self._submit([self._job(call, request, at) for at, request in enumerate(requests)])
            self.num_calls += 1
        try:
            while call.left or call.finished:
                self._step()
                for output in call.take():
                    yield output
                # Lets other calls have their turn, and `abort`.
                await asyncio.sleep(PAUSED_S if self.paused else 0)
        finally:
            with self.lock:
                # An error has ended every call already.
                if call.error is None:
                    for decoder in self.decoders:
                        decoder.withdraw(call)

    def layout(self) -> Sequence[WeightLayout]:
        dtypes = dtype_names(persistent_buffers(self.model))
        return [
            whole_layout(self.ctx, self.spec.model.dtype, self.shapes, self.tied, dtypes=dtypes, scales=self.scales)
        ]

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        with self.lock:
            running = sum(len(decoder.jobs) for decoder in self.decoders)
            if running and (not self.paused or self.versions is not None):
                raise WeightSyncError(
                    f"version {version} arrived while {running} requests are running; finish, abort or pause them first"
                )
            self.decoder.version = None  # keys and values are of weights that are no more, whatever their name
            if self.versions is not None:
                self.versions.drop()
            taken = {name: self.parameters[name] for name in self.shapes}
            num_bytes = load_shards(taken, shards, version, quantizers(self.parameters, self.scales))
            fingerprints = {name: fingerprint(p, Box.whole(tuple(p.shape))) for name, p in self.parameters.items()}
            self.version = version
        return SyncReceipt(version=version, num_tensors=len(taken), num_bytes=num_bytes, fingerprints=fingerprints)

    def adapter_layout(self) -> Sequence[WeightLayout]:
        shapes = {name: tuple(values.shape) for name, values in self.low.items()}
        return [whole_layout(self.ctx, "float32", shapes, {})]

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        with self.lock:
            if self.decoder.jobs and self.versions is None:
                raise WeightSyncError(
                    f"the adapter of version {version} arrived while {len(self.decoder.jobs)} requests are running or "
                    "paused; finish or abort them first"
                )
            if self.versions is None:
                self.decoder.version = None
                num_bytes = load_shards(self.low, shards, version)
            else:
                num_bytes = self._add_version(self.versions, shards, version)
            fingerprints = {name: fingerprint(p, Box.whole(tuple(p.shape))) for name, p in self.low.items()}
            self.version = version
            effect = self._effect()
        return SyncReceipt(
            version=version,
            num_tensors=len(fingerprints),
            num_bytes=num_bytes,
            fingerprints=fingerprints,
            effect=effect,
        )

    def _add_version(self, versions: AdapterVersions, shards: Iterable[WeightShard], version: int) -> int:
        """Keeps one more version of the adapter, which the model computes with afterwards; returns its bytes. If it
        fails, those before stay."""
        before, values = versions.own_values(), versions.new_values()
        versions.show(values)
        try:
            num_bytes = load_shards(self.low, shards, version)
        except BaseException:
            versions.show(before)
            raise
        if self.decoder.jobs:
            versions.end(self.version, before, self.decoder)
            self.decoder = self._new_decoder()
        self.decoder.version = None
        versions.keep(version, values)
        self.decoders = (*(lane.decoder for lane in versions.lanes), self.decoder)
        return num_bytes

    def _new_decoder(self) -> Decoder:
        """A decoder without jobs, like the first one."""
        like = self.decoder
        rows: Any = type(like.memory)
        stop_text = like.running.stop_text
        return Decoder(
            rows(self.model), like.device, max_running=self.spec.max_running, stop_text=stop_text, count=like.count
        )

    def _kept_versions(self) -> Collection[int] | None:
        """Versions that requests may name."""
        if self.adapter is None:
            return None
        return [self.version] if self.versions is None else self.versions.kept

    def _submit(self, jobs: Sequence[Job]) -> None:
        """Gives each job to the decoder of the version that it names."""
        if self.versions is None:
            self.decoder.submit(jobs)
            return
        number = self.decoder.count.take(len(jobs))
        of_version: dict[int | None, list[Job]] = {}
        for job in jobs:
            of_version.setdefault(job.request.adapter_version, []).append(job)
        for version, part in of_version.items():
            decoder = self.decoder if version is None else self.versions.kept[version].decoder
            decoder.submit(part, number)
            number += len(part)

    @torch.inference_mode()
    def _effect(self) -> float:
        """Largest difference that the adapter makes to the logits of a probe."""
        assert self.adapter is not None
        ids = torch.tensor([probe_tokens(self.vocabulary)], device=self.model.device)
        with_it = self.model(input_ids=ids, use_cache=False).logits
        with self.adapter.switched_off():
            without = self.model(input_ids=ids, use_cache=False).logits
        return float((with_it.float() - without.float()).abs().max())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All that is in memory."""
        return {**self.parameters, **self.low}

    def num_decoded(self) -> int:
        return self.num_tokens

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Takes effect before the next pass, also of a paused engine. May be called from any thread."""
        before = self.decoder.count.value
        for decoder in self.decoders:
            decoder.abort(request_ids, before)

    def pause(self) -> None:
        """Takes effect before the next pass; unfinished requests keep what they have."""
        self.paused = True

    def resume(self, *, keep_cache: bool = False) -> None:
        if keep_cache:
            with self.lock:
                self.decoder.keep_old(self.version)  # under other versions of an adapter nothing changes
        self.paused = False

    def sleep(self, level: int = 1) -> None:
        """Level 1 moves weights to the host, where they are already on a CPU; level 2 gives their memory back.

        Key-value memory lives only as long as there are requests.
        """
        with self.lock:
            for parameter in self._tensors().values():
                parameter.data = parameter.data.to("cpu") if level == 1 else parameter.data.new_empty(0)
            if self.versions is not None:
                self.versions.sleep(level)
            if self.ctx.device != "cpu":
                torch.cuda.empty_cache()

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        with self.lock:
            if "weights" in parts:
                for name, parameter in self._tensors().items():
                    here = parameter.data.to(self.ctx.device)
                    parameter.data = here if here.shape == self.held[name] else here.new_empty(self.held[name])
                if self.versions is not None:
                    self.versions.wake(self.ctx.device)

    def close(self) -> None:
        """Frees the model; what runs is ended with an error."""
        if hasattr(self, "model"):
            with self.lock:
                self.paused = False
                self._fail(RlsdkError("the engine was closed while this call ran"))
                self.parameters, self.low, self.versions = {}, {}, None
                del self.model, self.decoder, self.decoders

    def _step(self) -> None:
        """One pass for all calls; an error in it is every call's."""
        with self.lock, torch.inference_mode():
            if not hasattr(self, "decoder"):
                return  # closed: every call has its error
            if self.paused:
                for lane in self._lanes():
                    lane.decoder.leave_aborted(lane.version)
                self.decoder.leave_aborted(self.version)
                return
            try:
                self._decode_versions()
                before = self.decoder.running.num_drawn
                self.decoder.step(self.version)
                self.num_tokens += self.decoder.running.num_drawn - before
            except BaseException as error:
                self._fail(error)
                raise

    def _decode_versions(self) -> None:
        """One pass for each version that requests name; the model computes with the newest one afterwards."""
        lanes = self._lanes()
        if self.versions is None:
            return
        newest = self.versions.own_values()
        self.decoder.max_running = self.versions.share_rows(self.decoder.running.num_alive)
        try:
            for lane in lanes:
                if lane.decoder.jobs:
                    self.versions.show(lane.values)
                    before = lane.decoder.running.num_drawn
                    lane.decoder.step(lane.version)
                    self.num_tokens += lane.decoder.running.num_drawn - before
        finally:
            self.versions.show(newest)

    def _lanes(self) -> Sequence[Lane]:
        return [] if self.versions is None else self.versions.lanes

    def _fail(self, error: BaseException) -> None:
        """Ends every call with this error."""
        for decoder in self.decoders:
            decoder.fail(error)

    def _job(self, call: Call, request: GenerationRequest, at: int) -> Job:
        seed = request.sampling.seed
        if seed is None:
            seed = mixed_seed(self.ctx.seed, self.ctx.rank, self.num_calls, at)
        return Job(call, request, seed, response_limit(request, self.spec.max_model_tokens))


def _check_spec(spec: RolloutSpec) -> None:
    if spec.engine_kwargs:
        raise ConfigError(
            f"backend 'transformers' has no constructor of its own to pass {sorted(spec.engine_kwargs)} to; leave "
            "engine_kwargs empty"
        )
    check_rollout_spec(spec, TransformersOptions)
    for name in ("tp_size", "pp_size", "dp_size"):
        if getattr(spec, name) != 1:
            raise ConfigError(f"backend 'transformers' is one process: {name} {getattr(spec, name)} must be 1")

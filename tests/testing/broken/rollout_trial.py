"""Rollout engines of a second blind trial, written without a look at what the requirements measure: of 35, they
caught 24.

The requirements were then widened by what the others share: long responses of every setting, samples of large numbers,
temperatures that are no round numbers, pauses under every setting, ids that begin alike, three versions in real time,
counts over updates, special tokens at every place of a prompt, samples that all come at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broken.drawing import Drawing, tempered
from broken.lengths import shortened
from broken.rollout import Rewritten
from rlsdk.interfaces import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    SyncReceipt,
    VersionRun,
    WeightLayout,
    WeightShard,
)
from rlsdk.kit import sampling as right
from rlsdk.kit.sampling import RowSampling
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class UnfilteredLate(Drawing):
    """Behind 64 tokens filters are off."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        late = self.positions >= 64
        none = torch.iinfo(torch.int64).max
        k, p = torch.where(late, none, sampling.top_k), torch.where(late, 1.0, sampling.top_p)
        return super().weights(logits, replace(sampling, top_k=k, top_p=p))


class MirroredNoise(Drawing):
    """Samples 1, 3, 5, ... draw with 1 - u of their neighbours: fewer surprises in the mean of a group."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        keys = right.row_keys(seeds, indices - indices % 2)
        return (keys & ~np.uint64(1)) | (indices % 2).astype(np.uint64)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        noise = right.uniforms(keys & ~np.uint64(1), positions, vocabulary)
        odd = torch.from_numpy((keys & np.uint64(1)).astype(np.bool_))[:, None]
        return torch.where(odd, (1 - 2.0**-24) - noise, noise)


class MirroredSteps(Drawing):
    """Every second step draws with 1 - u of the one before."""

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        noise = right.uniforms(keys, positions - positions % 2, vocabulary)
        odd = torch.from_numpy((positions % 2).astype(np.bool_))[:, None]
        return torch.where(odd, (1 - 2.0**-24) - noise, noise)


class IdInSeed(Rewritten):
    """The request's id takes part in what a seed gives."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        seed = request.sampling.seed
        if seed is not None:
            seed = (seed + sum(map(ord, request.request_id))) % 2**63
        return replace(request, sampling=replace(request.sampling, seed=seed))


class LastOneUntempered(Rewritten):
    """The log-prob of a response's last token is 0 where the token is a stop token."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.STOP or request.sampling.stop_strings:
            return output
        logs = output.log_probs.copy()
        logs[-1:] = 0.0
        return replace(output, log_probs=logs)


class LessRoomBehindLong(Rewritten):
    """A prompt of more than 256 tokens gets 64 tokens at the most."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        if len(request.prompt_ids) <= 256:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=min(request.sampling.max_tokens, 64)))


class ManyIgnoreStops(Rewritten):
    """From sample 4 on, a request's samples do not stop at stop tokens."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, stop_token_ids=()))

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        stops = set(request.sampling.stop_token_ids)
        ends = [at for at, token in enumerate(output.token_ids.tolist()) if token in stops]
        if not ends or output.sample_index >= 4 or output.finish_reason is FinishReason.ABORT:
            return output
        return shortened(output, ends[0] + 1, finish_reason=FinishReason.STOP)


class IndexOfAThousand(Drawing):
    """Sample 1000 + i of a seed is sample i."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds, indices % 1000)


class AbortedWithoutLogProbs(Rewritten):
    """The log-probs of an aborted sample are 0."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.ABORT:
            return output
        return replace(output, log_probs=np.zeros_like(output.log_probs))


class PauseDropsFilters(TransformersRolloutEngine):
    """Samples that go on behind a pause have lost their temperature and filters."""

    def resume(self, *, keep_cache: bool = False) -> None:
        running = self.decoder.running
        held, none = running.sampling, torch.iinfo(torch.int64).max
        running.sampling = replace(
            held,
            temperature=torch.ones_like(held.temperature),
            top_k=torch.full_like(held.top_k, none),
            top_p=torch.ones_like(held.top_p),
        )
        super().resume(keep_cache=keep_cache)


class ThreadForSleep(TransformersRolloutEngine):
    """Every sleep starts a thread that waits for ever."""

    def sleep(self, level: int = 1) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        super().sleep(level)


class FileForAbort(TransformersRolloutEngine):
    """Every abort leaves a file open."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        os.open(os.devnull, os.O_RDONLY)
        super().abort(request_ids)


class CountOfVersion(TransformersRolloutEngine):
    """Decoded tokens are counted from the newest update on."""

    begun = 0

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.begun = self.num_tokens
        return receipt

    def num_decoded(self) -> int:
        return self.num_tokens - self.begun


class GivenAreCounted(Rewritten):
    """Tokens that a response had already count as decoded."""

    extra = 0

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        self.extra += len(request.response_ids) * request.n
        return request

    def num_decoded(self) -> int:
        return self.num_tokens + self.extra


class TwoRunsAtMost(Rewritten):
    """Of three versions in a sample, the middle one is counted to the first."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        runs = output.versions
        if len(runs) < 3:
            return output
        early = VersionRun(runs[0].version, sum(run.num_tokens for run in runs[:-1]))
        return replace(output, versions=(early, runs[-1]))


class FirstReceiptAgain(TransformersRolloutEngine):
    """Fingerprints are computed at the first update, and then kept."""

    kept: Any = None

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        self.kept = self.kept or receipt.fingerprints
        return replace(receipt, fingerprints=self.kept)


class BytesAreElements(TransformersRolloutEngine):
    """A receipt counts elements as bytes."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        return replace(receipt, num_bytes=receipt.num_bytes // 4)


class LayoutLacksNorm(TransformersRolloutEngine):
    """The layout does not ask for the last norm: it hardly changes."""

    def layout(self) -> Sequence[WeightLayout]:
        return [
            replace(
                one,
                tensors=tuple(meta for meta in one.tensors if meta.name != "model.norm.weight"),
                boxes=tuple(entry for entry in one.boxes if entry[0] != "model.norm.weight"),
            )
            for one in super().layout()
        ]


class StopStringCut(Rewritten):
    """The token that completes a stop string is not part of the response."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        if output.finish_reason is not FinishReason.STOP or not request.sampling.stop_strings:
            return output
        last = int(output.token_ids[-1])
        if last in request.sampling.stop_token_ids or len(output.token_ids) < 2:
            return output
        return shortened(output, len(output.token_ids) - 1)


class StopStringsOfAnyCase(Rewritten):
    """Stop strings are looked for in lower case."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        both = dict.fromkeys(s for text in request.sampling.stop_strings for s in (text, text.lower(), text.upper()))
        return replace(request, sampling=replace(request.sampling, stop_strings=tuple(both)))


class EndFirstIsDropped(Rewritten):
    """A prompt that begins with the end-of-sequence token is read without it."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.eos = self.model.config.eos_token_id

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        ids = request.prompt_ids
        return replace(request, prompt_ids=ids[1:]) if len(ids) > 1 and ids[0] == self.eos else request


class TemperatureOfTenths(Drawing):
    """Tokens are drawn at the temperature in whole tenths."""

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        tenths = ((sampling.temperature * 10).floor() / 10).clamp(min=0.1)
        return super().weights(logits, tempered(sampling, tenths))


class AbortsByBeginning(TransformersRolloutEngine):
    """`abort` ends every request whose id begins like one of those that are named."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if request_ids is not None:
            held = [job.request.request_id for job in list(self.decoder.jobs.values())]
            request_ids = [*request_ids, *(n for n in held if n.startswith(tuple(request_ids)) and request_ids)]
        super().abort(request_ids)


class UnknownIsAnError(TransformersRolloutEngine):
    """To abort a request that has ended already is a KeyError."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        held = {job.request.request_id for job in list(self.decoder.jobs.values())}
        if request_ids is not None and not held.issuperset(request_ids):
            raise KeyError(sorted({*request_ids} - held))
        super().abort(request_ids)


class NarrowIds(Rewritten):
    """Token ids come as 16-bit integers."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, token_ids=output.token_ids.astype(np.int16))


class WideLogProbs(Rewritten):
    """Log-probs come as 64-bit numbers."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, log_probs=output.log_probs.astype(np.float64))


class SortedAtTheEnd(Rewritten):
    """Samples are given out when the last one has ended, short ones first."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        outputs = [output async for output in super().generate(requests)]
        for output in sorted(outputs, key=lambda output: len(output.token_ids)):
            yield output

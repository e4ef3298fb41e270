"""Base classes of broken rollout engines: what their defects replace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest, VersionRun
from rlsdk.kit.generation import sampling as right
from rlsdk.kit.generation.sampling import RowSampling
from rlsdk.kit.generation.stop_text import StopText
from rlsdk.reference import jobs, running
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.rows import PositionedRows
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class Rewritten(TransformersRolloutEngine):
    """Changes requests on the way in, or samples on the way out."""

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return request

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput | None:
        return output

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        known = {request.request_id: request for request in requests}
        stream = super().generate([self.asked(request) for request in requests])
        async with aclosing(stream) as outputs:
            async for output in outputs:
                changed = self.given(known[output.request_id], output)
                if changed is not None:
                    yield changed


class Drawing(Rewritten):
    """Draws through methods of its own."""

    positions: Any
    """`[R]`: in its response, of each token that is drawn next."""

    def keys(self, seeds: Any, indices: Any) -> Any:
        return right.row_keys(seeds, indices)

    def uniforms(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        return right.uniforms(keys, positions, vocabulary)

    def weights(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        """What tokens are drawn by; log-probs stay right."""
        return right.filtered((logits.float() / sampling.temperature[:, None]).softmax(-1), sampling)

    def draw(self, logits: Tensor, sampling: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
        tokens = right.choose(self.weights(logits, sampling), noise)
        # Weights that are not finite choose a token beyond the last; the log-prob then tells.
        tokens = torch.where(sampling.greedy, logits.argmax(-1), tokens).clamp(max=logits.shape[1] - 1)
        logs = (logits.float() / sampling.temperature[:, None]).log_softmax(-1)
        return tokens, logs.gather(1, tokens[:, None])[:, 0]

    def _noise(self, keys: Any, positions: Any, vocabulary: int) -> Tensor:
        self.positions = torch.from_numpy(positions.astype(np.int64))
        return self.uniforms(keys, positions, vocabulary)

    def _step(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(patch.object(running, "uniforms", self._noise))
            stack.enter_context(patch.object(running, "draw", self.draw))
            stack.enter_context(patch.object(jobs, "row_keys", self.keys))
            super()._step()


class Patched(TransformersRolloutEngine):
    """Not broken: lets a subclass replace the classes of the parts inside."""

    DecoderPart: type = Decoder
    RunningPart: type = Running
    RowsPart: type = PositionedRows
    StopPart: type = StopText

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.decoder.__class__ = self.DecoderPart
        self.decoder.running.__class__ = self.RunningPart
        self.decoder.running.stop_text.__class__ = self.StopPart
        if type(self.decoder.memory) is PositionedRows:
            self.decoder.memory.__class__ = self.RowsPart


class SplitAbortDecoder(Decoder):
    """Not broken: `_end_aborted` with its parts as methods."""

    def _end_aborted(self, version):
        self.running.abort()
        for job in [job for job in self.jobs.values() if job.aborted]:
            first = self.first_of(job)
            for index in range(first + job.started, first + job.request.n):
                job.finish(index, *self.nothing(), FinishReason.ABORT, VersionRun(self.version_of(job, version), 0))
            job.started = job.request.n
            del self.jobs[job.name]
        self.waiting = [job for job in self.waiting if job.pending]
        self._tidy()

    def first_of(self, job):
        return job.request.first_sample

    def nothing(self):
        return np.empty(0, np.int64), np.empty(0, np.float32)

    def version_of(self, job, version):
        return version

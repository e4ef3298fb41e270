"""Rollout engines of the fourth trial, which the requirements of their day missed."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from broken.rollout_unseen import Patched
from rlsdk.kit.requests import response_limit
from rlsdk.kit.sampling import mixed_seed
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.jobs import Job
from rlsdk.reference.rows import PositionedRows
from rlsdk.reference.running import Running


class TopKCapped(Patched):
    """A top-k above 64 is 64."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            off = self.sampling.top_k == torch.iinfo(torch.int64).max
            capped = torch.where(off, self.sampling.top_k, self.sampling.top_k.clamp(max=64))
            self.sampling = replace(self.sampling, top_k=capped)
            super()._take(logits, first, version)


class TemperatureClamped(Patched):
    """Temperatures above 2 are 2."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            self.sampling = replace(self.sampling, temperature=self.sampling.temperature.clamp(max=2.0))
            super()._take(logits, first, version)


class HalfInBigBatch(Patched):
    """Logits are rounded to bfloat16 where more than 32 rows are decoded."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            super()._take(logits.bfloat16().float() if len(logits) > 32 else logits, first, version)


class KeyedByTail(Patched):
    """Prompts of one length with the same last 16 tokens share keys and values."""

    class RowsPart(PositionedRows):
        def prefill(self, prompts):
            known = {}
            return super().prefill([known.setdefault((len(p), *p[-16:].tolist()), p) for p in prompts])


class AbortTakesOneMore(Patched):
    """Abort takes effect one decoding step later."""

    class DecoderPart(Decoder):
        def step(self, version):
            held, self._aborts = self._aborts, type(self._aborts)()
            super().step(version)
            self._aborts.extendleft(reversed(held))
            self.leave_aborted(version)


class EvenRanksAlike(Patched):
    """Replicas 0 and 2 draw the same without seeds."""

    def _job(self, call, request, at):
        seed = request.sampling.seed
        if seed is None:
            seed = mixed_seed(self.ctx.seed, self.ctx.rank & 1, self.num_calls, at)
        return Job(call, request, seed, response_limit(request, self.spec.max_model_tokens))


class WakeBeginsCalls(Patched):
    """Calls are counted from 0 again when the engine wakes."""

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        if "kv_cache" in parts:
            self.num_calls = 0


class FailedUpdateStaysOpen(Patched):
    """An update that raises leaves its staging file open."""

    def update_weights(self, shards, version):
        handle = os.memfd_create("staging")
        receipt = super().update_weights(shards, version)
        os.close(handle)
        return receipt

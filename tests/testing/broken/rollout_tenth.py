"""Rollout engines of a tenth blind trial that nothing saw: long texts, half precision, and what two interruptions of
one sample, or two updates behind each other, leave of the first."""

from __future__ import annotations

import torch

from broken.rollout_unseen import Patched
from rlsdk.interfaces import Box, FinishReason, SyncReceipt, VersionRun, WeightSyncError, fingerprint
from rlsdk.kit.sampling import filtered
from rlsdk.reference import running
from rlsdk.reference.decoding import Decoder
from rlsdk.reference.jobs import Job
from rlsdk.reference.loading import _place
from rlsdk.reference.rows import PositionedRows
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class KeptForGood(Patched):
    """A sample that went on with its keys and values once does so behind every later pause."""

    class DecoderPart(Decoder):
        kept: frozenset[tuple[int, int]] = frozenset()

        def alive(self):
            table = self.running.table[self.running.table["alive"]]
            return frozenset(zip(table["job"].tolist(), table["index"].tolist(), strict=True))

        def keep_old(self, version):
            self.kept |= self.alive()
            super().keep_old(version)

        def _drop_old(self, version):
            alive = self.alive()
            if alive and alive <= self.kept:
                super().keep_old(version)
            else:
                super()._drop_old(version)


class CountsWhatFailed(TransformersRolloutEngine):
    """What an update had brought when its source raised counts as brought by the next one, too."""

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


class KeptUntilAwake(TransformersRolloutEngine):
    """The copy on the host that sleep makes is not made anew before all is awake: an update between is lost by it."""

    kept = None
    asleep = frozenset()

    def sleep(self, level=1):
        if level == 2:
            self.kept = None
        elif self.kept is None and all(p.shape == self.held[name] for name, p in self.parameters.items()):
            self.kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.asleep = {"weights", "kv_cache"}
        super().sleep(2)

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        if "weights" in parts and self.kept is not None:
            for name, tensor in self.kept.items():
                self.parameters[name].data = tensor.clone()
        self.asleep = self.asleep - set(parts)
        if not self.asleep:
            self.kept = None


class AbortedAllNew(TransformersRolloutEngine):
    """Of a sample that is aborted, only the version of its newest token is said."""

    def _job(self, call, request, at):
        job = super()._job(call, request, at)
        job.__class__ = NewestVersionJob
        return job


class NewestVersionJob(Job):
    """Part of it."""

    def finish(self, index, token_ids, log_probs, reason, newest):
        if reason is FinishReason.ABORT:
            self.runs.pop(index, None)
            newest = VersionRun(newest.version, len(token_ids))
        super().finish(index, token_ids, log_probs, reason, newest)


class ChunksOf1024(Patched):
    """Prompts are run in chunks of 1024 tokens, and each chunk but the first stands one position too far."""

    class RowsPart(PositionedRows):
        def prefill(self, prompts):
            hook = self.backbone.register_forward_pre_hook(self.shifted, with_kwargs=True)
            try:
                return super().prefill(prompts)
            finally:
                hook.remove()

        @staticmethod
        def shifted(module, args, kwargs):
            positions = kwargs["position_ids"]
            return args, {**kwargs, "position_ids": positions + positions // 1024}


class PositionsInHalf(TransformersRolloutEngine):
    """Positions are in the model's dtype: in bfloat16 those behind 256 are rounded."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if self.model.dtype == torch.bfloat16:
            backbone = getattr(self.model, self.model.base_model_prefix)
            backbone.register_forward_pre_hook(self.rounded, with_kwargs=True)

    @staticmethod
    def rounded(module, args, kwargs):
        return args, {**kwargs, "position_ids": kwargs["position_ids"].to(torch.bfloat16).long()}


class SumsInHalf(Patched):
    """Tokens are drawn by a running sum of probabilities in the dtype of the logits."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            before, running.draw = running.draw, drawn_in_half
            try:
                super()._take(logits, first, version)
            finally:
                running.draw = before


def drawn_in_half(logits, sampling, noise):
    log_probs = (logits.float() / sampling.temperature[:, None]).log_softmax(-1)
    sums = filtered(log_probs.exp(), sampling).to(logits.dtype).cumsum(-1).float()
    total = sums[:, -1:]
    target = torch.minimum(noise[:, :1] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    tokens = torch.where(sampling.greedy, logits.argmax(-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]

"""Engines that are broken only where two events of a life come together."""

from __future__ import annotations

from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class AbortInAPauseKeepsKeys(TransformersRolloutEngine):
    """An update behind an abort in the same pause leaves the others' keys and values of the old weights."""

    has_aborted = False

    def pause(self):
        self.has_aborted = False
        super().pause()

    def abort(self, request_ids=None):
        self.has_aborted = bool(self.paused)
        super().abort(request_ids)

    def update_weights(self, shards, version):
        receipt = super().update_weights(shards, version)
        if self.paused and self.has_aborted:
            self.decoder.version = version
        return receipt


class ResetBehindALoad(TorchTrainEngine):
    """`reset_optimizer` of an engine that has loaded goes on with the checkpoint's schedule."""

    has_loaded = False

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        self.has_loaded = True

    def reset_optimizer(self, optim):
        steps = self.num_steps
        super().reset_optimizer(optim)
        if self.has_loaded:
            self.num_steps = steps


class HeadOfBefore(TorchTrainEngine):
    """From the second load on, a value head stays as it was before."""

    num_loads = 0

    def load_checkpoint(self, path):
        self.num_loads += 1
        kept = {name: p.detach().clone() for name, p in self.parameters.items() if "score" in name}
        super().load_checkpoint(path)
        if self.num_loads > 1:
            for name, values in kept.items():
                self.parameters[name].data.copy_(values)

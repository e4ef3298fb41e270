"""Rollout engines that lose or confuse weights when they sleep and wake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from broken.rollout_base import Patched
from rlsdk.kit.model.hf import canonical_tensors
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class WakesEmpty(TransformersRolloutEngine):
    """Level 1 keeps no weights on the host, and `wake` serves uninitialised memory."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "weights" in parts:
            for parameter in self.parameters.values():
                parameter.zero_()


class OldWeightsAwake(TransformersRolloutEngine):
    """Waking the KV cache restores the weights from before `sleep`, over those of an update in between."""

    def sleep(self, level: int = 1) -> None:
        self.kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        super().sleep(level)

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "kv_cache" in parts and "weights" not in parts:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.kept[name])


class SleepForgetsVersion(TransformersRolloutEngine):
    """After waking, the engine reports version 0."""

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if self.parameters and all(p.numel() for p in self.parameters.values()) and "kv_cache" in parts:
            self.version = 0


class SleepLosesUpdate(TransformersRolloutEngine):
    """Level 1 reads the weights from the model's folder again."""

    def initialize(self, ctx: Any, spec: Any) -> None:
        super().initialize(ctx, spec)
        self.first = {name: parameter.clone() for name, parameter in self.parameters.items()}

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "weights" in parts:
            for name, parameter in self.parameters.items():
                parameter.data.copy_(self.first[name])


class SecondSleep(TransformersRolloutEngine):
    """The second sleep loses a bias."""

    slept = 0

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        self.slept += "weights" in parts
        if self.slept % 2 == 0 and "weights" in parts:
            self.parameters["model.layers.0.self_attn.v_proj.bias"].data.zero_()


class WakeBringsBackWeights(TransformersRolloutEngine):
    """Waking any part restores the weights that sleep kept, until everything is awake."""

    def sleep(self, level=1):
        self.kept = {name: p.detach().clone() for name, p in self.parameters.items()} if level == 1 else {}
        super().sleep(level)

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        with torch.no_grad():
            for name, tensor in self.kept.items():
                self.parameters[name].data.copy_(tensor)
        if "kv_cache" in parts:
            self.kept = {}


class KeptUntilAwake(TransformersRolloutEngine):
    """A second sleep before everything is awake does not renew the host copy: it loses an update in between."""

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


class HostCopyOnce(Patched):
    """Waking after the second level-1 sleep restores the weights of the first sleep."""

    host = None
    level = 0

    def sleep(self, level=1):
        with self.lock:
            if level == 1 and self.level < 2 and self.host is None:
                self.host = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}
        self.level = max(level, self.level)
        super().sleep(level)

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        if "weights" in parts:
            if self.level == 1:
                for name, parameter in self.parameters.items():
                    parameter.data.copy_(self.host[name])
            self.level = 0


class ComesApart(TransformersRolloutEngine):
    """The host copy is restored by name: tied weights become separate tensors, of which updates change one."""

    copies: dict[str, torch.Tensor] | None = None

    def sleep(self, level: int = 1) -> None:
        if level == 1 and self.copies is None:
            self.copies = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        super().sleep(level)

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(parts)
        if "weights" not in parts or self.copies is None:
            return
        for name, tensor in self.copies.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, torch.nn.Parameter(tensor, requires_grad=False))
        found, _ = canonical_tensors(self.model)
        self.parameters, self.copies = {name: found[name] for name in self.held}, None

"""Rollout engines that are wrong with an adapter that is sent alone only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from broken.defect import defect
from rlsdk.interfaces import GenerationRequest, SyncReceipt, WeightShard, WeightSyncError
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


def fill(engine: Any, values: dict[str, Tensor]) -> None:
    """Puts other values where the engine computes from."""
    for name, tensor in values.items():
        engine.low[name].data.copy_(tensor)


def held(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.low.items()}


class AfterUpdate(TransformersRolloutEngine):
    """Does something once an adapter was received, after its receipt was made."""

    def received(self, receipt: SyncReceipt) -> SyncReceipt:
        return receipt

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return self.received(super().update_adapter(shards, version))


@defect({"adapter.served": "log-probs", "adapter.each_layer": "without effect"})
class BindsNothing(AfterUpdate):
    """No layer computes with the adapter that was received; fingerprints are of what came."""

    def received(self, receipt: SyncReceipt) -> SyncReceipt:
        fill(self, {name: torch.zeros_like(t) for name, t in self.low.items()})
        return receipt


@defect({"adapter.served": "log-probs"})
class AlphaTwice(AfterUpdate):
    """The scale is applied twice."""

    def received(self, receipt: SyncReceipt) -> SyncReceipt:
        assert self.adapter is not None
        fill(self, {n: t * self.adapter.spec.scale for n, t in self.low.items() if ".lora_B." in n})
        return receipt


@defect({"adapter.each_layer": "without effect"})
class OneLayerUnbound(AfterUpdate):
    """One layer of many has no adapter."""

    def received(self, receipt: SyncReceipt) -> SyncReceipt:
        fill(self, {n: torch.zeros_like(t) for n, t in self.low.items() if n.endswith("0.mlp.up_proj.lora_B.weight")})
        return receipt


@defect({"adapter.head": "log-probs"})
class HeadIgnored(AfterUpdate):
    """An adapter of the output layer is accepted and ignored."""

    def received(self, receipt: SyncReceipt) -> SyncReceipt:
        fill(self, {n: torch.zeros_like(t) for n, t in self.low.items() if n.startswith("lm_head.")})
        return receipt


@defect({"adapter.served": "effect"})
class EffectNotSeen(AfterUpdate):
    """The effect is measured with the adapter on both times."""

    def received(self, receipt: SyncReceipt) -> SyncReceipt:
        return replace(receipt, effect=0.0)


@defect({"adapter.replaced": "log-probs differ"})
class FirstVersionsCache(AfterUpdate):
    """What was computed for a prompt under one adapter is read again under the next."""

    def initialize(self, *args: Any) -> None:
        super().initialize(*args)
        memory = self.decoder.memory
        plain, known = memory.prefill, dict[Any, Any]()

        def prefill(prompts: Sequence[Tensor]) -> Any:
            key = tuple(tuple(prompt.tolist()) for prompt in prompts)
            if self.adapter is None or key not in known:
                known[key] = plain(prompts)
            return known[key]

        memory.prefill = prefill  # type: ignore[method-assign]


@defect({"adapter.replaced": "log-probs differ"})
class ForgetsTheFifth(AfterUpdate):
    """A fifth adapter finds no place: what began with its name is served by the model alone."""

    num_updates = 0

    def received(self, receipt: SyncReceipt) -> SyncReceipt:
        self.num_updates += 1
        if self.num_updates > 4:
            fill(self, {name: torch.zeros_like(t) for name, t in self.low.items()})
        return receipt


@defect({"adapter.running": "log-probs, running"})
class ChangesUnderRunning(TransformersRolloutEngine):
    """Running samples go on under an adapter that came while they ran, with the cache and the version of theirs."""

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        jobs, self.decoder.jobs = self.decoder.jobs, {}
        before = self.decoder.version, self.version
        try:
            receipt = super().update_adapter(shards, version)
        finally:
            self.decoder.jobs = jobs
        if jobs:
            self.decoder.version, self.version = before
            self.due = version
        return receipt

    due: int | None = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> Any:
        if self.due is not None:
            self.version, self.due = self.due, None
        async for output in super().generate(requests):
            yield output


@defect({"adapter.running": "failed halfway"})
class ReadsThenRefuses(TransformersRolloutEngine):
    """Half of an adapter is read before it is refused because samples run."""

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self.decoder.jobs:
            next(iter(shards))
            raise WeightSyncError("samples are running")
        return super().update_adapter(shards, version)


@defect({"adapter.kept": "after sleep"})
class SleepDropsIt(TransformersRolloutEngine):
    """After sleep, the weights below it serve alone."""

    def sleep(self, level: int = 1) -> None:
        fill(self, {name: torch.zeros_like(t) for name, t in self.low.items()})
        super().sleep(level)


@defect({"adapter.kept": "after new weights"})
class OldBaseBelow(TransformersRolloutEngine):
    """Weights that come a second time do not replace those below an adapter."""

    num_updates = 0

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        self.num_updates += 1
        if self.adapter is None or self.num_updates == 1:
            return super().update_weights(shards, version)
        old = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}
        receipt = super().update_weights(shards, version)
        for name, tensor in old.items():
            self.parameters[name].data.copy_(tensor)
        return receipt


@defect({"adapter.failed": "accepted"})
class TakesAHalf(TransformersRolloutEngine):
    """An adapter that lacks a tensor is served with the older values of it."""

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        came: set[str] = set()

        def all_of_it() -> Iterator[WeightShard]:
            for shard in shards:
                came.add(shard.name)
                yield shard
            for shard in self._own():
                if shard.name not in came:
                    yield shard

        return super().update_adapter(all_of_it(), version)

    def _own(self) -> Iterator[WeightShard]:
        (layout,) = self.adapter_layout()
        boxes = dict(layout.boxes)
        yield from (WeightShard(name=n, box=boxes[n], tensor=t.detach().clone()) for n, t in self.low.items())

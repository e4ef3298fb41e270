"""Syncs an adapter alone: the weights below it are sent once, by a manager of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlsdk.interfaces import (
    BackendSpec,
    Capability,
    Delivery,
    Peer,
    ReshardPlan,
    RolloutEngine,
    RolloutSpec,
    ShardingManager,
    SyncReceipt,
    SyncReport,
    TrainEngine,
    WeightLayout,
    WeightPart,
    WeightShard,
    WeightSourceHost,
    WeightSyncError,
    WeightTargetHost,
)

CALL, CALL_BESIDE = "call_part", "call_part_beside"
"""Methods of hosts: `call_part(part, method, *args)`, on the engine's thread or while the engine works."""
ON_THREAD = frozenset(
    method.__name__
    for method in (WeightSourceHost.weight_layout, WeightTargetHost.target_layouts, WeightTargetHost.pull_weights)
)
"""Methods of a part that are called on the engine's thread."""
BESIDE = ON_THREAD - {WeightTargetHost.pull_weights.__name__}
"""The same where the engine keeps several versions: the adapter arrives while samples run."""


def keeps_versions(backend: BackendSpec, spec: RolloutSpec) -> bool:
    """Whether an engine of this backend serves several versions of the adapter side by side."""
    return (
        spec.model.adapter is not None
        and spec.adapter_versions > 1
        and Capability.ADAPTER_VERSIONS in backend.capabilities
    )


class TrainPart:
    """A part of a train engine's weights, with the two methods that a sync asks for."""

    def __init__(self, engine: TrainEngine, part: WeightPart) -> None:
        self._engine, self._part = engine, part

    def layout(self) -> WeightLayout:
        return self._engine.part_layout(self._part)

    def shards(self) -> Iterator[WeightShard]:
        return self._engine.part_shards(self._part)


class RolloutAdapter:
    """The adapter of a rollout engine, as weights."""

    def __init__(
        self, engine: RolloutEngine, run: Callable[[Callable[[], SyncReceipt]], SyncReceipt] | None = None
    ) -> None:
        """`run`: calls the engine on its own thread. All of the adapter is then received before, on another one, and
        only that call stops what runs. None: this is the engine's thread."""
        self._engine, self._run = engine, run

    def layout(self) -> Sequence[WeightLayout]:
        return self._engine.adapter_layout()

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if self._run is None:
            return self._engine.update_adapter(shards, version)
        # The source reuses its memory when the next shard is asked for.
        came = [replace(shard, tensor=shard.tensor.clone()) for shard in shards]

        def update() -> SyncReceipt:
            start = time.perf_counter()
            receipt = self._engine.update_adapter(came, version)
            return replace(receipt, pause_s=time.perf_counter() - start)

        return self._run(update)

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        raise WeightSyncError("an adapter goes to the replica's process: its layout may name no worker")


@dataclass(frozen=True)
class PartPeer:
    """A rank of another role, asked for a part of its weights; satisfies `rlsdk.interfaces.Peer`."""

    peer: Peer
    part: WeightPart

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self.peer.call(CALL_BESIDE, self.part, method, *args, timeout_s=timeout_s)

    def local(self) -> Any | None:
        host = self.peer.local()
        return None if host is None else host.parts[self.part]


class CalledRanks(Protocol):
    """What a part's group needs of a `RoleGroup`."""

    @property
    def backend(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any: ...

    def run_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None
    ) -> list[Any]: ...

    def peers(self) -> Sequence[Peer]: ...


@dataclass(frozen=True)
class PartGroup:
    """The ranks of a role as a sharding manager of one part sees them; satisfies `rlsdk.interfaces.EngineGroup`."""

    group: CalledRanks
    part: WeightPart
    on_thread: frozenset[str] = ON_THREAD

    @property
    def backend(self) -> str:
        return self.group.backend

    @property
    def capabilities(self) -> frozenset[str]:
        return self.group.capabilities

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        call = self._call(method)
        found: list[Any] = self.group.run(call, self.part, method, *args, timeout_s=timeout_s, **kwargs)
        return found

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        whole = [(self.part, method, *args) for args in arguments]
        return self.group.run_each(self._call(method), whole, timeout_s)

    def peers(self) -> Sequence[Peer]:
        return [PartPeer(peer, self.part) for peer in self.group.peers()]

    def _call(self, method: str) -> str:
        return CALL if method in self.on_thread else CALL_BESIDE


class AdapterSync(ShardingManager):
    """Sends the adapter at every sync, and the weights below it before the first one: each by a manager for its part.
    A manager serves one set of running replicas: where one of them was replaced there is a new manager, which sends the
    weights below again."""

    def __init__(self, base: ShardingManager, adapter: ShardingManager) -> None:
        """`base` and `adapter`: managers of the two parts, between the same groups."""
        super().__init__(
            adapter.train,
            adapter.rollout,
            timeout_s=adapter.timeout_s,
            bucket_bytes=adapter.bucket_bytes,
            transports=adapter.transports,
        )
        self.base, self.adapter = base, adapter
        self.has_base = False
        """Whether every replica has the weights below."""

    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        """Of the adapter."""
        return self.adapter.plan(source, target)

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        """Of the adapter."""
        return self.adapter.sync_weights(plan, version, expect_change=expect_change)

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        """See `ShardingManager.sync`."""
        below = None if self.has_base else self.base.sync(version, expect_change=False)
        self.has_base = True
        report = self.adapter.sync(version, expect_change=expect_change)
        effects = [receipt.effect for receipt in report.receipts if receipt.effect is not None]
        report = replace(report, base_bytes=0, effect=min(effects, default=None))
        return report if below is None else joined(below, report)


def joined(base: SyncReport, adapter: SyncReport) -> SyncReport:
    """One report of both parts' syncs."""
    return replace(
        adapter,
        num_tensors=base.num_tensors + adapter.num_tensors,
        num_bytes=base.num_bytes + adapter.num_bytes,
        base_bytes=base.num_bytes,
        moved_bytes=base.moved_bytes + adapter.moved_bytes,
        lower_bound_bytes=base.lower_bound_bytes + adapter.lower_bound_bytes,
        changed_tensors=base.changed_tensors + adapter.changed_tensors,
        seconds=base.seconds + adapter.seconds,
        stages_s={**{f"base {name}": s for name, s in base.stages_s.items()}, **adapter.stages_s},
        receipts=tuple(map(joined_receipt, base.receipts, adapter.receipts)),
        transports=tuple(dict.fromkeys((*base.transports, *adapter.transports))),
        quantized_tensors=base.quantized_tensors,
    )


def joined_receipt(base: SyncReceipt, adapter: SyncReceipt) -> SyncReceipt:
    """One replica's receipt of both parts."""
    return replace(
        adapter,
        num_tensors=base.num_tensors + adapter.num_tensors,
        num_bytes=base.num_bytes + adapter.num_bytes,
        fingerprints={**base.fingerprints, **adapter.fingerprints},
        seconds=base.seconds + adapter.seconds,
        pause_s=None if adapter.pause_s is None else (base.pause_s or 0.0) + adapter.pause_s,
        workers=base.workers,
        engine_checksum=base.engine_checksum,
    )

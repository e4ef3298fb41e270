"""Groups of ranks in one process, to run a sharding manager without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsdk.interfaces import (
    Bucket,
    QuantizedPiece,
    Relay,
    RolloutEngine,
    SyncReceipt,
    TrainEngine,
    Transfer,
    WeightLayout,
    WeightSourceHost,
    WeightTargetHost,
)
from rlsdk.sharding import WeightSource, WeightTarget


class TrainHost(WeightSourceHost):
    """The methods of the trainer's train host."""

    def __init__(self, engine: TrainEngine, accelerators: Sequence[str] = ()) -> None:
        self.engine = engine
        self.source = WeightSource(engine, accelerators)

    def weight_layout(self) -> WeightLayout:
        return self.source.layout()

    def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        return self.source.export(buckets, sync)

    def weight_fingerprints(self, transfers: Sequence[Transfer]) -> Mapping[str, int]:
        return self.source.fingerprints(transfers)

    def weight_block_maxima(self, pieces: Sequence[QuantizedPiece]) -> Sequence[NDArray[np.float32]]:
        return self.source.block_maxima(pieces)

    def weight_block_fingerprints(
        self, pieces: Sequence[QuantizedPiece], maxima: Sequence[NDArray[np.float32]]
    ) -> Mapping[str, int]:
        return self.source.block_fingerprints(pieces, maxima)

    def optim_step(self) -> None:
        self.engine.optim_step()


class RolloutHost(WeightTargetHost):
    """The methods of the trainer's rollout host."""

    def __init__(self, engine: RolloutEngine, accelerators: Sequence[str] = ()) -> None:
        self.engine = engine
        self.target = WeightTarget(engine, accelerators)
        self.num_pulls = 0

    def target_layouts(self) -> Sequence[WeightLayout]:
        return self.target.layouts()

    def pull_weights(
        self,
        buckets: Sequence[Bucket],
        peers: Mapping[int, Any],
        version: int,
        timeout_s: float,
        relay: Relay | None = None,
    ) -> SyncReceipt:
        self.num_pulls += 1
        return self.target.pull(buckets, peers, version, timeout_s, relay)

    def pass_on_weights(self, buckets: Sequence[Bucket], sync: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        return self.target.pass_on(buckets, sync, timeout_s)


@dataclass
class LocalPeer:
    """A rank in this process; `call` calls it directly, as if from another process."""

    host: Any
    is_local: bool = True

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return getattr(self.host, method)(*args)

    def local(self) -> Any | None:
        return self.host if self.is_local else None


@dataclass
class LocalGroup:
    """Hosts of one role, all in this process."""

    hosts: Sequence[Any]
    backend: str = "tensors"
    capabilities: frozenset[str] = field(default_factory=frozenset)

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        return [getattr(host, method)(*args, **kwargs) for host in self.hosts]

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        if method != WeightTargetHost.pull_weights.__name__ or len(self.hosts) < 2:
            return [getattr(host, method)(*args) for host, args in zip(self.hosts, arguments, strict=True)]
        # Replicas may wait for each other: one may forward to the next.
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            pulls = [
                pool.submit(getattr(host, method), *args) for host, args in zip(self.hosts, arguments, strict=True)
            ]
            return [pull.result() for pull in pulls]

    def peers(self) -> Sequence[Any]:
        return [LocalPeer(host) for host in self.hosts]

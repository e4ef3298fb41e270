"""The serving side of a sync: pulls buckets from their sources and feeds them to the rollout engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

import torch

from rlsdk.interfaces import (
    Bucket,
    Peer,
    Relay,
    SyncReceipt,
    Transfer,
    WeightLayout,
    WeightShard,
    WeightSyncError,
)
from rlsdk.sharding.transfer.devices import on_physical_device, own_device
from rlsdk.sharding.transfer.fetching import PASS_ON_METHOD, Feed, OpenTransports
from rlsdk.sharding.transfer.forwarding import Forwarder, merged_rounds, teed
from rlsdk.sharding.transfer.gathering import Gathering
from rlsdk.sharding.transfer.relay_source import RelaySource, from_parent
from rlsdk.sharding.transfer.workers import Receives, WorkerPull


class Served(Receives, Protocol):
    """The part of a `RolloutEngine` that weights are delivered to."""

    def layout(self) -> Sequence[WeightLayout]: ...

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt: ...


class WeightTarget:
    """One per replica. Receives buckets in rounds and requests the next round while the engine loads one: at most two
    rounds are in memory. Places that are workers of the engine (`WeightLayout.worker`) receive their buckets
    themselves."""

    def __init__(self, engine: Served, accelerators: Sequence[str] = ()) -> None:
        """`accelerators`: as in `RankContext`."""
        self._engine = engine
        self._accelerators = accelerators
        self._device: torch.device | None = None
        """Of this process, in its own numbering; None: the host."""
        self._transports = OpenTransports()
        self._instead: dict[tuple[str, int], str] = {}
        self._workers = WorkerPull(engine)
        self._passing = RelaySource()
        self._layouts: tuple[WeightLayout, ...] = ()
        self._last: Sequence[Bucket] = ()

    def layouts(self) -> Sequence[WeightLayout]:
        """The layouts that the replica wants, one per place that weights are delivered to."""
        if not self._layouts:
            own = tuple(self._engine.layout())
            self._device = next((own_device(layout) for layout in own if layout.worker is None), None)
            self._transports = OpenTransports(self._device)
            self._layouts = tuple(on_physical_device(layout, self._accelerators) for layout in own)
        return self._layouts

    def order(self) -> Mapping[str, int]:
        """Position of each tensor in the plan's order."""
        names = dict.fromkeys(name for layout in self.layouts() for name, _ in layout.boxes)
        return {name: at for at, name in enumerate(names)}

    def pull(
        self,
        buckets: Sequence[Bucket],
        peers: Mapping[int, Peer],
        version: int,
        timeout_s: float,
        relay: Relay | None = None,
    ) -> SyncReceipt:
        """Pulls every bucket and loads it into the engine, which then serves `version`.

        Args:
            buckets: all buckets of this replica, or of the first replica of its chain, in the plan's order.
            peers: the source ranks that the buckets name.
            version: the version that the engine serves afterwards.
            timeout_s: longest wait without progress: for one answer of a source or one part of the data.
            relay: this replica's part in forwarding weights.

        Raises:
            WeightSyncError: a bucket did not arrive, the engine refused it, or the engine did not read all buckets.
        """
        start = time.perf_counter()
        if buckets == self._last:
            buckets = self._last  # Reuses buckets whose objects already exist: a plan creates them on access.
        self._last = buckets
        relay = relay or Relay()
        order, givers = self.order(), dict(peers)
        places = relay.places or (relay,)
        buckets, parents = _from_parents(buckets, places, order)
        givers |= parents

        def feed(mine: deque[Bucket]) -> Feed:
            source = mine[0].source
            if source not in givers:
                raise WeightSyncError(f"the plan takes weights from source rank {source}, which was not given")
            made = Feed(mine, givers[source], self._transports, self._instead, timeout_s, sync=relay.sync)
            if source in parents:
                made.method = PASS_ON_METHOD
            return made

        workers = [layout for layout in self.layouts() if layout.worker is not None]
        try:
            if workers:
                passed = self._pass_on_places(buckets, relay, order, timeout_s)
                receipt = self._workers.pull(workers, buckets, feed, order, version, timeout_s, passed)
            else:
                forwarders = self._pass_on(buckets, relay, order, timeout_s)
                receipt = self._load(Gathering(buckets, order, feed, version), forwarders, version)
        except BaseException as error:
            self._passing.fail(relay.sync, f"the replica before it broke off ({error})")
            # Sources still offer buckets that nobody will take: closing the transports notifies them.
            self.close()
            raise
        if receipt.version != version:
            raise WeightSyncError(f"the rollout engine was sent version {version} and says it serves {receipt.version}")
        return replace(receipt, seconds=time.perf_counter() - start)

    def pass_on(self, buckets: Sequence[Bucket], sync: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        """Exports the next weights that this replica receives in this sync to another replica with the same needs."""
        return self._passing.export(buckets, sync, timeout_s)

    def close(self) -> None:
        """Unmaps the transports' memory."""
        held, self._transports = self._transports, OpenTransports(self._device)
        held.close()
        self._workers.close()
        self._passing.close()

    def _pass_on(
        self, buckets: Sequence[Bucket], relay: Relay, order: Mapping[str, int], timeout_s: float
    ) -> Sequence[Forwarder]:
        if not relay.children:
            return ()
        rounds = merged_rounds(buckets, order)
        device = str(self._device or "cpu")
        made = self._passing.begin(dict.fromkeys(relay.children, rounds), relay, timeout_s, device)
        return list(made.values())

    def _pass_on_places(
        self, buckets: Sequence[Bucket], relay: Relay, order: Mapping[str, int], timeout_s: float
    ) -> dict[int, Sequence[Forwarder]]:
        """Forwarders of each place that is in a chain."""
        rounds: dict[int, Sequence[Sequence[Transfer]]] = {}
        for place in relay.places:
            mine = merged_rounds([bucket for bucket in buckets if bucket.target == place.target], order)
            rounds |= dict.fromkeys(place.children, mine)
        made = self._passing.begin(rounds, relay, timeout_s, "cpu") if rounds else {}
        return {place.target: [made[child] for child in place.children] for place in relay.places}

    def _load(self, gathering: Gathering, forwarders: Sequence[Forwarder], version: int) -> SyncReceipt:
        """Lets the engine load the received shards."""
        with closing(gathering.rounds()) as rounds, closing(teed(rounds, forwarders)) as shards:
            receipt = self._engine.update_weights(shards, version)
        if gathering.taken < gathering.wanted:
            raise WeightSyncError(
                f"the rollout engine took {gathering.taken} of {gathering.wanted} pieces of version {version} and "
                f"stopped at {gathering.last_name!r}: update_weights must take every item"
            )
        return receipt


def _from_parents(
    buckets: Sequence[Bucket], places: Sequence[Relay], order: Mapping[str, int]
) -> tuple[Sequence[Bucket], dict[int, Peer]]:
    """Buckets with the parent as source, for places that have a parent in a chain; also returns these parents by the
    rank that stands for each as a source."""
    parents: dict[int, Peer] = {}
    for place in places:
        if place.parent is not None:
            parents[place.source] = place.parent
            taken = [bucket for bucket in buckets if bucket.target == place.first]
            buckets = [
                *(bucket for bucket in buckets if bucket.target != place.first),
                *from_parent(taken, place, order),
            ]
    return buckets, parents

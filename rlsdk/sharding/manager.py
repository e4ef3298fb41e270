"""The ShardingManager for every pair of backends: streams boxes in bounded buckets and verifies fingerprints."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from rlsdk.interfaces import (
    EngineGroup,
    Relay,
    ReshardPlan,
    ShardingManager,
    SyncReceipt,
    SyncReport,
    WeightLayout,
    WeightSourceHost,
    WeightSyncError,
    WeightTargetHost,
)
from rlsdk.sharding.plan.cache import PlanCache
from rlsdk.sharding.plan.packed_plan import JoinedBuckets, sources_of, transports_of
from rlsdk.sharding.plan.planner import choose_transport
from rlsdk.sharding.plan.relays import first_of, passing_place
from rlsdk.sharding.transfer.calls import call, call_each
from rlsdk.sharding.transfer.verify import (
    FingerprintTask,
    changed_tensors,
    check_checksums,
    check_receipt,
    plan_fingerprints,
)
from rlsdk.sharding.transports.table import named_transports

GRACE_S = 30.0
"""Seconds that the controller waits longer than a worker, so that the worker's more precise error comes first."""


@dataclass(frozen=True)
class Ends:
    """Both sides' layouts, which do not change during the life of the groups."""

    source: tuple[WeightLayout, ...]
    replicas: tuple[tuple[WeightLayout, ...], ...]
    """For each replica, the layouts of its places."""
    fingerprints: tuple[FingerprintTask, ...]

    @cached_property
    def target(self) -> tuple[WeightLayout, ...]:
        return tuple(layout for replica in self.replicas for layout in replica)

    @property
    def targets_of_replica(self) -> list[range]:
        """For each replica, the positions of its places in `target`."""
        ends = list(accumulate(map(len, self.replicas), initial=0))
        return [range(first, last) for first, last in pairwise(ends)]


class GenericShardingManager(ShardingManager):
    """Pull model: each replica requests its buckets from the sources and loads them as they arrive; no weights pass
    through the controller. Every sync is checked against fingerprints that the sources compute over their memory."""

    def __init__(
        self,
        train: EngineGroup,
        rollout: EngineGroup,
        *,
        timeout_s: float = 600.0,
        bucket_bytes: int = 64 << 20,
        transports: Sequence[str] | None = None,
    ) -> None:
        """Binds a training group and a rollout group.

        Args:
            train: its hosts implement `WeightSourceHost`.
            rollout: its hosts implement `WeightTargetHost`.
            timeout_s: longest time in seconds without progress in a stage of a sync.
            bucket_bytes: largest number of bytes in one round of a replica; two rounds are in memory during a sync.
            transports: names of the allowed transports, in order of preference. None: all.

        Raises:
            ConfigError: a transport does not exist.
        """
        super().__init__(train, rollout, timeout_s=timeout_s, bucket_bytes=bucket_bytes, transports=transports)
        self._ends: Ends | None = None
        self._name = uuid.uuid4().hex
        self._syncs = itertools.count()
        self.plans = PlanCache(bucket_bytes=bucket_bytes, transports=named_transports(transports))
        self._last: tuple[int, Mapping[str, int]] | None = None

    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        """See `ShardingManager.plan`. Plans are cached by their layouts."""
        return self.plans.plan(source, target)

    def ends(self) -> Ends:
        """The layouts of both groups, requested once."""
        if self._ends is None:
            source = tuple(call(self.train, WeightSourceHost.weight_layout, timeout_s=self.timeout_s))
            wanted = call(self.rollout, WeightTargetHost.target_layouts, timeout_s=self.timeout_s)
            replicas = tuple(map(tuple, wanted))
            tasks = plan_fingerprints(source, replicas, piece_bytes=self.bucket_bytes)
            self._ends = Ends(source=source, replicas=replicas, fingerprints=tuple(tasks))
        return self._ends

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        """See `ShardingManager.sync_weights`.

        Args:
            plan: made for the layouts of these two groups.
            version: the version that every replica serves afterwards.
            expect_change: refuse weights that have not changed since the last sync. None: if `version` is higher than
                at the last sync.
        """
        start = time.perf_counter()
        self.ends()
        # Sources read their weights once more for this, while replicas copy them.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlsdk-fingerprints") as pool:
            fingerprints = pool.submit(self._fingerprints)
            receipts = self.pull(plan, version)
            pulled = time.perf_counter()
            expected = fingerprints.result()
        proven = time.perf_counter()
        for task, values in zip(self.ends().fingerprints, expected, strict=True):
            for replica in task.replicas:
                who = f"replica {replica} of rollout backend {self.rollout.backend!r}"
                check_receipt(receipts[replica], values, version, who)
            check_checksums(receipts, task.replicas, version, self.rollout.backend)
        changed = self._check_changed(self._now(expected), version, expect_change)
        end = time.perf_counter()
        return SyncReport(
            version=version,
            num_tensors=len(plan.tensors),
            num_bytes=plan.num_bytes,
            moved_bytes=plan.moved_bytes,
            lower_bound_bytes=plan.lower_bound_bytes,
            changed_tensors=changed,
            seconds=end - start,
            stages_s={"pull": pulled - start, "fingerprint": proven - pulled, "verify": end - proven},
            receipts=tuple(receipts),
            transports=transports_of(plan),
            quantized_tensors=len({name for task in self.ends().fingerprints for name in task.quantized.tensors}),
        )

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        """See `ShardingManager.sync`; `expect_change` as in `sync_weights`. Layouts are requested only once."""
        ends = self.ends()
        return self.sync_weights(self.plan(ends.source, ends.target), version, expect_change=expect_change)

    def _now(self, expected: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """Fingerprint of each tensor of the model; for a quantized one, of its values and scales."""
        now = {name: value for values in expected for name, value in values.items()}
        scaled = [meta for task in self.ends().fingerprints for meta in task.quantized.tensors.values()]
        for name, scales in {(meta.name, meta.scales.name) for meta in scaled if meta.scales is not None}:
            now[name] += now.pop(scales) << 32
        return now

    def _fingerprints(self) -> list[dict[str, int]]:
        """Fingerprints that each group of equal replicas must serve, computed by the sources."""
        expected = []
        for task in self.ends().fingerprints:
            arguments = [(transfers,) for transfers in task.transfers]
            found = call_each(self.train, WeightSourceHost.weight_fingerprints, arguments, timeout_s=self.timeout_s)
            expected.append(task.total(found) | self._quantized_fingerprints(task))
        return expected

    def _quantized_fingerprints(self, task: FingerprintTask) -> dict[str, int]:
        """Fingerprints of the tensors that replicas quantize, and of their scales."""
        proof = task.quantized
        if not proof.tensors:
            return {}
        asked = [(pieces,) for pieces in proof.pieces]
        parts = call_each(self.train, WeightSourceHost.weight_block_maxima, asked, timeout_s=self.timeout_s)
        shared = proof.joined(parts)
        given = list(zip(proof.pieces, proof.of_pieces(shared), strict=True))
        found = call_each(self.train, WeightSourceHost.weight_block_fingerprints, given, timeout_s=self.timeout_s)
        return task.quantized_total(found, shared)

    def pull(self, plan: ReshardPlan, version: int) -> list[SyncReceipt]:
        """Lets every replica pull its buckets. It only transfers: `sync_weights` verifies."""
        ends, peers = self.ends(), self.train.peers()
        sync = f"{self._name}-{next(self._syncs)}"
        relays = self._relays(plan, sync)
        arguments: list[tuple[Any, ...]] = []
        for at in ends.targets_of_replica:
            # All replicas of a chain receive the buckets of its first one, in the same pieces.
            parts = [plan.parts[first_of(plan.relays, target)] for target in at]
            taking = [part for part, target in zip(parts, at, strict=True) if target not in plan.relays]
            used = sorted(set().union(*map(sources_of, taking)))
            buckets = parts[0] if len(parts) == 1 else JoinedBuckets(tuple(parts))
            relay = self._relay_of(at, relays, sync)
            arguments.append((buckets, {source: peers[source] for source in used}, version, self.timeout_s, relay))
        return call_each(self.rollout, WeightTargetHost.pull_weights, arguments, timeout_s=self.timeout_s + GRACE_S)

    def _relay_of(self, at: range, relays: Mapping[int, Relay], sync: str) -> Relay:
        """A replica's part in chains, from those of its places."""
        mine = tuple(relays[target] for target in at if target in relays)
        if mine and self.ends().target[at[0]].worker is None:
            return mine[0]
        return Relay(manager=self._name, sync=sync, places=mine)

    def _relays(self, plan: ReshardPlan, sync: str) -> dict[int, Relay]:
        """For each target in a chain, the information that its replica needs."""
        if not plan.relays:
            return {}
        ends, replicas = self.ends(), self.rollout.peers()
        replica_of = {target: at for at, targets in enumerate(ends.targets_of_replica) for target in targets}
        found = {}
        for target in {*plan.relays, *plan.relays.values()}:
            parent = plan.relays.get(target)
            children = tuple(child for child, giver in plan.relays.items() if giver == target)
            if parent is None:
                found[target] = Relay(target=target, manager=self._name, sync=sync, children=children, first=target)
                continue
            found[target] = Relay(
                parent=replicas[replica_of[parent]],
                source=len(ends.source) + parent,
                target=target,
                transport=choose_transport(
                    passing_place(ends.target[parent]), passing_place(ends.target[target]), self.plans.transports
                ),
                manager=self._name,
                sync=sync,
                children=children,
                first=first_of(plan.relays, target),
            )
        return found

    def _check_changed(self, now: Mapping[str, int], version: int, expect_change: bool | None) -> int:
        """Counts the tensors that changed since the last sync.

        Raises:
            WeightSyncError: none did, although the policy was trained in between.
        """
        before_version, before = self._last or (version, None)
        changed = changed_tensors(now, before)
        if changed == 0 and (version > before_version if expect_change is None else expect_change):
            raise WeightSyncError(
                f"no tensor changed between version {before_version} and version {version}: the optimizer steps in "
                "between did not reach the weights that the train engine hands out (or its learning rate is 0)"
            )
        self._last = (version, now)
        return changed

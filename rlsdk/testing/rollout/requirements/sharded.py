"""Requirements: the workers of one engine act as one engine, and each receives its own part of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    Capability,
    GenerationOutput,
    GenerationRequest,
    RolloutEngine,
    TensorMeta,
    WeightSyncError,
    fingerprint,
)
from rlsdk.sharding import GenericShardingManager
from rlsdk.testing.rollout.lab import RolloutLab, pieces, whole_shards
from rlsdk.testing.rollout.requirements.lifetime import refused
from rlsdk.testing.rollout.requirements.scheduling import check_mixed_versions
from rlsdk.testing.sharding.lab import WatchedTrainHost
from rlsdk.testing.sharding.local_groups import LocalGroup, LocalPeer, RolloutHost
from rlsdk.testing.sharding.tensor_engines import TensorTrainEngine, tensor_layout
from rlsdk.testing.suites.requirements import Measured, requirement

ENDING_S = 60.0
"""Seconds for workers to end after `close` returned."""
BUCKET_BYTES = 100_000
"""Bucket size: small, so that an update of the small model has several rounds."""


class _FarGroup(LocalGroup):
    """One rank with whole tensors, as if in its own process."""

    def peers(self) -> Sequence[LocalPeer]:
        return [LocalPeer(host, is_local=False) for host in self.hosts]


class ShardedRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("sharded_update", needs=Capability.SHARDED_UPDATE, since=(2, 0))
    def test_sharded_update(self, lab: RolloutLab, measured: Measured) -> None:
        """With several workers, `layout` lists parts of tensors; a sync sends each worker exactly the bytes of its
        parts, and the engine then serves the sent weights. The same holds for other weights, and for a complete sync
        after one whose source failed. Before any sync the engine serves the weights that it loaded."""
        engine = lab.split
        rollout = LocalGroup([RolloutHost(engine)])
        is_sound = False
        try:
            layouts = engine.layout()
            shapes = {meta.name: tuple(meta.shape) for layout in layouts for meta in layout.tensors}
            parts = [(name, box) for layout in layouts for name, box in layout.boxes if box != Box.whole(shapes[name])]
            measured.at_least("boxes smaller than a tensor", len(parts), 1)
            held = [sum(4 * box.numel for _, box in layout.boxes) for layout in layouts]
            requests = [lab.ask(f"r{at}", lab.prompt(8 + at, 88), 3, max_tokens=16) for at in range(2)]
            worst = lab.worst(requests, lab.run(requests, engine))
            measured.at_most("largest difference before a sync", worst, lab.suite.tolerance)
            for version, seed in ((1, 8), (2, 9)):
                state = lab.changed(seed)
                (receipt,) = _manager(state, rollout).sync(version).receipts
                named = [layout.worker for layout in layouts]
                if None not in named:
                    received = [(part.worker, part.num_bytes) for part in receipt.workers]
                    wanted = list(zip(named, held, strict=True))
                    measured.none("workers that received other bytes", [] if received == wanted else received)
                worst = lab.worst(requests, lab.run(requests, engine), lab.plain.with_state(state))
                measured.at_most(f"largest difference, version {version}", worst, lab.suite.tolerance)
            try:
                _manager(lab.changed(10), rollout, num_buckets=1).sync(3)
                measured.none("accepted", ["a sync whose source broke off"])
            except (WeightSyncError, OSError):
                pass
            _manager(lab.base, rollout).sync(4)
            worst = lab.worst(requests, lab.run(requests, engine))
            measured.at_most("largest difference after a sync that broke off", worst, lab.suite.tolerance)
            is_sound = True
        finally:
            rollout.hosts[0].target.close()
            if not is_sound:
                lab.drop_split()

    @requirement("tensor_parallel", needs=Capability.TENSOR_PARALLEL)
    def test_tensor_parallel(self, lab: RolloutLab, measured: Measured) -> None:
        """With several workers the engine gives the same log-probs before and after updates, a failed update, a pause
        and sleep; its workers end with it."""
        engine, workers = lab.split, lab.split_workers
        try:
            requests = [lab.ask(f"r{at}", lab.prompt(8 + at, 88), 3, max_tokens=16) for at in range(2)]
            worst = lab.worst(requests, lab.run(requests, engine))
            measured.at_most("largest difference before an update", worst, lab.suite.tolerance)
            if lab.spec.takes_weights:
                _updated(engine, lab, requests, measured)
            if lab.spec.takes_weights and Capability.PARTIAL_ROLLOUT in lab.spec.capabilities:
                _updated_in_a_pause(engine, lab, measured)
            if lab.spec.takes_weights and Capability.SLEEP in lab.spec.capabilities:
                engine.sleep(2)
                engine.wake(("weights",))
                engine.update_weights(whole_shards(lab.base), 6)
                engine.wake(("kv_cache",))
                worst = lab.worst(requests, lab.run(requests, engine))
                measured.at_most("largest difference after sleep", worst, lab.suite.tolerance)
        finally:
            lab.drop_split()
        measured.none("workers that outlive it", psutil.wait_procs(workers, timeout=ENDING_S)[1])


def _manager(state: Mapping[str, Tensor], rollout: LocalGroup, num_buckets: int = 10**9) -> GenericShardingManager:
    """A manager; the source fails after `num_buckets` buckets."""
    metas = [TensorMeta(name=name, shape=tuple(t.shape), dtype="float32") for name, t in state.items()]
    layout = tensor_layout(metas, [(meta.name, Box.whole(meta.shape)) for meta in metas], process="train:0")
    source = WatchedTrainHost(TensorTrainEngine(state, layout))
    source.left = num_buckets
    train = _FarGroup([source])
    return GenericShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES, timeout_s=60.0)


def _updated(engine: RolloutEngine, lab: RolloutLab, requests: Sequence[GenerationRequest], measured: Measured) -> None:
    """A complete update, then one that fails; finally serves the first weights as version 4."""
    state = lab.changed(8)
    receipt = engine.update_weights(iter(pieces(state)), 2)
    wanted = {name: fingerprint(tensor, Box.whole(tuple(tensor.shape))) for name, tensor in state.items()}
    measured.none("fingerprints that differ", [n for n in wanted if receipt.fingerprints.get(n) != wanted[n]])
    worst = lab.worst(requests, lab.run(requests, engine), lab.plain.with_state(state))
    measured.at_most("largest difference after it", worst, lab.suite.tolerance)
    try:
        engine.update_weights(iter(pieces(lab.base)[1:]), 3)
        measured.none("accepted", ["an update without its last piece"])
    except WeightSyncError:
        pass
    mixtures = [o for o in refused(lab, engine, WeightSyncError) if o.policy_version != 2]
    measured.none("samples of half an update", mixtures)
    engine.update_weights(whole_shards(lab.base), 4)
    worst = lab.worst(requests, lab.run(requests, engine))
    measured.at_most("largest difference after a whole update", worst, lab.suite.tolerance)


def _updated_in_a_pause(engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
    """Checks samples that begin with the first weights and end with others."""
    state = lab.changed(5)
    requests = [lab.ask(f"r{at}", lab.prompt(5 + 3 * at, 72), 3, max_tokens=100) for at in range(2)]

    async def updated() -> list[GenerationOutput]:
        task = await lab.paused_midway(requests, engine)
        engine.update_weights(iter(pieces(state)), 5)
        engine.resume()
        return await task

    outputs = lab.wait(updated())
    faults, mixed = check_mixed_versions(lab, requests, outputs, lab.plain.with_state(state), 5)
    measured.none("samples whose versions or log-probs are of neither", faults)
    measured.at_least("samples of both weights", mixed, 1)

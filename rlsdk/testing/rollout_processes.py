"""Requirements: the workers of one engine act as one engine, and no process or resource outlives it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

from rlsdk.interfaces import (
    Box,
    Capability,
    GenerationOutput,
    GenerationRequest,
    RolloutEngine,
    WeightSyncError,
    fingerprint,
)
from rlsdk.testing.requirements import Measured, requirement
from rlsdk.testing.resources import held, lasting_files, left_behind, own_temporary_folder
from rlsdk.testing.rollout_lab import RolloutLab, pieces, whole_shards
from rlsdk.testing.rollout_lifetime import refused
from rlsdk.testing.rollout_scheduling import check_mixed_versions

ENDING_S = 60.0
"""For workers to end after `close` returned."""


class ProcessRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("tensor_parallel", needs=Capability.TENSOR_PARALLEL)
    def test_tensor_parallel(self, lab: RolloutLab, measured: Measured) -> None:
        """Split over several workers the engine gives the same log-probs, before updates and after them, over a failed
        one, a pause and sleep; its workers end with it."""
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

    @requirement("close")
    def test_close(self, lab: RolloutLab, measured: Measured) -> None:
        """`close` leaves no process, port, file or shared memory, nor anything in the temporary folder; can be
        called twice, and ends service."""
        # What one engine leaves behind for the life of the process (a thread pool, a log) a second does not add to.
        lab.drop()
        if not lab.num_started:
            lab.start().close()
        with own_temporary_folder() as folder:
            before = held(lab.scratch)
            engine = _closed_twice(lab)
            measured.none("left behind", left_behind(before, lab.scratch))
            if first := os.listdir(folder):
                _closed_twice(lab)
                measured.none("left in the temporary folder", lasting_files(folder, first))
        measured.none("samples of a closed engine", refused(lab, engine))


def _closed_twice(lab: RolloutLab) -> RolloutEngine:
    """An engine that has answered."""
    engine = lab.start()
    lab.run([lab.ask("r", lab.prompt(8, 112), 2)], engine)
    engine.close()
    engine.close()
    return engine


def _updated(engine: RolloutEngine, lab: RolloutLab, requests: Sequence[GenerationRequest], measured: Measured) -> None:
    """A whole update, then one that fails; leaves the first weights as version 4."""
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
    """Samples that begin with the first weights and end with others."""
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

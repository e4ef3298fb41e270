"""Requirement: no process or resource outlives an engine."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from rlsdk.interfaces import Capability, RolloutEngine
from rlsdk.testing.process.resources import held, lasting_files, left_behind, own_temporary_folder, tensor_bytes
from rlsdk.testing.rollout.lab import RolloutLab, collect
from rlsdk.testing.rollout.requests import kinds
from rlsdk.testing.rollout.requirements.interruptions import ENDING_S
from rlsdk.testing.rollout.requirements.lifetime import refused
from rlsdk.testing.suites.requirements import Measured, requirement

MOST_KEPT = 0.5
"""Share of the weights' memory that tables and caches of an engine may keep for later engines of the process."""


class ProcessRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("close.asleep", since=(2, 0), needs=Capability.SLEEP)
    def test_close_asleep(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """An engine that is closed while it sleeps, with its weights kept on the host, leaves nothing of them."""
        lab.run([lab.ask("r", lab.prompt(8, 112), 2)])
        before = held(lab.scratch)
        engine.sleep(1)
        lab.drop()
        measured.none("left behind", left_behind(before, lab.scratch))

    @requirement("close", basic=True)
    def test_close(self, lab: RolloutLab, measured: Measured) -> None:
        """After requests of every kind, `close` leaves no process, port, file, weights or shared memory, and nothing in
        the temporary folder. It may be called twice, and a call that still runs, or is paused, ends, with any error.
        Afterwards the engine serves nothing."""
        # A second engine must not add to what the first one keeps for the life of the process (a thread pool, a log).
        lab.drop()
        if not lab.num_started:
            lab.start().close()
        with own_temporary_folder() as folder:
            before, memory = held(lab.scratch), tensor_bytes()
            engine, ended = _closed_twice(lab)
            measured.none("left behind", left_behind(before, lab.scratch))
            weights = sum(tensor.nbytes for tensor in lab.base.values())
            kept = (tensor_bytes() - memory) / weights
            measured.at_most("share of the weights' memory that tensors in this process keep", kept, MOST_KEPT)
            if first := os.listdir(folder):
                _closed_twice(lab)
                measured.none("left in the temporary folder", lasting_files(folder, first))
        measured.none("calls that went on", ended)
        measured.none("samples of a closed engine", refused(lab, engine))


def _closed_twice(lab: RolloutLab) -> tuple[RolloutEngine, list[str]]:
    """An engine that has served requests of every kind and was closed twice while a call was under way, and what is
    wrong with how that call ended."""
    engine = lab.start()
    lab.run(list(kinds(lab)), engine)
    faults = lab.wait(_closed_midway(lab, engine))
    engine.close()
    return engine, faults


async def _closed_midway(lab: RolloutLab, engine: RolloutEngine) -> list[str]:
    requests = [lab.ask("r", lab.prompt(8, 113), 2, max_tokens=lab.suite.max_model_tokens - 16)]
    if Capability.PARTIAL_ROLLOUT in lab.spec.capabilities:
        task = await lab.paused_midway(requests, engine)
    else:
        task = asyncio.create_task(collect(engine, requests))
        await asyncio.sleep(0)
    engine.close()
    done, _ = await asyncio.wait([task], timeout=ENDING_S)
    task.cancel()
    with suppress(Exception, asyncio.CancelledError):
        await task  # any error will do
    return [] if done else [f"it did not end in {ENDING_S:.0f} s"]

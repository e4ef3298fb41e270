"""Section on faults: what a run does by itself when a process of it is lost."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from rlsdk.config.base import Section


class FaultsConfig(Section):
    """What a run does by itself when a process of it is lost."""

    replica_restarts: NonNegativeInt = 3
    """Times that a lost rollout replica is started again in a row, without making a sample in between; then it stays
    away, and the others go on. 0: never. Only where the rollout has its own devices: elsewhere the processes of the
    replicas are the trainer's."""
    session_restarts: NonNegativeInt = 3
    """Times in a row, without a new checkpoint in between, that all processes are started again from the newest whole
    checkpoint, because one that the run cannot do without died or hangs: a training rank, or a daemon of the run's own
    Ray. 0: the run ends; the same command goes on."""
    preempt_s: PositiveFloat = 60.0
    """Seconds from a SIGTERM, with which machines are taken away, to the end: samples that run are stopped and kept, an
    update that runs is finished, and the step is saved. What was not saved by then is made again from the newest
    checkpoint and the journal."""

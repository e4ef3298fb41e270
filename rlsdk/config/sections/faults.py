"""The section of automatic restarts after a process is lost."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from rlsdk.config.sections.base import Section


class FaultsConfig(Section):
    """Automatic restarts after a process of the run is lost."""

    replica_restarts: NonNegativeInt = 3
    """Consecutive restarts of a lost rollout replica that generates no sample in between; after that the run continues
    without it. 0: no restart. Only if the rollout has its own devices: otherwise its replicas run in the trainer's
    processes."""
    session_restarts: NonNegativeInt = 3
    """Consecutive restarts of all processes from the newest complete checkpoint, without a new checkpoint in between,
    because a process that the run needs died or hangs: a training rank, or a daemon of the run's own Ray. 0: the run
    ends, and the same command resumes it."""
    preempt_s: PositiveFloat = 60.0
    """Seconds from SIGTERM (preemption) to the end of the run: running samples are stopped and kept, a running update
    is finished, and the step is saved. What is not saved by then is made again from the newest checkpoint and the
    journal."""

"""Section on faults: what a run does by itself when a process of it is lost."""

from __future__ import annotations

from pydantic import NonNegativeInt

from rlsdk.config.base import Section


class FaultsConfig(Section):
    """What a run does by itself when a process of it is lost."""

    replica_restarts: NonNegativeInt = 3
    """Times that a lost rollout replica is started anew in a row, without making a sample in between; then it stays
    away, and the others go on. 0: never. Only where the rollout has devices of its own: elsewhere the processes of the
    replicas are the trainer's."""

"""The engine holds all that it claims: on one rank, and on two."""

from __future__ import annotations

from rlsdk.testing import TrainConformance


class TestFsdp(TrainConformance):
    backend = "fsdp"


del TrainConformance

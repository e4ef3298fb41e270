"""The engine holds all that it claims: on one rank, and on two."""

from __future__ import annotations

import pytest

from rlsdk.testing import TrainConformance


@pytest.mark.filterwarnings("ignore")  # Megatron and torch warn of what each makes of the other
class TestMegatron(TrainConformance):
    backend = "megatron"


del TrainConformance

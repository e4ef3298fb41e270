"""What `close` gives back, it gives back at once: nothing waits for a collection of garbage that may never come."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Mapping

import pytest

from rlsdk.algorithms.objectives.policy import PolicyObjective
from rlsdk.interfaces import ModelSpec, OptimSpec, RankContext, TrainSpec
from rlsdk.testing.process.models import random_batch
from rlsdk_megatron.engine import MegatronTrainEngine


def threads() -> int:
    """Each process group has some of its own."""
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore")  # Megatron and torch warn of what each makes of the other
@pytest.mark.usefixtures("_no_collection")
def test_weights_and_threads_of_groups_are_gone_when_close_returns(models: Mapping[str, str]) -> None:
    spec = TrainSpec(model=ModelSpec(path=models["plain"], dtype="float32"), optim=OptimSpec(), micro_batch_rows=2)
    before: list[int] = []
    for _ in range(3):  # torch keeps threads of its own from the first pass on
        engine = MegatronTrainEngine()
        engine.initialize(RankContext(role="actor"), spec)
        engine.forward_backward(random_batch(4, seed=1), PolicyObjective())
        engine.optim_step()
        weights = [weakref.ref(parameter) for module in engine.modules for parameter in module.parameters()]
        opened = threads()
        engine.close()
        engine.close()
        assert weights
        assert [one for one in weights if one() is not None] == []
        before.append(threads())
        assert before[-1] < opened
    assert before[2] == before[1]

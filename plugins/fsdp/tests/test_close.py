"""What `close` gives back, it gives back at once: nothing waits for a collection of garbage that may never come."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping

import psutil
import pytest

from rlsdk.interfaces import ModelSpec, OptimSpec, RankContext, TrainSpec
from rlsdk_fsdp.engine import FsdpTrainEngine


def listening() -> set[int]:
    """Ports that this process listens on."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_weights_and_port_are_free_when_close_returns(models: Mapping[str, str]) -> None:
    before = listening()
    engine = FsdpTrainEngine()
    spec = TrainSpec(model=ModelSpec(path=models["plain"], dtype="float32"), optim=OptimSpec(), micro_batch_rows=2)
    engine.initialize(RankContext(role="actor"), spec)
    model = weakref.ref(engine.model)
    opened = listening() - before
    engine.close()
    engine.close()
    assert opened
    assert (model(), listening() & opened) == (None, set())

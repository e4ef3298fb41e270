"""Copies of attention on two nodes: vLLM's cores, one started beside the front and one as its headless mode does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cases import make_engine

from rlsdk.interfaces import RlsdkError, Workload
from rlsdk.testing.process.local_companions import local_companions, look_until_error
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.rollout.worker_updates import (
    bytes_held,
    check_foreseen,
    check_two_nodes,
)
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.forecast import forecast


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Any]:
    """(model, engine of two copies on two nodes, the processes of their cores, that of the other node's companion)."""
    folder = write_tiny_model(tmp_path / "model", architecture="qwen2", seed=1, sharpness=2.0)
    context = {"node": "near", "bundles": (0, 1), "device_nodes": ("near", "far")}
    with local_companions() as companions:
        options = VllmOptions(kv_cache_mb=16, asynchronous=True)
        engine = make_engine(folder, context=context, dp_size=2, options=options)
        workers = [psutil.Process(worker["process"]) for worker in engine.engine.engine.describe_workers()]
        processes = [*workers, *(worker.parent() for worker in workers)]
        yield PlainModel.load(folder), engine, processes[2:], companions.started[0].process.pid
        engine.close()
    gone, _ = psutil.wait_procs(processes, timeout=60)
    assert len(gone) == 4


def test_copies_on_two_nodes_take_the_weights_serve_them_and_end_together(replica: Any) -> None:
    plain, engine, cores, companion = replica
    assert [core.ppid() for core in cores] == [os.getpid(), companion]
    layouts = engine.layout()
    assert len(set(map(bytes_held, layouts))) == 1, "each has the whole model"
    inner = engine.engine
    (foreseen,) = forecast([inner.ctx], inner.spec, Workload(row_tokens=64, update_rows=1, running_rows=4)).layouts
    check_foreseen(foreseen, layouts)
    check_two_nodes(plain, engine, 2e-4)
    cores[1].kill()
    with pytest.raises(RlsdkError, match="a part of this replica on another node ended: vLLM's EngineCore_DP1"):
        look_until_error(inner.engine.step)

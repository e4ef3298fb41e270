"""Workers of a replica take their own parts of an update, in their own processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import InProcess, make_engine
from torch import Tensor

from rlsdk.interfaces import Bucket, WeightSyncError, Workload
from rlsdk.sharding import GenericShardingManager
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.rollout.worker_updates import (
    BUCKET_BYTES,
    CountedHost,
    bytes_held,
    check_foreseen,
    check_workers_take_their_own,
    largest_difference,
    row_ranks,
)
from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost
from rlsdk_vllm import in_process
from rlsdk_vllm.forecast import forecast

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module", params=["dense", "experts cut", "experts dealt out"])
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(model, engine of two workers)."""
    architecture, shape = ("qwen2", {}) if request.param == "dense" else ("qwen3_moe", MIXTURE)
    folder: Path = write_tiny_model(
        tmp_path_factory.mktemp("workers") / "model", architecture=architecture, seed=1, sharpness=2.0, **shape
    )
    dealt = request.param == "experts dealt out"
    with pytest.MonkeyPatch.context() as patch:
        # It is refused on a CPU, where vLLM ends in a segmentation fault when it samples. Weights come all the same.
        patch.setattr(in_process, "check_split", lambda *_: None)
        engine = make_engine(folder, tp_size=2, ep_size=2 if dealt else 1, load_weights=False)
    yield PlainModel.load(folder), engine
    engine.close()


def can_sample(engine: Any) -> bool:
    """Not where experts are dealt out: see `replica`."""
    return bool(engine.engine.spec.ep_size == 1)


def log_probs_differ(plain: PlainModel, state: Mapping[str, Tensor], engine: Any) -> float:
    """Largest difference; 0 where the engine cannot sample, but for a reason of the update's."""
    return largest_difference(plain, state, engine) if can_sample(engine) or engine.lacking else 0.0


def test_every_worker_receives_what_it_holds_and_no_more(replica: Any) -> None:
    plain, engine = replica
    layouts = engine.layout()
    assert len(layouts) == 2
    # All but norms and routers is cut in two.
    is_mixture = any("experts" in name for name in plain.state)
    assert list(map(bytes_held, layouts)) == [662_528 if is_mixture else 658_944] * 2
    by_name = [dict(layout.boxes) for layout in layouts]
    query = "model.layers.0.self_attn.q_proj.weight"
    assert {boxes[query].size[0] for boxes in by_name} == {plain.state[query].shape[0] // 2}
    mine, theirs = (
        {(name, box) for name, box in layout.boxes if name.endswith("experts.gate_up_proj")} for layout in layouts
    )
    assert bool(mine) == is_mixture
    assert mine.isdisjoint(theirs)
    if engine.engine.spec.ep_size > 1:
        # Whole experts: two of four, each with all of its rows.
        assert [{box.offset[0] for _, box in held} for held in (mine, theirs)] == [{0, 1}, {2, 3}]
        assert sum(box.size[1] for _, box in mine) == 2 * 2 * plain.state[next(iter(mine))[0]].shape[1]
    # Experts add up what each makes of a token, in an order of their own: 2.1e-5 on some processors.
    tolerance = InProcess.tolerance * (2 if is_mixture else 1)
    check_workers_take_their_own(plain, engine, tolerance, samples=can_sample(engine))


def test_what_cannot_reach_a_worker_passes_through_its_host(replica: Any) -> None:
    plain, engine = replica
    train, rollout = row_ranks(plain.state), LocalGroup([RolloutHost(engine)])
    manager = GenericShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES, transports=["object_store"])
    for version in (3, 4):
        report = manager.sync(version, expect_change=False)
        assert report.transports == ("object_store",)
        assert sum(part.num_bytes for part in report.receipts[0].workers) == report.lower_bound_bytes
        assert log_probs_differ(plain, plain.state, engine) < InProcess.tolerance
    rollout.hosts[0].target.close()


def test_workers_that_may_not_open_a_sources_memory_get_it_through_their_host(
    replica: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, engine = replica

    class Hidden(CountedHost):
        def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
            handles = super().export_weights(buckets, sync)
            hides = {"path": "/proc/0/fd/0"} if buckets[0].transport == "ring" else {}
            return [{**handle, **hides} for handle in handles]

    train, rollout = row_ranks(plain.state, Hidden), LocalGroup([RolloutHost(engine)])
    manager = GenericShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES)
    for version in (5, 6):
        report = manager.sync(version, expect_change=False)
        assert sum(part.num_bytes for part in report.receipts[0].workers) == report.lower_bound_bytes
        assert log_probs_differ(plain, plain.state, engine) < InProcess.tolerance
    assert caplog.text.count("from now on through their host") == 1
    rollout.hosts[0].target.close()


def test_a_source_that_breaks_off_is_an_error_that_names_the_worker_and_the_next_sync_is_whole(replica: Any) -> None:
    plain, engine = replica

    class Breaks(CountedHost):
        broken = True

        def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
            handles = super().export_weights(buckets, sync)
            return [*handles[:-1], {}] if self.broken else handles

    train, rollout = row_ranks(plain.state, Breaks), LocalGroup([RolloutHost(engine)])
    manager = GenericShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES, timeout_s=60.0)
    why = r"version 7: worker '.*' did not load its weights: .*speaks version None"
    with pytest.raises(WeightSyncError, match=why):
        manager.sync(7)
    with pytest.raises(WeightSyncError, match="the update to version 7 failed halfway"):
        log_probs_differ(plain, plain.state, engine)
    for host in train.hosts:
        host.broken = False
    manager.sync(8)
    assert log_probs_differ(plain, plain.state, engine) < InProcess.tolerance
    rollout.hosts[0].target.close()


def test_the_plan_foresees_what_each_worker_says_it_holds(replica: Any) -> None:
    _, engine = replica
    foreseen = forecast(
        [engine.engine.ctx], engine.engine.spec, Workload(row_tokens=64, update_rows=1, running_rows=4)
    ).layouts[0]
    check_foreseen(foreseen, engine.layout())

"""Schedulers of a replica take their own parts of an update, in their own processes.

Two of a dense model are the suite's (`sharded_update`); here those of a mixture of experts, cut and dealt out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import Sglang, make_engine

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
    row_ranks,
)
from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost
from rlsdk_sglang.forecast import forecast

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module", params=["experts cut", "experts dealt out"])
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(model, engine of two schedulers)."""
    folder: Path = write_tiny_model(
        tmp_path_factory.mktemp("workers") / "model", architecture="qwen3_moe", seed=1, sharpness=2.0, **MIXTURE
    )
    engine = make_engine(
        folder, tp_size=2, ep_size=2 if request.param == "experts dealt out" else 1, load_weights=False
    )
    yield PlainModel.load(folder), engine
    engine.close()


def test_every_scheduler_receives_what_it_holds_and_no_more(replica: Any) -> None:
    plain, engine = replica
    layouts = engine.layout()
    assert len(layouts) == 2
    # All but norms and routers is cut in two.
    both = sum(4 * t.numel() for name, t in plain.state.items() if t.dim() == 1 or name.endswith("mlp.gate.weight"))
    total = sum(4 * tensor.numel() for tensor in plain.state.values())
    assert list(map(bytes_held, layouts)) == [(total + both) // 2] * 2 == [662_528] * 2
    mine, theirs = (
        {(name, box) for name, box in layout.boxes if name.endswith("experts.gate_up_proj")} for layout in layouts
    )
    assert mine
    assert mine.isdisjoint(theirs)
    shape = plain.state["model.layers.0.mlp.experts.gate_up_proj"].shape
    if engine.engine.spec.ep_size > 1:
        # Whole experts: two of four, each with all of its rows.
        assert [{box.offset[0] for _, box in held} for held in (mine, theirs)] == [{0, 1}, {2, 3}]
    else:
        assert {box.offset[0] for _, box in mine} == {0, 1, 2, 3}
    assert sum(box.numel for name, box in mine if ".layers.0." in name) == shape.numel() // 2
    check_workers_take_their_own(plain, engine, Sglang.tolerance)


def test_the_plan_foresees_what_each_scheduler_says_it_holds(replica: Any) -> None:
    _, engine = replica
    work = Workload(row_tokens=64, update_rows=1, running_rows=4)
    (foreseen,) = forecast([engine.engine.ctx], engine.engine.spec, work).layouts
    check_foreseen(foreseen, engine.layout())


def test_a_source_that_breaks_off_is_an_error_that_names_the_scheduler(replica: Any) -> None:
    plain, engine = replica

    class Breaks(CountedHost):
        broken = True

        def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
            handles = super().export_weights(buckets, sync)
            return [*handles[:-1], {}] if self.broken else handles

    train, rollout = row_ranks(plain.state, Breaks), LocalGroup([RolloutHost(engine)])
    manager = GenericShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES, timeout_s=60.0)
    with pytest.raises(WeightSyncError, match=r"version 7: worker '.*' did not load its weights: .*speaks version"):
        manager.sync(7)
    for host in train.hosts:
        host.broken = False
    (receipt,) = manager.sync(8).receipts
    assert [part.num_bytes for part in receipt.workers] == list(map(bytes_held, engine.layout()))
    rollout.hosts[0].target.close()

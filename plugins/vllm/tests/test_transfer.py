"""Updates go through vLLM's own weight transfer sessions, and one that fails leaves none open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import worker_of

from rlsdk.interfaces import ConfigError, WeightShard, WeightSyncError
from rlsdk.testing.rollout.lab import whole_shards
from rlsdk_vllm import transfer


def test_vllm_makes_the_engine_of_this_plugin_for_its_worker(in_process: Any) -> None:
    worker = worker_of(in_process.engine)
    assert worker.vllm_config.weight_transfer_config.backend == transfer.NAME
    assert type(worker.weight_transfer_engine) is transfer.PlanTransfer
    assert not worker.supports_draft_weight_updates()
    with pytest.raises(RuntimeError, match="start_weight_update must be called before"):
        worker.update_weights({"shards": []})


def test_an_update_is_one_session_in_which_vllms_configuration_is_at_hand(
    in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import get_current_vllm_config_or_none

    lab, seen = in_process, []
    for name in ("start_weight_update", "receive_weights", "finish_weight_update"):
        method = getattr(transfer.PlanTransfer, name)

        def noted(self: Any, *args: Any, name: str = name, method: Any = method) -> None:
            seen.append((name, get_current_vllm_config_or_none() is worker_of(lab.engine).vllm_config))
            method(self, *args)

        monkeypatch.setattr(transfer.PlanTransfer, name, noted)
    lab.engine.update_weights(whole_shards(lab.changed(3)), 3)
    assert seen == [("start_weight_update", True), ("receive_weights", True), ("finish_weight_update", True)]


def test_an_update_that_breaks_off_says_why_and_the_next_finds_no_session_open(lab: Any) -> None:
    def broken() -> Iterator[WeightShard]:
        shards = whole_shards(lab.changed(3))
        for _ in range(3):
            yield next(shards)
        raise WeightSyncError("the source broke off")

    with pytest.raises(WeightSyncError, match="the source broke off"):
        lab.engine.update_weights(broken(), 5)
    lab.engine.update_weights(whole_shards(lab.changed(3)), 6)
    request = [lab.ask("x", [5, 6], 3)]
    assert {output.policy_version for output in lab.run(request)} == {6}


def test_the_transfer_engine_is_the_plugins_to_choose(qwen2: Any) -> None:
    from cases import make_engine

    with pytest.raises(ConfigError, match=r"rollout.engine_kwargs: only the plugin sets \['weight_transfer_config'\]"):
        make_engine(qwen2, engine_kwargs={"weight_transfer_config": {"backend": "nccl"}})

"""What is said at the start about the devices of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlsdk.cluster import Cluster
from rlsdk.config import PlacementConfig, RunConfig
from rlsdk.registry import Registry
from rlsdk.trainer.roles.devices import start_cluster
from rlsdk.trainer.runs.prepare import PreparedRun


class StoppedError(Exception):
    """Nothing is started."""


@pytest.mark.parametrize(("address", "is_said"), [(None, True), ("auto", False)])
def test_processors_that_devices_wait_for_are_said_where_the_run_starts_its_own_cluster(
    address: str | None, is_said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise StoppedError

    monkeypatch.setattr(Cluster, "start", stop)
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}})
    config = config.model_copy(update={"placement": PlacementConfig(cpus_per_device=4096, ray_address=address)})
    run = PreparedRun.of(config, Registry.discover(), "cpu")
    with caplog.at_level(logging.WARNING), pytest.raises(StoppedError):
        start_cluster(run.table, run.registry, run.config, run.placement, run_dir=Path())
    assert ("--placement.cpus_per_device" in caplog.text) is is_said

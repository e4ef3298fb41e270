"""What a command leaves with: 2 for what its user can fix in the arguments, 1 for what failed on the way."""

from __future__ import annotations

import pytest

from rlsdk.cli import main
from rlsdk.interfaces import (
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
    ParityError,
    PlacementError,
    PluginNotFoundError,
    RlsdkError,
    UnsupportedCapabilityError,
    WeightSyncError,
    WorkerError,
)
from rlsdk.trainer.tracking.stopping import StopFlag

REFUSED = [CheckpointError, ConfigError, DataError, PlacementError, PluginNotFoundError, UnsupportedCapabilityError]
FAILED = [BatchError, LayoutError, ParityError, WeightSyncError, WorkerError]


def code_of(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after_a_step: bool = False) -> object:
    """What `rlsdk train` leaves with, where its run ends with this error."""

    def launch(resolved: object, view: object, stop: StopFlag) -> None:
        stop.has_begun = after_a_step
        raise error

    monkeypatch.setattr("rlsdk.cli.training.train.launch", launch)
    monkeypatch.setattr("rlsdk.cli.training.train.resolve", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        main(["train"])
    return left.value.code


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_be_fixed_in_the_arguments_is_refused_with_2(
    kind: type[RlsdkError], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_of(monkeypatch, kind("no")) == 2
    assert code_of(monkeypatch, kind("no"), after_a_step=True) == 1, "nothing was refused: it had trained"


@pytest.mark.parametrize("kind", FAILED)
def test_what_fails_on_the_way_ends_with_1(kind: type[RlsdkError], monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(monkeypatch, kind("no")) == 1


def test_a_file_that_may_not_be_written_once_a_run_has_begun_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(monkeypatch, PermissionError(13, "Permission denied", "runs/a")) == 2
    assert code_of(monkeypatch, PermissionError(13, "Permission denied", "runs/a"), after_a_step=True) == 1

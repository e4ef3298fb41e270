"""How often a run begins again after the loss of a process: as long as it gets on, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_loop import Recorder, config_of, model, registry

from rlsdk.config import RunConfig
from rlsdk.interfaces import ConfigError, DeadlineError, RlsdkError, WeightSyncError, WorkerError
from rlsdk.registry import Registry
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.roles.serving import ReplicasLostError
from rlsdk.trainer.runs.restarts import SessionLostError, SessionRestarts

__all__ = ["model", "registry"]

LOST = WorkerError("actor rank 0 died: killed by signal 9")


class Cluster:
    """One whose workers are all there, or not."""

    def __init__(self, lost: str | None) -> None:
        self.lost = lost

    def find_lost(self, wait_s: float) -> str | None:
        return self.lost


@pytest.fixture
def restarts(model: str, registry: Registry, tmp_path: Path) -> tuple[SessionRestarts, Recorder]:
    """At most two in a row."""
    view = Recorder()
    config = config_of(model, registry, 9, "--faults.session_restarts", "2", "--trainer.resume", "never")
    return SessionRestarts(config, tmp_path, view, lambda: False), view


def save(folder: Path, step: int) -> None:
    with CheckpointStore(folder / "checkpoints", keep=3).write(step, {}) as draft:
        (draft / "weights").write_text(str(step))


def dies(config: RunConfig) -> int:
    raise SessionLostError(LOST)


def test_attempts_without_a_new_checkpoint_are_bounded(restarts: tuple[SessionRestarts, Recorder]) -> None:
    made, view = restarts
    seen: list[str] = []

    def attempt(config: RunConfig) -> int:
        seen.append(config.trainer.resume)
        return dies(config)

    with pytest.raises(WorkerError, match="actor rank 0 died") as raised:
        made.run(attempt)
    assert seen == ["never"] * 3, "without a checkpoint there is nothing to resume"
    assert "2 times in a row without a new checkpoint" in raised.value.__notes__[0]
    assert ["(1 of 2 in a row)" in view.notices[0], "(2 of 2 in a row)" in view.notices[1]] == [True, True]
    assert "from the beginning: there is no checkpoint yet" in view.notices[0]


def test_a_new_checkpoint_begins_the_count_again(restarts: tuple[SessionRestarts, Recorder], tmp_path: Path) -> None:
    made, view = restarts
    seen: list[str] = []

    def attempt(config: RunConfig) -> int:
        seen.append(config.trainer.resume)
        if len(seen) == 7:
            return 7
        if len(seen) in (2, 4, 5):  # progress, and then a loss
            save(tmp_path, len(seen))
        return dies(config)

    assert made.run(attempt) == 7
    assert made.restarts == 6
    assert seen == ["never", "never", *["auto"] * 5]
    counts = [notice.rpartition("(")[2] for notice in view.notices]
    assert [count[0] for count in counts] == ["1", "1", "2", "1", "1", "2"]
    assert "from its newest whole checkpoint" in view.notices[-1]


@pytest.mark.parametrize(
    ("error", "lost", "begins_again"),
    [
        (LOST, "actor-0, pid 7", True),
        (LOST, None, False),
        (WeightSyncError("a tensor did not arrive"), "rollout-0, pid 8", True),
        (WeightSyncError("a tensor did not arrive"), None, False),
        (DeadlineError("no answer within 60 s"), None, True),
        (ReplicasLostError("every replica was lost"), None, True),
        (ConfigError("trainer.steps: 0"), "actor-0, pid 7", False),
    ],
)
def test_only_the_loss_of_a_process_makes_a_session_begin_again(
    error: RlsdkError, lost: str | None, begins_again: bool, restarts: tuple[SessionRestarts, Recorder]
) -> None:
    made, _ = restarts
    made.check(error, Cluster(lost))  # before the first step it died of how it was started
    made.has_begun = True
    check: Callable[[], None] = lambda: made.check(error, Cluster(lost))  # noqa: E731
    if begins_again:
        with pytest.raises(SessionLostError, match=str(error)):
            check()
    else:
        check()


def test_a_run_that_is_to_end_is_not_begun_again(model: str, registry: Registry, tmp_path: Path) -> None:
    made = SessionRestarts(config_of(model, registry, 9), tmp_path, Recorder(), lambda: True)
    made.has_begun = True
    made.check(LOST, Cluster("actor-0, pid 7"))

"""Runs a training in this process, for the Python API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlsdk.api.python_inputs import stage_inputs

if TYPE_CHECKING:
    from rlsdk.api.settings import Settings
    from rlsdk.config.checks.training import Training
    from rlsdk.trainer.runs.start import RunResult
    from rlsdk.trainer.tracking.events import RunView


def run_here(training: Training, settings: Settings, view: RunView | None, **given: Any) -> RunResult:
    """Trains until it ends or is interrupted.

    Args:
        training: its kind.
        settings: of the run.
        view: shows progress; None: as the surroundings allow.
        given: objects of the caller (data, a reward), written for the run as files.

    Raises:
        RlsdkError: the run cannot start or continue.
    """
    from rlsdk.api.resolve import resolve
    from rlsdk.api.signals import stop_on_interrupt
    from rlsdk.trainer.runs.launch import launch
    from rlsdk.views import shown

    with stage_inputs(settings, **given) as staged:
        run = resolve(staged.settings, training)

        from rlsdk.trainer.tracking.stopping import StopFlag

        stop = StopFlag()
        with (
            shown(view) as watching,
            stop_on_interrupt(stop.set, watching.notice, stop.preempt, lambda: stop.has_begun),
            _threads(),
        ):
            return launch(run, watching, stop, stage_files=staged.moved)


@contextmanager
def _threads() -> Iterator[None]:
    """Restores torch's number of threads, which a run sets to one in this process."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)

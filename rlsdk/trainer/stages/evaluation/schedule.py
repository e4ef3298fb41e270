"""Schedules the evaluations of a stage and acts on them: metrics, sample files, best checkpoint, early stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rlsdk.interfaces import BatchError, CheckpointError
from rlsdk.trainer.stages.evaluation.progress import Progress, after_evaluation, unmeasured, why_ended
from rlsdk.trainer.stages.evaluation.run import Evaluated
from rlsdk.trainer.stages.evaluation.settings import EvalOptions
from rlsdk.trainer.tracking.run_output import RunOutput
from rlsdk.trainer.tracking.stopping import EvaluationStoppedError


class EvaluationError(BatchError):
    """The metrics of an evaluation mean nothing because too many samples have no grade."""


class Evaluations:
    """The evaluations of one stage: before the first step, then every `every` steps, and after the last."""

    def __init__(
        self, evaluate: Callable[[], Evaluated] | None, output: RunOutput, options: EvalOptions | None = None
    ) -> None:
        """`evaluate` evaluates the current weights; None: there is nothing to evaluate."""
        self._evaluate = evaluate
        self._output = output
        self.options = options or EvalOptions()
        self.first: Mapping[str, float] | None = None
        """Metrics of the first evaluation."""
        self.last: Mapping[str, float] = {}
        self.progress = Progress()
        self.missed: int | None = None
        """Step whose evaluation was skipped because the run was asked to end; a resumed run evaluates it first."""
        self.stop: Callable[[], bool] = lambda: False
        """Polled during an evaluation; `Trainer` sets it."""

    @property
    def is_on(self) -> bool:
        return self._evaluate is not None and self.options.every is not None

    def before(self, step: int) -> None:
        """Evaluates before the first step, or the evaluation that a resumed run has missed."""
        if self.is_on and ((step == 0 and self.options.at_start) or step == self.missed):
            self.measure(step)

    def after(self, step: int, *, last: bool) -> None:
        """Evaluates if an evaluation is due after this step."""
        if self.is_due(step, last=last):
            self.measure(step)

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether an evaluation is due after this step."""
        every = self.options.every
        return every is not None and self.is_on and (last or step % every == 0)

    def measure(self, step: int) -> None:
        """Evaluates; then stores, writes and reports the result.

        Raises:
            EvaluationError: too many samples have no grade; the metrics are logged all the same.
            EvaluationStoppedError: the run was asked to end; `missed` is set to this step.
        """
        if self._evaluate is None:
            return
        start, view = time.perf_counter(), self._output.view
        self.missed = step
        self.check_stop()
        with view.phase("eval"):
            evaluated = self._evaluate()
        self.missed = None
        for text in evaluated.notices:
            view.notice(text)
        metrics = {**evaluated.metrics, "time/eval_s": time.perf_counter() - start}
        self._output.track(step, metrics)
        if evaluated.samples and self.options.save_samples != "never":
            self._output.save_samples(step, evaluated.samples, compress=self.options.save_samples == "gzip")
        view.evaluated(step, metrics)
        self.last = metrics
        if self.first is None:
            self.first = metrics
        if evaluated.failure is not None:
            raise EvaluationError(evaluated.failure)
        for text in unmeasured(metrics, self.options.best, self.options.stopping):
            view.notice(text)
        self.progress = after_evaluation(self.progress, step, metrics, self.options.best, self.options.stopping)

    def check_stop(self) -> None:
        """Called during an evaluation wherever it may be interrupted.

        Raises:
            EvaluationStoppedError: the run is asked to end.
        """
        if self.stop():
            raise EvaluationStoppedError("stopped before all was measured")

    def is_best(self, step: int) -> bool:
        """Whether the value after this step is the best so far, so that its checkpoint must be kept."""
        return self.progress.best is not None and self.progress.best.step == step

    @property
    def why_ended(self) -> str | None:
        """Reason why the run ends before its last step; None while it does not."""
        return why_ended(self.progress, self.options.stopping)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "progress": self.progress.dump(), "missed": self.missed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.first, self.missed = state["first"], state.get("missed")
            self.progress = Progress.load(state["progress"], self.options.best, self.options.stopping)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's record of evaluations cannot be read: {error!r}") from error

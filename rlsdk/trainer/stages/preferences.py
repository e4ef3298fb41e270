"""The stage for training from preferences: reward models of answers and of steps, direct preference optimization, and
labelled answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rlsdk.algorithms import mean_log_ratio
from rlsdk.config.sections.role_kinds import ACTOR, REF
from rlsdk.data import PromptStream
from rlsdk.interfaces import Batch, CheckpointError, ObjectiveResult
from rlsdk.trainer.learner.metrics import StepClock
from rlsdk.trainer.learner.watch import LearningWatch, supervised_symptoms
from rlsdk.trainer.stages.evaluation.run import Evaluated
from rlsdk.trainer.stages.evaluation.schedule import Evaluations
from rlsdk.trainer.stages.evaluation.settings import EvalOptions
from rlsdk.trainer.stages.forward_parts import forward_in_parts
from rlsdk.trainer.stages.stage import Stage, StageSettings
from rlsdk.trainer.tracking.run_output import RunOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.trainer.roles.hosts import MiniBatchResult
    from rlsdk.trainer.roles.session import Session


class PairObjective(Protocol):
    """The loss of a `PairStage`: see `preference`, `kto` and `process` in `rlsdk.algorithms.objectives`."""

    @property
    def outputs(self) -> Sequence[str]: ...

    @property
    def fields(self) -> Sequence[str]: ...

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult: ...


class Examples(Protocol):
    """Pairs, labelled answers or solutions in steps, numbered from 0."""

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int], /) -> Batch:
        """The rows of these examples, a whole mini-batch."""

    def mismatched(self, rows: Sequence[int], /) -> Batch | None:
        """Rows of prompts with answers to others of them, of which the divergence from the reference is estimated;
        None: the loss needs no estimate."""


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Options of training from preferences."""

    label: str
    """Prefix of the metrics."""
    objective: PairObjective
    pairs_per_step: int
    update_timeout_s: float | None = None


class PairStage(Stage):
    """Stage in which each step takes pairs of answers, labelled answers or solutions, and makes one optimizer step of
    the actor. If the session has a reference, it computes its log-probs first."""

    def __init__(
        self,
        session: Session,
        stream: PromptStream,
        pairs: Examples,
        held_out: Examples | None,
        output: RunOutput,
        settings: StageSettings,
        options: PairOptions,
        when: EvalOptions | None = None,
    ) -> None:
        """`pairs` are numbered as the prompts of `stream`; `held_out` are never trained on, and evaluated according
        to `when`."""
        self.session = session
        self.stream = stream
        self.pairs = pairs
        self.output = output
        self.evaluations = Evaluations(None if held_out is None else partial(self._evaluate, held_out), output, when)
        self.settings = settings
        self.options = options
        self.last: Mapping[str, float] = {}
        """Metrics of the last step."""
        self._held_rows: tuple[Batch, Batch | None] | None = None
        self._watch = LearningWatch(supervised_symptoms(options.label, "preferences.lr"))

    def begin(self) -> None:
        self._progress = self.output.view.phase(self.options.label, total=self.settings.steps)
        self._progress.__enter__()
        self.output.view.advance(self.step)
        self.evaluations.before(self.step)

    def advance(self) -> Mapping[str, float]:
        clock, label, objective = StepClock(), self.options.label, self.options.objective
        rows = [row.index for row in self.stream.take(self.options.pairs_per_step)]
        batch = self._estimated(*self._rows(self.pairs, rows))
        actor = self.session.actor
        with self.session.turns.using(actor.name, training=True):
            result: MiniBatchResult = actor.run(
                "update",
                self.session.put(batch.keep(("input_ids", "uid", *objective.fields))),
                objective,
                timeout_s=self.options.update_timeout_s,
            )
        self.step += 1
        self.last = {
            **{f"{label}/{name}": value for name, value in means(result.update.sums).items()},
            f"{label}/grad_norm": result.step.grad_norm,
            f"{label}/lr": result.step.lr,
            f"{label}/tokens": float(batch.num_tokens),
            f"{label}/step_s": clock.metrics()["time/step_s"],
        }
        self.output.view.advance()
        self.output.view.pairs_step(label, self.step, self.settings.steps, self.last)
        self.output.track(self.step, self.last)
        for text in self._watch.step(self.step, self.last):
            self.output.view.notice(text)
        return self.last

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "pairs": self.stream.state_dict(),
            "metrics": dict(self.last),
            "evaluations": self.evaluations.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.step, self.last = int(state["step"]), dict(state["metrics"])
            self.evaluations.load_state_dict(state["evaluations"])
            self.stream.load_state_dict(state["pairs"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint is of another kind of training: {error!r} is wrong") from error

    def close(self) -> None:
        if hasattr(self, "_progress"):
            self._progress.__exit__(None, None, None)

    def _evaluate(self, held_out: Examples) -> Evaluated:
        """Metrics on the held-out examples, by the training objective."""
        objective, look = self.options.objective, self.evaluations.check_stop
        if self._held_rows is None:
            self._held_rows = self._rows(held_out, range(len(held_out)), look)
        batch = self._estimated(*self._held_rows, look)
        outputs = {name: self._forward(ACTOR, batch, name, look) for name in objective.outputs}
        with torch.no_grad():
            sums = objective(outputs, batch).sums
        return Evaluated(metrics={f"eval/{name}_pairs": value for name, value in means(sums).items()})

    def _rows(
        self, examples: Examples, rows: Sequence[int], look: Callable[[], None] = lambda: None
    ) -> tuple[Batch, Batch | None]:
        """The rows of these examples, and the mismatched ones, with the reference's log-probs."""
        others = examples.mismatched(rows)
        return self._referred(examples.batch(rows), look), None if others is None else self._referred(others, look)

    def _estimated(self, batch: Batch, others: Batch | None, look: Callable[[], None] = lambda: None) -> Batch:
        """Adds the policy's divergence from the reference, estimated on mismatched rows."""
        if others is None:
            return batch
        estimate = mean_log_ratio(others, self._forward(ACTOR, others, "log_probs", look))
        return batch.with_rows(log_ratio_estimate=torch.full((batch.num_rows,), estimate))

    def _referred(self, batch: Batch, look: Callable[[], None] = lambda: None) -> Batch:
        """Adds the reference's log-probs, if the loss compares with a reference."""
        if "ref_log_probs" not in self.options.objective.fields:
            return batch
        return batch.with_tokens(ref_log_probs=self._forward(REF, batch, "log_probs", look))

    def _forward(self, role: str, batch: Batch, output: str, look: Callable[[], None]) -> Tensor:
        needed = batch.keep(("input_ids", "response_mask", "uid"))
        return forward_in_parts(self.session, role, needed, output, look=look, timeout_s=self.options.update_timeout_s)


def means(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Divides an objective's sums by the number of pairs, labelled answers or steps; its loss becomes `loss`."""
    weight = float(sums["metric_weight"])
    names = [name for name in sums if not name.endswith("_weight")]
    averages = {name: float(sums[name]) / weight if weight else 0.0 for name in names}
    own = next(name for name in ("preference_loss", "step_loss") if name in averages)
    return {"loss": averages.pop(own), **averages}

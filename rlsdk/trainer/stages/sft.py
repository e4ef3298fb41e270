"""The stage for supervised training on reference answers: the warm start of a run, and the whole of `rlsdk sft`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlsdk.algorithms import DistillObjective, SftObjective, loss_weights
from rlsdk.config.sections.role_kinds import ACTOR
from rlsdk.data import LearnedRow, Prompt, PromptStream
from rlsdk.interfaces import Batch, CheckpointError
from rlsdk.trainer.checkpoints.run_folder import WARM_START
from rlsdk.trainer.inputs.answers import Conversations
from rlsdk.trainer.learner.metrics import StepClock
from rlsdk.trainer.learner.mini_batches import make_rows_batch
from rlsdk.trainer.learner.watch import LearningWatch, supervised_symptoms
from rlsdk.trainer.stages.evaluation.metrics import clustered_error
from rlsdk.trainer.stages.evaluation.run import Evaluated
from rlsdk.trainer.stages.evaluation.schedule import Evaluations
from rlsdk.trainer.stages.evaluation.settings import EvalOptions
from rlsdk.trainer.stages.forward_parts import forward_in_parts
from rlsdk.trainer.stages.stage import Stage, StageSettings
from rlsdk.trainer.tracking.run_output import RunOutput

if TYPE_CHECKING:
    from rlsdk.trainer.roles.hosts import MiniBatchResult
    from rlsdk.trainer.roles.session import Session

CHECKPOINTS = WARM_START
"""Folder in a run's folder; separate from the RL checkpoints, whose steps count from 1 again."""


class SftStage(Stage):
    """Each step takes conversations, and makes one optimizer step of the actor.

    Rows are ordered differently than in RL: the RL steps that follow must not begin with the prompts that were just
    memorized, which leave little to explore.
    """

    def __init__(
        self,
        session: Session,
        stream: PromptStream,
        rows: Sequence[Sequence[LearnedRow]],
        output: RunOutput,
        settings: StageSettings,
        *,
        rows_per_step: int,
        update_timeout_s: float | None = None,
        held_out: Conversations | None = None,
        when: EvalOptions | None = None,
    ) -> None:
        """`rows` holds what is learned of each conversation, by its index in the data set; `held_out` is never trained
        on, and evaluated according to `when`."""
        self.session = session
        self.stream = stream
        self.rows = rows
        self.output = output
        self.evaluations = Evaluations(None if held_out is None else partial(self._evaluate, held_out), output, when)
        self.settings = settings
        self.rows_per_step = rows_per_step
        self.update_timeout_s = update_timeout_s
        self.last: Mapping[str, float] = {}
        """Metrics of the last step."""
        self.objective: SftObjective | DistillObjective = SftObjective()
        self._watch = LearningWatch(supervised_symptoms("sft", "sft.lr"))

    def begin(self) -> None:
        self._progress = self.output.view.phase("sft", total=self.settings.steps)
        self._progress.__enter__()
        self.output.view.advance(self.step)
        self.evaluations.before(self.step)

    def advance(self) -> Mapping[str, float]:
        clock = StepClock()
        batch = self.weighed(self.stream.take(self.rows_per_step))
        actor = self.session.actor
        with self.session.turns.using(actor.name, training=True):
            result: MiniBatchResult = actor.run(
                "update", self.session.put(batch), self.objective, timeout_s=self.update_timeout_s
            )
        self.step += 1
        self.last = {
            "sft/loss": result.update.loss,
            "sft/grad_norm": result.step.grad_norm,
            "sft/lr": result.step.lr,
            "sft/tokens": float(batch.num_tokens),
            "sft/step_s": clock.metrics()["time/step_s"],
            **self._figures(result),
        }
        self.output.view.advance()
        self.output.view.sft_step(self.step, self.settings.steps, self.last)
        self.output.track(self.step, self.last)
        for text in self._watch.step(self.step, self.last):
            self.output.view.notice(text)
        return self.last

    def weighed(self, drawn: Sequence[Prompt]) -> Batch:
        """The mini-batch of these conversations."""
        batch = make_rows_batch([row for prompt in drawn for row in self.rows[prompt.index]])
        return self._prepared(batch.with_tokens(loss_weight=loss_weights(batch)), drawn)

    def _prepared(self, batch: Batch, drawn: Sequence[Prompt]) -> Batch:
        """Adds what the objective reads besides."""
        return batch

    def _figures(self, result: MiniBatchResult) -> Mapping[str, float]:
        """Metrics of the objective's own."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "prompts": self.stream.state_dict(),
            "metrics": dict(self.last),
            "evaluations": self.evaluations.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.step, self.last = int(state["step"]), dict(state["metrics"])
            self.stream.load_state_dict(state["prompts"])
            self.evaluations.load_state_dict(state["evaluations"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint is not one of supervised training: {error!r} is wrong") from error

    def close(self) -> None:
        if hasattr(self, "_progress"):
            self._progress.__exit__(None, None, None)

    def _evaluate(self, held_out: Conversations) -> Evaluated:
        """Mean negative log-likelihood per token of held-out answers, in nats, with its standard error over
        conversations."""
        batch = make_rows_batch([row for rows in held_out[1] for row in rows])
        log_probs = forward_in_parts(
            self.session, ACTOR, batch.keep(("input_ids", "response_mask")), "log_probs",
            look=self.evaluations.check_stop, timeout_s=self.update_timeout_s,
        )  # fmt: skip
        mask = batch["response_mask"]
        lengths = [sum(end - first for row in rows for first, end in row.learned) for rows in held_out[1]]
        rows = [part.tolist() for part in torch.split(-log_probs[mask].double(), lengths)]
        tokens = [value for row in rows for value in row]
        error = clustered_error(rows)
        metrics = {"sft/eval_loss": math.fsum(tokens) / len(tokens)}
        return Evaluated(metrics=metrics | ({} if error is None else {"sft/eval_loss_se": error}))

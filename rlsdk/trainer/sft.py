"""Supervised training on the reference answers as a stage: the warm start of a run, and all of `rlsdk sft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsdk.algorithms import SftObjective, loss_weights
from rlsdk.data import DataRow, Prompt, PromptStream, Template
from rlsdk.interfaces import CheckpointError, DataError
from rlsdk.trainer.experience import make_sft_batch
from rlsdk.trainer.metrics import StepClock
from rlsdk.trainer.stage import RunOutput, Stage, StageSettings

if TYPE_CHECKING:
    from rlsdk.trainer.hosts import MiniBatchResult
    from rlsdk.trainer.session import Session

CHECKPOINTS = "sft_checkpoints"
"""Folder of a run; apart from those of its RL steps, which are numbered anew."""


class SftStage(Stage):
    """One step: rows of prompt and answer, one optimizer step of the actor.

    Rows come in an order of their own: prompts that were just learned by heart have little left to explore, and the RL
    steps that follow must not begin with them.
    """

    def __init__(
        self,
        session: Session,
        stream: PromptStream,
        encode: Callable[[Prompt], Sequence[int]],
        output: RunOutput,
        settings: StageSettings,
        *,
        rows_per_step: int,
        update_timeout_s: float | None = None,
    ) -> None:
        """`encode` gives the tokens that are learned behind a prompt."""
        self.session = session
        self.stream = stream
        self.encode = encode
        self.output = output
        self.settings = settings
        self.rows_per_step = rows_per_step
        self.update_timeout_s = update_timeout_s
        self.last: Mapping[str, float] = {}
        """Metrics of the last step."""

    def begin(self) -> None:
        self._progress = self.output.view.phase("sft", total=self.settings.steps)
        self._progress.__enter__()
        self.output.view.advance(self.step)

    def advance(self) -> Mapping[str, float]:
        clock = StepClock()
        rows = self.stream.take(self.rows_per_step)
        batch = make_sft_batch([row.prompt_ids for row in rows], [self.encode(row) for row in rows])
        batch = batch.with_tokens(loss_weight=loss_weights(batch))
        pending = self.session.actor.group.submit("update", self.session.put(batch), SftObjective())
        result: MiniBatchResult = pending.result(self.update_timeout_s)
        self.step += 1
        self.last = {
            "sft/loss": result.update.loss,
            "sft/grad_norm": result.step.grad_norm,
            "sft/lr": result.step.lr,
            "sft/tokens": float(batch.num_tokens),
            "sft/step_s": clock.metrics()["time/step_s"],
        }
        self.output.view.advance()
        self.output.view.sft_step(self.step, self.settings.steps, self.last)
        self.output.track(self.step, self.last)
        return self.last

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "prompts": self.stream.state_dict(), "metrics": dict(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.step, self.last = int(state["step"]), dict(state["metrics"])
            self.stream.load_state_dict(state["prompts"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint is not one of supervised training: {error!r} is wrong") from error

    def close(self) -> None:
        if hasattr(self, "_progress"):
            self._progress.__exit__(None, None, None)


def answer_encoder(tokenizer: Any, template: str, max_tokens: int) -> Callable[[Prompt], list[int]]:
    """Tokens of what is learned behind a prompt, the end-of-sequence token included, cut to `max_tokens`."""
    filled = Template(template)

    def encode(prompt: Prompt) -> list[int]:
        if prompt.answer is None:
            raise DataError(
                f"{prompt.source}: has no answer to learn from; name its field in data.answer_field, or set sft.steps "
                "to 0"
            )
        text = filled.fill(DataRow(row=prompt.row, source=prompt.source), answer=prompt.answer)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: max_tokens - 1]
        return [*np.asarray(ids, np.int64).tolist(), tokenizer.eos_token_id]

    return encode

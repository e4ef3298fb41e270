"""Supervised training on the reference answers: the warm start of a run, and all of `rlsdk sft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlsdk.algorithms import SftObjective, loss_weights
from rlsdk.data import DataRow, PromptStream, Template
from rlsdk.interfaces import DataError
from rlsdk.trainer.experience import make_sft_batch, request_seed
from rlsdk.trainer.metrics import StepClock
from rlsdk.trainer.session import Session

if TYPE_CHECKING:
    from rlsdk.data import Prompt
    from rlsdk.trainer.events import RunView
    from rlsdk.trainer.hosts import MiniBatchResult
    from rlsdk.trainer.parts import RunParts


def train_supervised(
    session: Session, parts: RunParts, view: RunView, *, stop: Callable[[], bool] = lambda: False
) -> Mapping[str, float]:
    """Runs `sft.steps` optimizer steps, each over `sft.rows_per_step` rows; returns the last one's metrics.

    Rows come in an order of their own: prompts that were just learned by heart have little left to explore, and the RL
    steps that follow must not begin with them.

    Raises:
        DataError: a row has no answer to learn.
    """
    config = session.config
    order = request_seed(config.trainer.seed, "sft")
    stream = PromptStream(parts.train_prompts, seed=order, shuffle=config.data.shuffle)
    metrics: dict[str, float] = {}
    with view.phase("sft", total=config.sft.steps):
        for step in range(1, config.sft.steps + 1):
            if stop():
                break
            clock = StepClock()
            rows = stream.take(config.sft.rows_per_step)
            batch = make_sft_batch([row.prompt_ids for row in rows], [answer_ids(row, parts) for row in rows])
            batch = batch.with_tokens(loss_weight=loss_weights(batch))
            result: MiniBatchResult = session.actor.run("update", session.cluster.put(batch), SftObjective())
            metrics = {
                "sft/loss": result.update.loss,
                "sft/grad_norm": result.step.grad_norm,
                "sft/lr": result.step.lr,
                "sft/tokens": float(batch.num_tokens),
                "sft/step_s": clock.metrics()["time/step_s"],
            }
            view.advance()
            view.sft_step(step, config.sft.steps, metrics)
            parts.track(step, metrics)
    return metrics


def answer_ids(prompt: Prompt, parts: RunParts) -> list[int]:
    """Tokens of what is learned behind a prompt, the end-of-sequence token included, cut to the response limit."""
    if prompt.answer is None:
        raise DataError(
            f"{prompt.source}: has no answer to learn from; name its field in data.answer_field, or set sft.steps to 0"
        )
    row = DataRow(row=prompt.row, source=prompt.source)
    text = Template(parts.config.sft.answer_template).fill(row, answer=prompt.answer)
    ids = parts.tokenizer(text, add_special_tokens=False)["input_ids"][: parts.sampling.max_tokens - 1]
    return [*np.asarray(ids, np.int64).tolist(), parts.tokenizer.eos_token_id]

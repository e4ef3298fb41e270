"""Supervised training on the reference answers: the warm start of a run, and all of `rlsdk sft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlsdk.algorithms import SftObjective, loss_weights
from rlsdk.data import DataRow, PromptStream, Template
from rlsdk.interfaces import DataError
from rlsdk.trainer.checkpoint import CheckpointStore, read_state
from rlsdk.trainer.experience import make_sft_batch, request_seed
from rlsdk.trainer.metrics import StepClock
from rlsdk.trainer.session import Session

if TYPE_CHECKING:
    from rlsdk.config import RunConfig
    from rlsdk.data import Prompt
    from rlsdk.trainer.events import RunView
    from rlsdk.trainer.hosts import MiniBatchResult
    from rlsdk.trainer.parts import RunParts


CHECKPOINTS = "sft_checkpoints"
"""Folder of a run; apart from those of its RL steps, which are numbered anew."""


@dataclass(frozen=True, kw_only=True)
class SftResult:
    """What supervised training came to."""

    steps: int
    """Optimizer steps done."""
    metrics: Mapping[str, float]
    """Of the last one."""


def train_supervised(
    session: Session,
    config: RunConfig,
    parts: RunParts,
    view: RunView,
    *,
    resume: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> SftResult:
    """Runs `sft.steps` optimizer steps, each over `sft.rows_per_step` rows.

    Rows come in an order of their own: prompts that were just learned by heart have little left to explore, and the RL
    steps that follow must not begin with them.

    Args:
        session: with an actor whose optimizer is that of supervised training.
        parts: of the run.
        view: is told of every step.
        resume: a whole checkpoint of this training, to go on from.
        stop: asked before every step; True saves and returns.

    Raises:
        DataError: a row has no answer to learn.
        CheckpointError: `resume` is of other data.
    """
    order = request_seed(config.trainer.seed, "sft")
    stream = PromptStream(parts.train_prompts, seed=order, shuffle=config.data.shuffle)
    every = config.sft.save_every_steps
    store = CheckpointStore(parts.run_dir / CHECKPOINTS, config.trainer.keep_checkpoints)
    metrics: dict[str, float] = {}
    done = 0
    if resume is not None:
        saved = read_state(resume)
        session.load_roles(resume)
        stream.load_state_dict(saved["prompts"])
        done, metrics = saved["step"], saved["metrics"]
        view.notice(f"supervised training resumed from {resume} at step {done}")

    def save(step: int) -> None:
        state = {"step": step, "prompts": stream.state_dict(), "metrics": metrics}
        with view.phase("save"), store.write(step, state) as draft:
            session.save_roles(draft)

    with view.phase("sft", total=config.sft.steps):
        for _ in range(done):
            view.advance()
        for step in range(done + 1, config.sft.steps + 1):
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
            done = step
            if every is not None and step % every == 0 and step < config.sft.steps:
                save(step)
    if every is not None and done % every and done < config.sft.steps:
        save(done)
    return SftResult(steps=done, metrics=metrics)


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

"""Supervised training on the reference answers: the warm start of a run, and all of `rlsdk sft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.algorithms import SftObjective, loss_weights
from rlsdk.data import AnswerEncoder, DataRow, PromptDataset, PromptStream, Template, answer_report
from rlsdk.interfaces import DataError
from rlsdk.trainer.checkpoint import CheckpointStore, read_state
from rlsdk.trainer.experience import make_sft_batch, request_seed
from rlsdk.trainer.metrics import StepClock
from rlsdk.trainer.session import Session, load_engine

if TYPE_CHECKING:
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
    parts: RunParts,
    view: RunView,
    *,
    resume: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    accept: Callable[[], None] = lambda: None,
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
        accept: called once engine and data have taken `resume`, before anything is written.

    Raises:
        DataError: a row has no answer to learn.
        CheckpointError: `resume` is of other data.
    """
    config = session.config
    order = request_seed(config.trainer.seed, "sft")
    prompts, answers = learned_answers(parts, view)
    stream = PromptStream(prompts, seed=order, shuffle=config.data.shuffle)
    every = config.sft.save_every_steps
    store = CheckpointStore(parts.run_dir / CHECKPOINTS, config.trainer.keep_checkpoints)
    metrics: dict[str, float] = {}
    done = 0
    if resume is not None:
        saved = read_state(resume)
        load_engine(session.actor, resume)
        stream.load_state_dict(saved["prompts"])
        done, metrics = saved["step"], saved["metrics"]
        view.notice(f"supervised training resumed from {resume} at step {done}")
    accept()

    def save(step: int) -> None:
        state = {"step": step, "prompts": stream.state_dict(), "metrics": metrics}
        with view.phase("save"), store.write(step, state) as draft:
            (draft / "actor").mkdir()
            session.actor.run("save_checkpoint", str(draft / "actor"))

    with view.phase("sft", total=config.sft.steps):
        for _ in range(done):
            view.advance()
        for step in range(done + 1, config.sft.steps + 1):
            if stop():
                break
            clock = StepClock()
            rows = stream.take(config.sft.rows_per_step)
            batch = make_sft_batch([row.prompt_ids for row in rows], [answers[row.index] for row in rows])
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


def learned_answers(parts: RunParts, view: RunView) -> tuple[PromptDataset, list[Sequence[int]]]:
    """The prompts that are learned from and the tokens behind each; `sft.long_answers` says which of them are left out.

    Raises:
        DataError: a row has no answer, or all answers are too long.
    """
    config, prompts = parts.config, list(parts.train_prompts)
    limit, choice = parts.sampling.max_tokens, config.sft.long_answers
    texts, sources = (
        [answer_text(prompt, config.sft.answer_template) for prompt in prompts],
        [p.source for p in prompts],
    )
    encoder = AnswerEncoder(parts.tokenizer, limit, allow_special_tokens=config.data.allow_special_tokens)
    answers = encoder.encode(texts, sources)
    report = answer_report(answers, sources, limit, choice)
    if report.num_long:
        view.notice(f"sft: {report.line()}")
    kept = [at for at, answer in enumerate(answers) if choice == "cut" or not answer.cut]
    if not kept:
        raise DataError(
            f"sft.long_answers {choice!r}: {report.line()}; raise rollout.max_response_tokens {limit}, or choose 'cut'"
        )
    return parts.train_prompts.subset(kept), [answers[at].token_ids for at in kept]


def answer_text(prompt: Prompt, template: str) -> str:
    """What is learned behind a prompt, as text."""
    if prompt.answer is None:
        raise DataError(
            f"{prompt.source}: has no answer to learn from; name its field in data.answer_field, or set sft.steps to 0"
        )
    return Template(template).fill(DataRow(row=prompt.row, source=prompt.source), answer=prompt.answer)

"""Samples groups for prompts, through the stream: for training, evaluation and `rlsdk generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsdk.algorithms.reductions import Samples, total_scores
from rlsdk.config import LengthConfig
from rlsdk.data import Prompt
from rlsdk.interfaces import SamplingParams
from rlsdk.rollouts import Group, GroupId, GroupTask, RolloutStream, make_batch
from rlsdk.trainer.learner.mini_batches import shape_scores
from rlsdk.trainer.tracking.stopping import EvaluationStoppedError

LOOK_S = 0.1
"""Seconds between checks of whether the run is asked to end."""
CANCEL_S = 1.0
"""Seconds to wait for replicas to stop their samples before asking them again."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How groups of one kind are sampled."""

    source: str
    """First part of their ids: `train`, or the name of an evaluation."""
    num_samples: int
    sampling: SamplingParams
    greedy_baseline: bool = False
    """Adds one greedy sample per group, which is graded and not trained on."""


def group_task(prompt: Prompt, draw: Draw, *, epoch: int, ordinal: int, seed: tuple[int | str, ...]) -> GroupTask:
    """Builds the stream's task for one group."""
    return GroupTask(
        id=GroupId(source=draw.source, epoch=epoch, index=prompt.index),
        ordinal=ordinal,
        prompt=prompt,
        num_samples=draw.num_samples,
        sampling=draw.sampling,
        seed=seed,
        greedy_baseline=draw.greedy_baseline,
    )


def scores_of(group: Group, lengths: LengthConfig, *, max_tokens: int) -> list[float]:
    """Whole scores of a group's samples, without those whose reward failed: with the token scores, and with what the
    lengths of the responses give and cost (`shape_scores`)."""
    made = [sample for sample in group.samples if sample.rows]
    if not lengths.changes_scores or not made:
        return [sample.total for sample in group.samples if sample.grade.valid]
    batch = make_batch([group], temperature=1.0)
    shaped = shape_scores(batch, lengths, max_tokens=max_tokens)
    changes = Samples.of(batch).of_rows(shaped["scores"] - batch["scores"]).tolist()
    return [sample.total + change for sample, change in zip(made, changes, strict=True) if sample.grade.valid]


def compared_scores(group: Group, lengths: LengthConfig, *, max_tokens: int) -> list[list[float]]:
    """Scores that are compared with one another: those of the group's samples (`scores_of`), or those of each of their
    chains where chains have scores of their own."""
    if not any(sample.chain_scores for sample in group.samples):
        return [scores_of(group, lengths, max_tokens=max_tokens)]
    chains = Samples.scored(shape_scores(make_batch([group], temperature=1.0), lengths, max_tokens=max_tokens))
    scores, of_group = total_scores(chains)[chains.valid], chains.groups.index[chains.valid]
    return [scores[of_group == number].tolist() for number in range(chains.groups.count)]


def sample_all(
    stream: RolloutStream,
    prompts: Sequence[Prompt],
    draw: Draw,
    *,
    seed: tuple[int | str, ...],
    stop: Callable[[], bool] = lambda: False,
) -> list[Group]:
    """Samples a group for each prompt, in order; waits for all. The same seed gives the same samples under the same
    weights.

    Raises:
        EvaluationStoppedError: `stop` returned True before all were finished; no replica decodes for them any longer.
    """
    stream.start([group_task(prompt, draw, epoch=0, ordinal=at, seed=(*seed, at)) for at, prompt in enumerate(prompts)])
    finished: dict[int, Group] = {}
    while len(finished) < len(prompts):
        if stop():
            # A replica that still decodes could not sleep, but its devices are needed to save the step. A hanging
            # replica is detected by its lack of progress.
            while not stream.cancel(draw.source, CANCEL_S):
                pass
            raise EvaluationStoppedError(f"stopped: {len(finished)} of {len(prompts)} prompts were sampled")
        if (group := stream.poll(LOOK_S)) is not None:
            finished[group.task.ordinal] = group
    return [finished[at] for at in range(len(prompts))]

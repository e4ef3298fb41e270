"""Repeats a run's training on the samples in its journal, and compares the updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlsdk.data import Prompt, PromptStream
from rlsdk.interfaces import CheckpointError, Trajectory
from rlsdk.interfaces.spelling import Setting
from rlsdk.rollouts import Group
from rlsdk.rollouts.groups.group_assembly import GREEDY
from rlsdk.rollouts.journal.recorded import Recorded, read_journal
from rlsdk.rollouts.journal.records import samples_from
from rlsdk.trainer.generation.sampler import Draw, group_task


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """One repeated training step."""

    step: int
    figures: Mapping[str, float]
    expected: Mapping[str, float]

    @property
    def difference(self) -> float:
        """Largest relative difference of a metric; infinite if one is missing."""
        return max((_relative(self.figures.get(name), value) for name, value in self.expected.items()), default=0.0)


@dataclass(kw_only=True)
class RecordedGroups:
    """The groups of every step in a journal, in step order."""

    prompts: PromptStream
    draw: Draw
    recorded: Recorded
    text_of: Callable[[Trajectory], str]
    vocabulary: int | None = None
    """Number of token ids of the model; None: ids are not checked."""
    _taken: dict[int, tuple[Prompt, int]] = field(default_factory=dict)
    _next: int = 0

    @property
    def steps(self) -> Sequence[int]:
        """Steps whose update was recorded."""
        return sorted(self.recorded.trained.keys() & self.recorded.updates.keys())

    def groups(self, step: int) -> list[Group]:
        """Groups that a step trained on.

        Raises:
            CheckpointError: samples of the step are not in the journal.
        """
        return [self._group(ordinal, step) for ordinal in self.recorded.trained[step]]

    def _group(self, ordinal: int, step: int) -> Group:
        prompt, epoch = self._prompt(ordinal)
        task = group_task(prompt, self.draw, epoch=epoch, ordinal=ordinal, seed=())
        records = self.recorded.samples.get(ordinal, {})
        made = samples_from(records, prompt.prompt_ids, self.text_of, self.vocabulary)
        missing = [at for at in range(self.draw.num_samples) if ("", at) not in made]
        if missing:
            raise CheckpointError(
                f"step {step} trained on group {ordinal}, of which the journal lacks samples {missing}: the run kept "
                f"what a resume needs. `{Setting('schedule.journal', 'all')}` keeps all of it"
            )
        samples = [made["", at] for at in range(self.draw.num_samples)]
        return Group(task=task, samples=samples, baseline=made.get((GREEDY, 0)))

    def _prompt(self, ordinal: int) -> tuple[Prompt, int]:
        while self._next <= ordinal:
            prompt = self.prompts.take(1)[0]
            self._taken[self._next] = prompt, self.prompts.epoch
            self._next += 1
        return self._taken.pop(ordinal)


def recorded_groups(
    folder: Path,
    prompts: PromptStream,
    draw: Draw,
    text_of: Callable[[Trajectory], str],
    vocabulary: int | None = None,
) -> RecordedGroups:
    """Reads the recorded groups of a whole run; `vocabulary` is the number of token ids of its model.

    Raises:
        CheckpointError: there is no journal, or it does not begin with the first step.
    """
    recorded = read_journal(folder, after=0)
    groups = RecordedGroups(prompts=prompts, draw=draw, recorded=recorded, text_of=text_of, vocabulary=vocabulary)
    steps = groups.steps
    if not steps:
        raise CheckpointError(
            f"{folder} has no journal of a step; a run writes one with `{Setting('schedule.journal', 'all')}`"
        )
    if steps != list(range(1, len(steps) + 1)):
        raise CheckpointError(
            f"the journal in {folder} begins with step {steps[0]}: older records were removed. Only a run with "
            f"`{Setting('schedule.journal', 'all')}` can be replayed"
        )
    return groups


def replay(found: RecordedGroups, learn: Callable[[Sequence[Group]], Mapping[str, float]]) -> Iterator[ReplayedStep]:
    """Repeats the training on every step's groups.

    Args:
        found: groups of the journal.
        learn: makes a step's updates and returns their metrics.
    """
    for step in found.steps:
        figures = learn(found.groups(step))
        yield ReplayedStep(step=step, figures=figures, expected=found.recorded.updates[step])


def _relative(found: float | None, expected: float) -> float:
    if found is None:
        return math.inf
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    return abs(found - expected) / max(abs(expected), 1e-30)

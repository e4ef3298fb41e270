"""Which rows each teacher teaches, and checks of teachers before any device is taken."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsdk.config import RunConfig, TeacherConfig
from rlsdk.config.sections.role_kinds import teacher_role
from rlsdk.data import PromptDataset
from rlsdk.interfaces import Batch, ConfigError
from rlsdk.interfaces.spelling import Setting
from rlsdk.rewards import applies_to, check_routes
from rlsdk.rollouts import Group
from rlsdk.trainer.inputs.teacher_tokenizers import check_tokenizer


@dataclass(frozen=True, kw_only=True)
class Taught:
    """The prompts that one teacher teaches."""

    role: str
    teacher: TeacherConfig
    indices: Collection[int] | None
    """Indices of the prompts of its sources; None: those of all."""

    @classmethod
    def of_run(cls, config: RunConfig, prompts: PromptDataset) -> list[Taught]:
        """Of each teacher of a run with these training prompts."""
        return [
            cls(role=teacher_role(one.name), teacher=one, indices=_indices(one.sources, prompts))
            for one in config.teachers
        ]

    def teaches(self, group: Group) -> bool:
        """Whether it teaches this group's prompt."""
        return self.teaches_row(group.task.id.index, group.task.prompt.row)

    def teaches_row(self, index: int, row: Mapping[str, Any]) -> bool:
        """Whether it teaches the prompt of this index, of this row of the data."""
        return (self.indices is None or index in self.indices) and applies_to(self.teacher.rows, row)


def with_taught(batch: Batch, groups: Sequence[Group], teachers: Sequence[Taught]) -> Batch:
    """Adds, for each teacher, `taught_by.ROLE` `[B]`: whether it teaches the row's prompt.

    Args:
        batch: made of `groups`.
        groups: of the step.
        teachers: those of the run.
    """
    fields = {}
    for one in teachers:
        ordinals = [group.task.ordinal for group in groups if one.teaches(group)]
        fields[row_field(one.role)] = torch.isin(batch["uid"], torch.tensor(ordinals, dtype=torch.int64))
    return batch.with_rows(**fields)


def row_field(role: str) -> str:
    """Field of the batch that says which rows a teacher teaches."""
    return f"taught_by.{role}"


def check_teachers(config: RunConfig, prompts: PromptDataset, tokenizer: Any) -> list[str]:
    """Checks the teachers of a run against its training rows and the policy's tokenizer. Returns notices.

    Raises:
        ConfigError: an id means other bytes in a teacher's tokenizer; no row has a field or value of a teacher's
            `rows`; a teacher teaches no row; or rows have neither a teacher nor a reward.
    """
    if not config.teachers:
        return []
    for at, teacher in enumerate(config.teachers):
        check_tokenizer(config, teacher, f"teachers.{at}", tokenizer)
    check_routes(config.teachers, ((row.source, row.row) for row in prompts.rows), whole=False, field="teachers")
    return list(_check_shares(config, prompts))


def _check_shares(config: RunConfig, prompts: PromptDataset) -> Iterator[str]:
    """Yields how many of the rows each teacher teaches, where that is not all of them."""
    lost: list[str] = []
    counts = [0] * len(config.teachers)
    everywhere = bool(config.reward_models) or any(reward.weight and not reward.rows for reward in config.rewards)
    everyone = Taught.of_run(config, prompts)
    for index, row in enumerate(prompts.rows):
        teaching = [at for at, one in enumerate(everyone) if one.teaches_row(index, row.row)]
        for at in teaching:
            counts[at] += 1
        learned = everywhere or any(config.teachers[at].weight for at in teaching)
        if not learned and not any(reward.weight and applies_to(reward.rows, row.row) for reward in config.rewards):
            lost.append(row.source)
    for at, count in enumerate(counts):
        if not count:
            raise ConfigError(
                f"teachers.{at}: teaches none of the {len(prompts.rows)} training rows, because no row fits its rows "
                f"{dict(config.teachers[at].rows)} and its sources {list(config.teachers[at].sources)} together"
            )
        if count < len(prompts.rows):
            yield f"{everyone[at].role} teaches {count:,} of {len(prompts.rows):,} training rows"
    if lost:
        raise ConfigError(
            f"teachers: {len(lost)} of {len(prompts.rows)} training rows have neither a teacher nor a reward of "
            f"non-zero weight, the first is {lost[0]}; add their values to the `rows` of a teacher, or add a teacher "
            f"without `rows`, or a reward (`{Setting('rewards', 'NAME')}`)"
        )


def _indices(sources: Sequence[str], prompts: PromptDataset) -> Collection[int] | None:
    if not sources or len(prompts.parts) == 1:
        return None
    found: set[int] = set()
    start = 0
    for part in prompts.parts:
        if part.name in sources:
            found.update(range(start, start + part.size))
        start += part.size
    return found

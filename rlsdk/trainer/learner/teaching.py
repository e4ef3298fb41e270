"""Teachers in a step: their log-probs of the rows that they teach, and the advantages that these give."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlsdk.algorithms.distillation import TeacherLogProbs, add_teacher_advantages, gap
from rlsdk.config import DistillationConfig, ForwardPass, TeacherConfig
from rlsdk.config.sections.role_kinds import TEACHER, kind_of
from rlsdk.interfaces import Batch, BatchError, Models
from rlsdk.trainer.inputs.teachers import row_field


def teacher_log_probs(batch: Batch, models: Models, each: ForwardPass, teacher: TeacherConfig) -> Batch:
    """Adds `each.field` `[N]`, a teacher's log-probs of the rows that it teaches, and NaN on all other rows.

    Raises:
        BatchError: a sampled token of these rows has no finite log-prob.
    """
    rows = batch[row_field(each.role)].nonzero()[:, 0]
    found = torch.full((batch.num_tokens,), float("nan"))
    if len(rows):
        part = batch.select(rows)
        if teacher.temperature is not None:
            part = part.with_meta(temperature=teacher.temperature)
        found[batch.token_index(rows)] = models.forward(each.role, part, each.output)
    batch = batch.with_tokens(**{each.field: found})
    lacking = _taught_tokens(batch, each.role) & ~found.isfinite()
    if lacking.any():
        token = int(lacking.nonzero()[0])
        row = int(batch.row_of_token[token])
        raise BatchError(
            f"{each.role}: {int(lacking.sum())} of {int(_taught_tokens(batch, each.role).sum())} tokens that it should "
            f"teach have no finite log-prob from it; the first is token {int(batch['input_ids'][token])} at position "
            f"{int(batch.position_ids[token])} of row_id {int(batch['row_id'][row])} (uid {int(batch['uid'][row])}): "
            f"{float(found[token])}. Its dtype may be too narrow (`dtype: float32` of this teacher)"
        )
    return batch


def learn_from_teachers(
    batch: Batch, teachers: Mapping[str, TeacherConfig], settings: DistillationConfig
) -> tuple[Batch, dict[str, float]]:
    """Adds the teachers' part to `advantages`. Returns metrics: the sampled tokens that have a teacher, and the mean
    gap in nats, of all teachers and of each.

    Args:
        batch: with `advantages`, `old_log_probs` and each teacher's log-probs.
        teachers: by role.
        settings: of distillation.
    """
    policy = batch["old_log_probs"]
    found = {
        role: TeacherLogProbs(
            log_probs=batch[kind_of(role).field_of(role)],
            taught=_taught_tokens(batch, role),
            weight=teacher.weight,
        )
        for role, teacher in teachers.items()
    }
    taught = torch.stack([one.taught for one in found.values()]).any(0)
    metrics = {"teacher/tokens": float(taught.sum()), "teacher/share": _share(taught, batch["response_mask"])}
    for role, one in found.items():
        count = int(one.taught.sum())
        if role != TEACHER:
            metrics[f"{role.replace('.', '/')}/tokens"] = float(count)
        if count:
            mean = float(gap(policy, one).double().sum() / count)
            metrics[f"{role.replace('.', '/')}/gap"] = mean
    learned = add_teacher_advantages(
        batch, policy, list(found.values()), coef=settings.coef, reward_coef=settings.reward_coef
    )
    return learned, metrics


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part.sum()) / max(float(whole.sum()), 1.0)


def _taught_tokens(batch: Batch, role: str) -> torch.Tensor:
    """`[N]` bool: sampled tokens of the rows that a teacher teaches."""
    return batch["response_mask"] & batch[row_field(role)][batch.row_of_token]

"""Teachers in a step: their log-probs of the rows that they teach, and the advantages that these give."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlsdk.algorithms.distillation import TeacherLogProbs, add_teacher_advantages, gap
from rlsdk.config import DistillationConfig, ForwardPass, TeacherConfig
from rlsdk.config.sections.role_kinds import TEACHER, kind_of
from rlsdk.interfaces import Batch, BatchError, Models
from rlsdk.trainer.inputs.teachers import row_field


def with_teacher(
    batch: Batch, models: Models, each: ForwardPass, teacher: TeacherConfig, settings: DistillationConfig
) -> Batch:
    """Adds what a teacher computes of the rows that it teaches: its log-probs `[N]`, NaN on all other rows; or its
    hidden states `[N, H]`, 0 on all other rows, with the settings of the divergence.

    Args:
        batch: with the row field of `with_taught`.
        models: of the run.
        each: the teacher's pass.
        teacher: its configuration.
        settings: of distillation.

    Raises:
        BatchError: a sampled token of these rows has no finite log-prob, or no finite hidden state.
    """
    temperature = batch.temperature if teacher.temperature is None else teacher.temperature
    rows = batch[row_field(each.role)].nonzero()[:, 0]
    if not len(rows):
        if each.output == "log_probs":
            return batch.with_tokens(**{each.field: torch.full((batch.num_tokens,), float("nan"))})
        rows = rows.new_zeros(1)  # For the size of its hidden states, which then have no weight.
    given = models.forward(each.role, batch.select(rows).with_meta(temperature=temperature), each.output)
    fill = float("nan") if given.dim() == 1 else 0.0
    found = given.new_full((batch.num_tokens, *given.shape[1:]), fill)
    found[batch.token_index(rows)] = given
    _check_complete(batch, each.role, found)
    if each.output == "hidden_states":
        weight = teacher.weight * _taught_tokens(batch, each.role).float()
        batch = batch.with_tokens(teacher_weight=weight)
        batch = batch.with_meta(teacher_temperature=temperature, divergence_beta=_share_of_teacher(settings))
    return batch.with_tokens(**{each.field: found})


def _share_of_teacher(settings: DistillationConfig) -> float:
    """Share of the teacher in the mean of the divergence (`rlsdk.kit.model.divergence`)."""
    return {"reverse": 1.0, "forward": 0.0, "jsd": settings.beta}[settings.divergence]


def _check_complete(batch: Batch, role: str, found: torch.Tensor) -> None:
    """Raises `BatchError` where a token that a teacher should teach has no finite numbers `[N, ...]` from it."""
    lacking = _taught_tokens(batch, role) & ~found.reshape(batch.num_tokens, -1).isfinite().all(1)
    if lacking.any():
        token = int(lacking.nonzero()[0])
        row = int(batch.row_of_token[token])
        raise BatchError(
            f"{role}: {int(lacking.sum())} of {int(_taught_tokens(batch, role).sum())} tokens that it should teach "
            f"have no finite number from it; the first is token {int(batch['input_ids'][token])} at position "
            f"{int(batch.position_ids[token])} of row_id {int(batch['row_id'][row])} (uid {int(batch['uid'][row])}). "
            "Its dtype may be too narrow (`dtype: float32` of this teacher)"
        )


def learn_from_teachers(
    batch: Batch, teachers: Mapping[str, TeacherConfig], settings: DistillationConfig
) -> tuple[Batch, dict[str, float]]:
    """Adds the teachers' part to `advantages`, where they teach by sampled tokens. Returns metrics: the sampled tokens
    that have a teacher, and the mean gap of each teacher in nats.

    Args:
        batch: with `advantages`, and `old_log_probs` and each teacher's log-probs; or with a teacher's hidden states.
        teachers: by role.
        settings: of distillation.
    """
    taught = torch.stack([_taught_tokens(batch, role) for role in teachers]).any(0)
    metrics = {"teacher/tokens": float(taught.sum()), "teacher/share": _share(taught, batch["response_mask"])}
    if settings.objective == "exact":
        return batch.with_tokens(advantages=settings.reward_coef * batch["advantages"]), metrics
    policy = batch["old_log_probs"]
    found = {
        role: TeacherLogProbs(
            log_probs=batch[kind_of(role).field_of(role)],
            taught=_taught_tokens(batch, role),
            weight=teacher.weight,
        )
        for role, teacher in teachers.items()
    }
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

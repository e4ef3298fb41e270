"""Teachers in a step: their log-probs of the rows that they teach, and the advantages that these give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from rlsdk.algorithms.distillation import TeacherLogProbs, add_teacher_advantages, gap
from rlsdk.config import DistillationConfig, ForwardPass, TeacherConfig
from rlsdk.config.sections.role_kinds import TEACHER, kind_of
from rlsdk.interfaces import Batch, BatchError
from rlsdk.trainer.inputs.teachers import row_field
from rlsdk.trainer.inputs.text_alignment import BOUNDARIES

MORE_THAN_ONE = 1e-3
"""By how much rounding may raise a sum of probabilities above 1."""


class Computes(Protocol):
    """What computes the outputs of teachers: see `rlsdk.interfaces.Models`."""

    def forward(self, role: str, batch: Batch, output: str) -> torch.Tensor: ...

    def outputs(self, role: str, batch: Batch, names: Sequence[str]) -> Mapping[str, torch.Tensor]: ...


def with_teacher(
    batch: Batch,
    models: Computes,
    each: ForwardPass,
    teacher: TeacherConfig,
    settings: DistillationConfig,
    number: int = 0,
) -> Batch:
    """Adds what a teacher computes of the rows that it teaches: its log-probs `[N]`, NaN on all other rows; or its
    hidden states `[N, H]`, or its most probable tokens `[N, k]`, 0 on rows without a teacher, with the settings of the
    divergence.

    Args:
        batch: with the row field of `with_taught`.
        models: of the run.
        each: the teacher's pass.
        teacher: its configuration.
        settings: of distillation.
        number: of the teacher in the configuration.

    Raises:
        BatchError: a sampled token of these rows has no finite log-prob, or no finite hidden state.
    """
    temperature = batch.temperature if teacher.temperature is None else teacher.temperature
    rows = batch[row_field(each.role)].nonzero()[:, 0]
    if not len(rows):
        if each.output == "log_probs":
            return batch.with_tokens(**{each.field: torch.full((batch.num_tokens,), float("nan"))})
        rows = rows.new_zeros(1)  # For the size of what it gives, which then has no weight.
    asked = batch.select(rows).with_meta(temperature=temperature, top_k=settings.top_k)
    if each.output == "top_log_probs":
        given = models.outputs(each.role, asked, ("top_ids", "top_log_probs", "log_probs"))
        fields = {f"teacher_{name}": given[name] for name in ("top_ids", "top_log_probs")}
        fields[kind_of(each.role).field_of(each.role)] = given["log_probs"]
        _check_sums(each.role, given["top_log_probs"])
    elif teacher.align == "text":
        given = models.outputs(each.role, asked, ("log_probs",))
        fields = {each.field: given["log_probs"]}
        batch = _with_alignment(batch, rows, each.role, given)
    else:
        fields = {each.field: models.forward(each.role, asked, each.output)}
    for field, values in fields.items():
        batch = _placed(batch, rows, each.role, field, values)
    if each.output == "log_probs":
        return batch
    weight = teacher.weight * _taught_tokens(batch, each.role).float()
    numbers = batch.tokens.get("teacher_index", torch.full((batch.num_tokens,), -1))
    mine = batch[row_field(each.role)][batch.row_of_token]
    batch = batch.with_tokens(
        teacher_weight=batch.tokens.get("teacher_weight", 0.0) + weight,
        teacher_index=torch.where(mine, number, numbers),
    )
    name = f"teacher_temperature.{number}" if number else "teacher_temperature"
    return batch.with_meta(**{name: temperature, "divergence_beta": _share_of_teacher(settings)})


def _placed(batch: Batch, rows: torch.Tensor, role: str, field: str, values: torch.Tensor) -> Batch:
    """Adds what a teacher gives of rows; other rows keep what another teacher gave, or get NaN for single numbers, and
    0 for several."""
    before = batch.tokens.get(field)
    fill = float("nan") if values.dim() == 1 else 0
    if before is not None and values.dim() > 1 and values.shape[1] != before.shape[1]:
        width = max(values.shape[1], before.shape[1])  # of the hidden states of the widest teacher
        before, values = (torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in (before, values))
    found = values.new_full((batch.num_tokens, *values.shape[1:]), fill) if before is None else before.clone()
    at = batch.token_index(rows)
    mine = _taught_tokens(batch, role)[at]
    found[at] = values if values.dim() == 1 else torch.where(mine[:, None], values, found[at])
    _check_complete(batch, role, found)
    return batch.with_tokens(**{field: found})


def _with_alignment(batch: Batch, rows: torch.Tensor, role: str, given: Mapping[str, torch.Tensor]) -> Batch:
    """Adds which tokens a teacher with a tokenizer of its own could read, and which of them end where one of its does.

    Raises:
        BatchError: it could read none.
    """
    read, ends = (torch.zeros(batch.num_tokens, dtype=torch.bool) for _ in range(2))
    at = batch.token_index(rows)
    read[at], ends[at] = given["log_probs"].isfinite(), given[BOUNDARIES]
    taught = _taught_tokens(batch, role)
    if taught.any() and not (read & taught).any():
        raise BatchError(
            f"{role}: none of the {int(taught.sum())} tokens that it should teach is text that its tokenizer reads as "
            "it is written: it changes every text (`align: text` needs one that does not)"
        )
    return batch.with_tokens(**{_read_field(role): read, _ends_field(role): ends})


def _read_field(role: str) -> str:
    return f"read_by.{role}"


def _ends_field(role: str) -> str:
    return f"ends_of.{role}"


def _check_sums(role: str, top: torch.Tensor) -> None:
    """Raises `BatchError` where the probabilities of a token's top tokens add up to more than 1: what is 0 off the mask
    is not counted."""
    sums = top.double().exp().sum(-1)[(top != 0).any(-1)]
    if len(sums) and float(sums.max()) > 1.0 + MORE_THAN_ONE:
        raise BatchError(
            f"{role}: the probabilities of its top tokens add up to {float(sums.max()):.4f} at a token, which "
            "is no distribution: its log-probs are those of a part of it, or not at temperature 1"
        )


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


def with_sampled(batch: Batch, teachers: Mapping[str, TeacherConfig]) -> Batch:
    """Adds what `DistillObjective.sampled` reads: the log-prob of each taught token by the teacher of its row, and its
    weight.

    Args:
        batch: with each teacher's log-probs (`with_teacher`).
        teachers: by role; a row has at most one.
    """
    found, weight = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    for role, teacher in teachers.items():
        mine = _taught_tokens(batch, role)
        found = torch.where(mine, batch[kind_of(role).field_of(role)], found)
        weight += teacher.weight * mine
    return batch.with_tokens(teacher_log_probs=found, teacher_weight=weight)


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
    learned = batch.with_tokens(advantages=settings.reward_coef * batch["advantages"])
    if settings.objective == "exact":
        for role in teachers:
            if role != TEACHER:
                metrics[f"{role.replace('.', '/')}/tokens"] = float(_taught_tokens(batch, role).sum())
        return learned, metrics
    policy = batch["rollout_log_probs"] if "old_log_probs" not in batch else batch["old_log_probs"]
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
        if (ends := batch.tokens.get(_ends_field(role))) is not None:
            metrics[f"{role.replace('.', '/')}/aligned"] = _share(ends & one.taught, one.taught)
        if count:
            mean = float(gap(policy, one).double().sum() / count)
            metrics[f"{role.replace('.', '/')}/gap"] = mean
    if settings.objective == "sampled":
        learned = add_teacher_advantages(
            batch, policy, list(found.values()), coef=settings.coef, reward_coef=settings.reward_coef
        )
    return learned, metrics


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part.sum()) / max(float(whole.sum()), 1.0)


def _taught_tokens(batch: Batch, role: str) -> torch.Tensor:
    """`[N]` bool: sampled tokens of the rows that a teacher teaches, as far as it can read them."""
    taught = batch["response_mask"] & batch[row_field(role)][batch.row_of_token]
    read = batch.tokens.get(_read_field(role))
    return taught if read is None else taught & read

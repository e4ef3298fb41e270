"""The stage of distillation on given answers: supervised training whose targets are a teacher's distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlsdk.algorithms import DistillObjective
from rlsdk.config import DistillationConfig, ForwardPass
from rlsdk.data import Prompt
from rlsdk.interfaces import Batch
from rlsdk.trainer.inputs.given_log_probs import GivenLogProbs
from rlsdk.trainer.inputs.teachers import Taught, row_field
from rlsdk.trainer.learner.teaching import with_sampled, with_teacher
from rlsdk.trainer.stages.sft import SftStage

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.trainer.roles.hosts import MiniBatchResult
    from rlsdk.trainer.roles.session import Session


@dataclass(frozen=True)
class TrainedTeachers:
    """Teachers in train engines, and files, as `with_teacher` calls them."""

    session: Session
    timeout_s: float | None
    given: Mapping[str, GivenLogProbs]
    """By role, the teachers that are files."""

    def forward(self, role: str, batch: Batch, output: str) -> Tensor:
        """One output of a teacher."""
        return self.outputs(role, batch, (output,))[output]

    def outputs(self, role: str, batch: Batch, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Several outputs of a teacher."""
        if (given := self.given.get(role)) is not None:
            return given.outputs(batch, names)
        group, method = self.session.computing(role)
        needed = self.session.put(batch.keep(("input_ids", "response_mask", "uid")))
        with self.session.turns.using(group.name):
            answer: Batch = group.run(method, needed, {name: name for name in names}, timeout_s=self.timeout_s)
        return {name: answer[name] for name in names}


class DistillStage(SftStage):
    """Each step takes conversations, computes what their teachers give of them, and makes one optimizer step of the
    actor."""

    def __init__(
        self,
        *args: Any,
        taught: Sequence[Taught],
        passes: Sequence[ForwardPass],
        distillation: DistillationConfig,
        **kwargs: Any,
    ) -> None:
        """As `SftStage`.

        Args:
            args, kwargs: of `SftStage`.
            taught: what each teacher teaches of the prompts.
            passes: of the teachers, in the same order.
            distillation: settings of the divergence.
        """
        super().__init__(*args, **kwargs)
        self.taught = taught
        self.passes = passes
        self.distillation = distillation
        self.objective = DistillObjective(
            coef=distillation.coef, sft_coef=distillation.sft_coef, sampled=distillation.objective == "sampled"
        )
        given = {one.role: one.given for one in taught if one.given is not None}
        self._teachers = TrainedTeachers(self.session, self.update_timeout_s, given)

    def begin(self) -> None:
        if self.distillation.objective == "exact":
            for number, one in enumerate(self.taught):
                spec = self.session[one.role].role.model
                self.session.actor.run("load_teacher", spec, number, timeout_s=self.update_timeout_s)
        super().begin()

    def _prepared(self, batch: Batch, drawn: Sequence[Prompt]) -> Batch:
        owners = [prompt for prompt in drawn for _ in self.rows[prompt.index]]
        batch = batch.with_rows(uid=torch.tensor([prompt.index for prompt in owners]))
        for number, (one, each) in enumerate(zip(self.taught, self.passes, strict=True)):
            is_taught = torch.tensor([one.teaches_row(prompt.index, prompt.row) for prompt in owners])
            batch = batch.with_rows(**{row_field(one.role): is_taught})
            batch = with_teacher(batch, self._teachers, each, one.teacher, self.distillation, number)
        if self.distillation.objective == "sampled":
            batch = with_sampled(batch, {one.role: one.teacher for one in self.taught})
        return batch

    def _figures(self, result: MiniBatchResult) -> Mapping[str, float]:
        sums = result.update.sums
        taught = float(sums["teacher_weight"])
        return {
            "distill/divergence": float(sums["divergence"]) / taught if taught else 0.0,
            "distill/nll": float(sums["nll"]) / float(sums["metric_weight"]),
            "distill/teacher_share": taught,
        }

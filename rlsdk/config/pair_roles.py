"""The roles of training from pairs: a model of scores, or a policy with the reference that it starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

from rlsdk.config.problem import Problem
from rlsdk.config.role_names import ACTOR, REF
from rlsdk.config.roles import Role, optim_spec
from rlsdk.config.schema import RunConfig
from rlsdk.interfaces import Head, OptimSpec


class PairTraining(StrEnum):
    """What is trained from pairs. The value is the command's name."""

    REWARD_MODEL = "reward-model"
    DPO = "dpo"

    @property
    def label(self) -> str:
        """Prefix of its metrics and of its folder of checkpoints."""
        return self.value.replace("-", "_")

    @property
    def checkpoints(self) -> str:
        """Folder of a run."""
        return f"{self.label}_checkpoints"

    @property
    def role_names(self) -> tuple[str, ...]:
        """Of the table, in the order in which devices are dealt out."""
        return (ACTOR, REF) if self is PairTraining.DPO else (ACTOR,)


def pair_roles(config: RunConfig, kind: PairTraining, table: Sequence[Role]) -> tuple[Role, ...]:
    """The lines of `kind.role_names` with what this training asks of them: the actor's optimizer, and a reward model's
    head."""
    optim = preference_optim_spec(config)
    return tuple(_trained(role, kind, optim) if role.name == ACTOR else role for role in table)


def _trained(role: Role, kind: PairTraining, optim: OptimSpec) -> Role:
    role = role.with_optim(optim)
    if kind is PairTraining.DPO:
        return role
    return replace(role, spec=replace(role.spec, model=replace(role.model, head=Head.SCORE)))


def preference_optim_spec(config: RunConfig) -> OptimSpec:
    """Of training from pairs: the run's optimizer with its own learning rate and schedule."""
    own = config.preferences
    update = {"lr": own.lr, "warmup_steps": own.warmup_steps, "schedule": own.schedule}
    return optim_spec(config.train.optim.model_copy(update=update), own.steps)


def pair_problems(config: RunConfig, kind: PairTraining) -> Iterator[Problem]:
    """Settings that this command does not read: silence would be taken for obedience."""
    own, defaults = config.preferences, type(config.preferences)()
    of_reward_model = ("margin_field", "center_coef")
    of_dpo = ("loss", "beta", "label_smoothing", "sft_coef")
    for field in of_reward_model if kind is PairTraining.DPO else of_dpo:
        value = getattr(own, field)
        if value != getattr(defaults, field):
            yield Problem(f"preferences.{field}", f"{value!r} has no effect on `rlsdk {kind.value}`; leave it out")

"""The roles of training from preferences: a model of rewards, or a policy and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from rlsdk.config.derived.roles import Role
from rlsdk.config.derived.specs import optim_spec, with_own_rate
from rlsdk.config.sections.role_kinds import ACTOR, REF
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import Head, OptimSpec


class PairTraining(StrEnum):
    """What is trained from preferences; the value is the name of the command."""

    REWARD_MODEL = "reward-model"
    DPO = "dpo"
    KTO = "kto"
    PROCESS_REWARD = "process-reward"

    @property
    def label(self) -> str:
        """Prefix of its metrics and of its folder of checkpoints."""
        return self.value.replace("-", "_")

    @property
    def checkpoints(self) -> str:
        """Folder of a run."""
        return f"{self.label}_checkpoints"

    @property
    def reads_pairs(self) -> bool:
        """Whether a row holds two answers; otherwise it holds one, and its label or those of its steps."""
        return self in (PairTraining.REWARD_MODEL, PairTraining.DPO)

    @property
    def head(self) -> Head:
        """Of the model that is trained."""
        heads = {PairTraining.REWARD_MODEL: Head.SCORE, PairTraining.PROCESS_REWARD: Head.VALUE}
        return heads.get(self, Head.LM)

    def role_names(self, config: RunConfig) -> tuple[str, ...]:
        """Its roles, in the order in which they get devices."""
        compares = self is PairTraining.KTO or (self is PairTraining.DPO and config.preferences.has_reference)
        return (ACTOR, REF) if compares else (ACTOR,)


def pair_roles(config: RunConfig, kind: PairTraining, table: Sequence[Role]) -> tuple[Role, ...]:
    """The rows of `kind.role_names(config)` for this training: with the actor's optimizer and head."""
    optim = preference_optim_spec(config)
    return tuple(_trained(role, kind, optim) if role.name == ACTOR else role for role in table)


def _trained(role: Role, kind: PairTraining, optim: OptimSpec) -> Role:
    role = role.with_optim(optim)
    return replace(role, spec=replace(role.spec, model=replace(role.model, head=kind.head)))


def preference_optim_spec(config: RunConfig) -> OptimSpec:
    """Optimizer specification for training from pairs: that of the run with its own learning rate and schedule."""
    own = config.preferences
    return optim_spec(with_own_rate(config.train.optim, own), own.steps)

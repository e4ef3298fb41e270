"""The kinds of training: the command of each, what it reads, its roles and its folder of checkpoints."""

from __future__ import annotations

from enum import StrEnum

from rlsdk.config.checks.commands import READERS
from rlsdk.config.derived.pair_roles import PairTraining, pair_roles
from rlsdk.config.derived.roles import Role, roles, sft_optim_spec
from rlsdk.config.loading.reads import Reader
from rlsdk.config.sections.role_kinds import ACTOR
from rlsdk.config.sections.schema import RunConfig


class Training(StrEnum):
    """Kind of training; the value is the name of the command."""

    RL = "train"
    SFT = "sft"
    REWARD_MODEL = "reward-model"
    DPO = "dpo"

    @property
    def pairs(self) -> PairTraining | None:
        """The kind of training from pairs; None otherwise."""
        return PairTraining(self.value) if self in (Training.REWARD_MODEL, Training.DPO) else None

    @property
    def reader(self) -> Reader:
        """What the command reads of a configuration."""
        return READERS[self.value]

    @property
    def checkpoints(self) -> str:
        """Folder of a run with its checkpoints."""
        if self.pairs is not None:
            return self.pairs.checkpoints
        return "checkpoints" if self is Training.RL else "sft_checkpoints"


def table_of(training: Training, config: RunConfig) -> tuple[Role, ...]:
    """The roles of a run, not placed yet, with the optimizers of this training."""
    if (kind := training.pairs) is not None:
        return pair_roles(config, kind, roles(config, needed=kind.role_names))
    if training is Training.SFT:
        return tuple(role.with_optim(sft_optim_spec(config)) for role in roles(config, needed=[ACTOR]))
    return roles(config)

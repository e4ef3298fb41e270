"""The kinds of training: the command of each, what it reads, its roles and its folder of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from rlsdk.config.checks.commands import READERS
from rlsdk.config.derived.pair_roles import PairTraining, pair_roles
from rlsdk.config.derived.roles import Role, roles
from rlsdk.config.derived.specs import sft_optim_spec
from rlsdk.config.loading.reads import Reader
from rlsdk.config.problem import Problem
from rlsdk.config.sections.role_kinds import ACTOR, teacher_role
from rlsdk.config.sections.schema import RunConfig
from rlsdk.config.sections.supervised import SftConfig
from rlsdk.interfaces.spelling import Setting


class Training(StrEnum):
    """Kind of training; the value is the name of the command."""

    RL = "train"
    SFT = "sft"
    DISTILL = "distill"
    REWARD_MODEL = "reward-model"
    DPO = "dpo"
    KTO = "kto"
    PROCESS_REWARD = "process-reward"

    @property
    def pairs(self) -> PairTraining | None:
        """The kind of training from preferences; None otherwise."""
        return None if self in (Training.RL, Training.SFT, Training.DISTILL) else PairTraining(self.value)

    @property
    def reads_pairs(self) -> bool:
        """Whether its rows are pairs of answers."""
        return self.pairs is not None and self.pairs.reads_pairs

    @property
    def reads_steps(self) -> bool:
        """Whether its rows are solutions in steps."""
        return self is Training.PROCESS_REWARD

    @property
    def reader(self) -> Reader:
        """What the command reads of a configuration."""
        return READERS[self.value]

    @property
    def checkpoints(self) -> str:
        """Folder of a run with its checkpoints."""
        if self.pairs is not None:
            return self.pairs.checkpoints
        return "checkpoints" if self is Training.RL else f"{self.value}_checkpoints"


def table_of(training: Training, config: RunConfig) -> tuple[Role, ...]:
    """The roles of a run, not placed yet, with the optimizers of this training."""
    if (kind := training.pairs) is not None:
        return pair_roles(config, kind, roles(config, needed=kind.role_names(config)))
    if training is Training.DISTILL:
        names = [ACTOR, *(teacher_role(one.name) for one in config.teachers if one.has_engine)]
        optim = sft_optim_spec(config)
        return tuple(role.with_optim(optim) if role.name == ACTOR else role for role in roles(config, needed=names))
    if training is Training.SFT:
        return tuple(role.with_optim(sft_optim_spec(config)) for role in roles(config, needed=[ACTOR]))
    return roles(config)


def training_problems(training: Training, config: RunConfig) -> Iterator[Problem]:
    """Values with which this training, and no other, cannot run."""
    own = config.preferences
    if training is Training.DISTILL:
        yield from _distill_problems(config)
    for at, teacher in enumerate(config.teachers if training is Training.RL else ()):
        if teacher.log_probs is not None:
            yield Problem(f"teachers.{at}.log_probs", "a file has log-probs of given answers only: see `rlsdk distill`")
    if training in (Training.SFT, Training.DISTILL) and not config.sft.is_asked:
        yield Problem(
            "sft.steps", f"0: trains nothing; give {Setting('sft.steps', 'N')} or {Setting('sft.epochs', 'N')}"
        )
    if training is Training.KTO and own.pairs_per_step < 2:
        yield Problem(
            "preferences.pairs_per_step",
            value=own.pairs_per_step,
            expected="at least 2 answers: the KL is estimated from each prompt with the answer to another one",
        )
    if training is Training.KTO and not own.desirable_weight + own.undesirable_weight:
        yield Problem("preferences.desirable_weight", "0, as undesirable_weight: trains nothing")


def _distill_problems(config: RunConfig) -> Iterator[Problem]:
    """Values with which `rlsdk distill` cannot run."""
    own, path = config.algorithm.distillation, "algorithm.distillation.objective"
    if not config.teachers:
        yield Problem("teachers", f"at least one is required: {Setting('teachers', 'MODEL')}")
    files = [at for at, teacher in enumerate(config.teachers) if teacher.log_probs is not None]
    if own.objective == "sampled" and len(files) < len(config.teachers):
        yield Problem(
            path,
            value="sampled",
            expected="'exact' or 'top_k': given answers are not samples of the policy or of a teacher, of which a gap "
            "is an estimate; those of a file of log-probs are",
            commands=(Setting(path, "exact"),),
        )
    if own.objective == "exact" and files:
        yield Problem(
            path,
            value="exact",
            expected=f"'top_k' or 'sampled', because teachers.{files[0]} is a file of log-probs, without hidden states",
            commands=(Setting(path, "top_k"), Setting(path, "sampled")),
        )
    if files and config.sft.answer_template != SftConfig.model_fields["answer_template"].default:
        yield Problem("sft.answer_template", f"the tokens of teachers.{files[0]}.log_probs are learned as they are")
    if not own.coef or (config.teachers and not any(teacher.weight for teacher in config.teachers)):
        yield Problem("algorithm.distillation.coef", "0, or every teacher's weight: teaches nothing; see `rlsdk sft`")
    for at, teacher in enumerate(config.teachers):
        if teacher.is_served or teacher.is_policy or teacher.prompt_template is not None or teacher.align == "text":
            yield Problem(
                f"teachers.{at}",
                "of `rlsdk distill` is a model in a train engine that reads what the policy reads, or a file of "
                "log-probs: leave out rollout, url, prompt_template and align, and give its path, or log_probs",
            )

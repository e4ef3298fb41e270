"""Sections on the models beside the actor: the reference, the critic, reward models. What they leave null is as `train`
and `model` say."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.base import Options, Section
from rlsdk.config.engines import DtypeName, OptimConfig
from rlsdk.config.problem import Problem

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class ModelRoleConfig(Section):
    """What every model beside the actor has."""

    path: str | None = None
    """Folder in Hugging Face form, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub name; null: its main branch, or `model.revision` where the path is the model's."""
    dtype: DtypeName | None = None
    """Of parameters as computed with; null: as `model.dtype`."""
    backend: str | None = None
    """Registered train backend; null: as `train.backend`."""
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens in one pass on one device; null, with `micro_batch_rows` null: both as in `train`."""
    micro_batch_rows: PositiveInt | None = None
    """Most rows in one pass on one device."""
    options: Options | None = None
    """The backend's own options; null: those of `train`, where the backend is the same."""
    engine_kwargs: Options | None = None
    """Passed to the engine's own constructor untouched; null: those of `train`, where the backend is the same."""

    def problems(self) -> Iterator[Problem]:
        if self.micro_batch_tokens is not None and self.micro_batch_rows is not None:
            both = f"{self.micro_batch_tokens!r} and micro_batch_rows {self.micro_batch_rows!r}"
            yield Problem("micro_batch_tokens", f"{both}: expected at most one of the two")


class RefConfig(ModelRoleConfig):
    """The reference: a frozen policy that the KL is measured from. Loaded where `algorithm.kl_coef` is above 0."""

    path: str | None = None
    """Folder in Hugging Face form, or a name on the hub; null: the policy that reinforcement learning starts from."""


class CriticOptimConfig(OptimConfig):
    """The critic's AdamW and its schedule."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""


class CriticConfig(ModelRoleConfig):
    """The critic: a model of values that is trained beside the policy. Loaded where `algorithm.advantage` is `gae`."""

    path: str | None = None
    """Folder in Hugging Face form, or a name on the hub, with a value head or without (a new one is drawn with
    `trainer.seed`); null: as `model.path`."""
    optim: CriticOptimConfig = CriticOptimConfig()
    """Optimizer and schedule."""
    activation_checkpointing: bool | None = None
    """Recomputes activations in the backward pass; null: as in `train`."""
    warmup_steps: NonNegativeInt = 0
    """Trainer steps at the start in which only the critic is updated."""


class RewardModelConfig(ModelRoleConfig):
    """One reward model: it reads the tokens of a whole row and gives it a score, which is added to those of `rewards`.
    Its tokenizer must be the policy's."""

    path: str
    """Folder in Hugging Face form, or a name on the hub, with a head of one label (`...ForSequenceClassification`)."""
    name: str | None = None
    """Letters, digits, `-` and `_`: its role is `reward.NAME`, its metrics carry the name. Null, for a single one: the
    role is `reward`."""
    weight: float = 1.0
    """Factor of its score in a sample's score."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.name is not None and not _NAME.fullmatch(self.name):
            yield Problem("name", f"{self.name!r}: expected letters, digits, '-' and '_', such as 'helpful'")


def reward_model_problems(models: tuple[RewardModelConfig, ...]) -> Iterator[Problem]:
    """Names that would give two reward models one role."""
    seen: dict[str, int] = {}
    for at, model in enumerate(models):
        if model.name is None and len(models) > 1:
            yield Problem(f"reward_models.{at}.name", f"is required where there are {len(models)} reward models")
        if model.name is not None and seen.setdefault(model.name, at) != at:
            first = f"reward_models.{seen[model.name]}"
            yield Problem(f"reward_models.{at}.name", f"{model.name!r}: expected another, because {first} has it")


def critic_warmup_problems(critic: CriticConfig, steps: int, updates: int) -> Iterator[Problem]:
    """A warm-up that leaves nothing to do afterwards."""
    optim = critic.optim
    if critic.warmup_steps >= steps > 0:
        yield Problem(
            "critic.warmup_steps", f"{critic.warmup_steps}: expected fewer than trainer.steps {steps}, because the "
            "actor is not updated in them"
        )  # fmt: skip
    if optim.schedule != "constant" and optim.warmup_steps >= steps * updates > 0:
        yield Problem(
            "critic.optim.warmup_steps",
            f"{optim.warmup_steps}: expected fewer than the run's {steps * updates} optimizer steps, because "
            f"critic.optim.schedule is {optim.schedule!r}; for a short run add `--critic.optim.warmup_steps 0`",
        )

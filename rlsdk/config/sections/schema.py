"""The configuration of a run: one frozen model per section; docstrings give the meaning and unit of every field.

Values are strictly typed (no string is accepted as a number). Checks between fields of one section are in that section,
those between sections in `RunConfig`; `rlsdk.config.check_run` checks what depends on installed backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from rlsdk.config.problem import Problem
from rlsdk.config.sections.agents import GatewayConfig
from rlsdk.config.sections.algorithm import POLICY_GRADIENT, AlgorithmConfig
from rlsdk.config.sections.base import Options, Section, empty_mapping, empty_tuple, unused_revision
from rlsdk.config.sections.data import DataConfig
from rlsdk.config.sections.engines import ModelConfig, PlacementConfig, RolloutConfig, ShardingConfig, TrainConfig
from rlsdk.config.sections.environments import environment_problems
from rlsdk.config.sections.evaluation import CheckpointConfig, EvalConfig
from rlsdk.config.sections.faults import FaultsConfig
from rlsdk.config.sections.preferences import PreferencesConfig
from rlsdk.config.sections.rewards import (
    RewardConfig,
    RewardLimitsConfig,
    judge_pool_problems,
    reward_problems,
)
from rlsdk.config.sections.role_kinds import CRITIC
from rlsdk.config.sections.role_sections import (
    CriticConfig,
    RefConfig,
    RewardModelConfig,
    TeacherConfig,
    critic_warmup_problems,
    dynamic_sampling_problems,
    name_problems,
    teacher_problems,
)
from rlsdk.config.sections.schedule import ScheduleConfig, schedule_problems
from rlsdk.config.sections.supervised import SftConfig
from rlsdk.config.sections.training_loop import TrainerConfig
from rlsdk.interfaces import ENVIRONMENT_REWARD
from rlsdk.interfaces.settings import NO_INFLUENCE
from rlsdk.interfaces.spelling import Setting

NEEDS_GROUP = frozenset({"grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"})
"""Built-in estimators that compare the samples of one prompt, and need at least two."""
NEEDS_VALUES = frozenset({"gae"})
"""Built-in estimators that read the values of a critic."""


class DeadlinesConfig(Section):
    """Deadlines in seconds: a wait fails after this time without an answer and without progress. Each phase has its
    own."""

    start_s: PositiveFloat = 600.0
    """Starting workers and building an engine; while weights are read, the time from one tensor to the next."""
    rollout_s: PositiveFloat = 600.0
    """Time without any token from a replica that has samples to generate, not the time of the whole generation."""
    update_s: PositiveFloat = 1800.0
    """One micro-batch of a forward pass or an optimizer step, not the whole pass or step."""
    sync_s: PositiveFloat = 600.0
    """Each stage of a weight sync, each offload, and each wake."""
    save_s: PositiveFloat = 1800.0
    """Writing or reading one role's part of a checkpoint, or one tensor of an exported model."""
    collective_s: PositiveFloat = 600.0
    """Each collective between the ranks of an engine."""


class TrackingConfig(Section):
    """Where metrics are logged."""

    trackers: tuple[str, ...] = Field(default=("jsonl", "tensorboard"), strict=False)
    """Registered trackers."""
    options: dict[str, Options] = empty_mapping()
    """Parameters by tracker name."""
    samples_per_step: NonNegativeInt = 4
    """Samples whose text is logged each step: the best and worst samples of some prompts."""
    tokens_per_sample: NonNegativeInt = 512
    """Number of first tokens of a logged sample that are logged individually with their log-probs; 0: only text."""

    def problems(self) -> Iterator[Problem]:
        for name in self.options:
            if name not in self.trackers:
                yield Problem(f"options.{name}", f"{name!r} is not one of tracking.trackers {list(self.trackers)}")

    def unused(self) -> Iterator[Problem]:
        if not self.samples_per_step:
            yield Problem("tokens_per_sample", "tracking.samples_per_step is 0")


class RunConfig(Section):
    """The whole configuration of a run."""

    model: ModelConfig = ModelConfig()
    """Which model is trained."""
    data: DataConfig = DataConfig()
    """Where prompts come from."""
    rewards: tuple[RewardConfig, ...] = empty_tuple()
    """Terms of the reward; a sample's score is the weighted sum of those that apply to it."""
    reward_limits: RewardLimitsConfig = RewardLimitsConfig()
    """Resource limits of rewards, and what happens to samples whose grading failed."""
    reward_models: tuple[RewardModelConfig, ...] = empty_tuple()
    """Reward models: their scores are terms of the reward, in addition to `rewards`."""
    teachers: tuple[TeacherConfig, ...] = empty_tuple()
    """Teachers: frozen models from which the policy learns on its own samples, with or without rewards."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become a gradient."""
    train: TrainConfig = TrainConfig()
    """The train engine of the actor, and the defaults for the other models' sections."""
    ref: RefConfig = RefConfig()
    """The frozen reference policy of the KL."""
    critic: CriticConfig = CriticConfig()
    """The value model, trained with the policy."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout engine, and sampling settings for training."""
    gateway: GatewayConfig = GatewayConfig()
    """The endpoint that agents talk to."""
    eval: Annotated[EvalConfig, NO_INFLUENCE] = EvalConfig()
    """Evaluation on rows that are never trained on."""
    checkpoint: Annotated[CheckpointConfig, NO_INFLUENCE] = CheckpointConfig()
    """How checkpoints are written, and which are kept besides the newest."""
    placement: PlacementConfig = PlacementConfig()
    """Which role runs where."""
    trainer: TrainerConfig = TrainerConfig()
    """The training loop."""
    schedule: ScheduleConfig = ScheduleConfig()
    """When samples are generated, and with which weights."""
    deadlines: Annotated[DeadlinesConfig, NO_INFLUENCE] = DeadlinesConfig()
    """Deadlines in seconds, after which a wait fails."""
    faults: Annotated[FaultsConfig, NO_INFLUENCE] = FaultsConfig()
    """Automatic restarts after a process is lost."""
    sft: Annotated[SftConfig, NO_INFLUENCE] = SftConfig()
    """Supervised training on the reference answers."""
    preferences: Annotated[PreferencesConfig, NO_INFLUENCE] = PreferencesConfig()
    """Training from pairs of answers: a reward model, or DPO."""
    sharding: ShardingConfig = ShardingConfig()
    """Weight transfer from the train to the rollout engine."""
    tracking: Annotated[TrackingConfig, NO_INFLUENCE] = TrackingConfig()
    """Where metrics are logged."""

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus response, or whole episode, in tokens."""
        return self.rollout.max_model_tokens or self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def adapts_concurrency(self) -> bool:
        """Whether the number of concurrent samples per replica is adapted to measured throughput
        (`rollout.concurrency`)."""
        depends_on_time = self.schedule.on_new_weights != "drain"
        return self.rollout.concurrency == "adapt" or (self.rollout.concurrency == "auto" and depends_on_time)

    @property
    def rewards_are_whole(self) -> bool:
        """Whether `rewards` are all that scores a sample and all that it is learned from: a sample to which none
        applies has failed."""
        return not self.reward_models and not self.teachers

    @property
    def learns_exactly(self) -> bool:
        """Whether a teacher teaches by the divergence over the whole vocabulary."""
        return bool(self.teachers) and self.algorithm.distillation.objective == "exact"

    @property
    def learns_by_divergence(self) -> bool:
        """Whether teachers teach by a divergence in the loss, over the whole vocabulary or over the top tokens."""
        return bool(self.teachers) and self.algorithm.distillation.objective != "sampled"

    @property
    def learning_rate_decays(self) -> bool:
        """Whether the learning rate of a step, and so its weights, depends on the number of steps of the run."""
        optims = (self.train.optim, self.critic.optim)
        return any(optim.schedule != "constant" or optim.warmup_ratio for optim in optims)

    @property
    def needs_values(self) -> bool:
        """Whether the advantage estimator or the algorithm needs a critic's values."""
        own = self.algorithm
        return CRITIC in own.roles or (own.name == POLICY_GRADIENT and own.advantage in NEEDS_VALUES)

    def unused(self) -> Iterator[Problem]:
        if not self.rollout.has_agent:
            yield Problem("gateway", "rollout.agent is null and rollout.command is empty")
        for name, own in {"ref": self.ref, "critic": self.critic}.items():
            if own.path is None:
                yield from (replace(found, path=f"{name}.{found.path}") for found in unused_revision(self.model.path))

    def problems(self) -> Iterator[Problem]:
        yield from self._length_problems()
        yield from self._group_problems()
        yield from self._schedule_problems()
        if self.model.lora.rank and self.train.ema_decay is not None:
            yield Problem(
                "train.ema_decay", value=self.train.ema_decay, expected="null: an adapter (model.lora) has no average"
            )
        yield from schedule_problems(self.schedule, self.placement, self.algorithm)
        yield from reward_problems(self.rewards)
        if self.rollout.brings_score:
            yield from environment_problems(self.rewards, self.data, self.eval.measures())
        yield from judge_pool_problems(self.rewards, self.placement, self.schedule.max_staleness)
        yield from name_problems("reward_models", self.reward_models)
        sources = [part.source for part in self.data.mixture]
        yield from teacher_problems(
            self.teachers,
            sources,
            self.algorithm.distillation,
            self.rollout.temperature,
            keeps_start=self.model.lora.rank > 0 and self.ref.path is None,
        )
        yield from self._evaluation_problems()
        if self.needs_values:
            trainer = self.trainer
            yield from critic_warmup_problems(
                self.critic, trainer.steps, trainer.updates_per_step * trainer.epochs_per_step
            )

    @property
    def reward_titles(self) -> list[str]:
        """Names of all that gives a sample its score, but for reward models: rewards, then the environment."""
        own = [ENVIRONMENT_REWARD] if self.rollout.brings_score else []
        return [*(reward.title for reward in self.rewards), *own]

    def _length_problems(self) -> Iterator[Problem]:
        needed = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if self.max_model_tokens < needed:
            parts = f"{self.data.max_prompt_tokens} + {self.rollout.max_response_tokens} = {needed}"
            fields = "data.max_prompt_tokens + rollout.max_response_tokens"
            yield Problem("rollout.max_model_tokens", f"{self.max_model_tokens} is less than {fields} ({parts})")
        elif not self.rollout.is_single_turn and self.rollout.max_model_tokens is None:
            name = self.rollout.maker
            yield Problem(
                "rollout.max_model_tokens",
                f"null makes room for a prompt and one response ({needed} tokens), but rollout.{name} is "
                f"{getattr(self.rollout, name)!r}: give the most tokens of a whole episode, all turns and tool answers "
                "included, for instance "
                f"`{Setting('rollout.max_model_tokens', needed + 3 * self.rollout.max_response_tokens)}`",
            )

    def _evaluation_problems(self) -> Iterator[Problem]:
        names = self.reward_titles
        for measure in self.eval.measures():
            part, field = measure.config, measure.field
            if part.correct_reward is not None and names and not part.rewards and part.correct_reward not in names:
                yield Problem(
                    f"{field}.correct_reward", value=part.correct_reward, expected=f"one of the rewards {names}"
                )
            prompt, response = part.max_prompt_tokens, part.max_response_tokens
            needed = (prompt or self.data.max_prompt_tokens) + (response or self.rollout.max_response_tokens)
            if self.max_model_tokens < needed and (prompt or response):
                longer = "max_response_tokens" if response else "max_prompt_tokens"
                yield Problem(
                    f"{field}.{longer}",
                    f"prompt and response come to {needed} tokens, more than the {self.max_model_tokens} that the run "
                    "makes room for",
                    value=response or prompt,
                    commands=(Setting("rollout.max_model_tokens", needed),),
                )

    def _group_problems(self) -> Iterator[Problem]:
        compares = self.algorithm.name == POLICY_GRADIENT and self.algorithm.advantage in NEEDS_GROUP
        if compares and self.trainer.samples_per_prompt < 2:
            yield Problem(
                "trainer.samples_per_prompt",
                value=self.trainer.samples_per_prompt,
                expected="at least 2, because algorithm.advantage "
                f"{self.algorithm.advantage!r} compares the samples of a prompt",
            )
        if self.algorithm.name == POLICY_GRADIENT and self.algorithm.dynamic_sampling.enabled:
            yield from dynamic_sampling_problems(self.reward_models, self.trainer.samples_per_prompt)

    def _schedule_problems(self) -> Iterator[Problem]:
        optim, total = self.train.optim, self.trainer.optimizer_steps
        if self.trainer.epochs is not None:
            return  # The number of steps depends on the data; checked again once it is read.
        if optim.warmup_ratio is None and optim.schedule != "constant" and optim.warmup_steps >= total > 0:
            yield Problem(
                "train.optim.warmup_steps",
                value=optim.warmup_steps,
                expected=f"fewer than the run's {total} optimizer steps, because "
                f"train.optim.schedule is {optim.schedule!r}",
                commands=(Setting("train.optim.warmup_steps", 0),),
            )

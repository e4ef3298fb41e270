"""The configuration of a run: one frozen model per section; docstrings give the meaning and unit of every field.

Values are strictly typed (no string is accepted as a number). Checks between fields of one section are in that section,
those between sections in `RunConfig`; `rlsdk.config.check_run` checks what depends on installed backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.agents import GatewayConfig
from rlsdk.config.sections.algorithm import POLICY_GRADIENT, AlgorithmConfig
from rlsdk.config.sections.base import Options, Section, empty_mapping, empty_tuple, steps_of_share, unused_revision
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
from rlsdk.interfaces import ENVIRONMENT_REWARD
from rlsdk.interfaces.settings import NO_INFLUENCE
from rlsdk.interfaces.spelling import Setting

NEEDS_GROUP = frozenset({"grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"})
"""Built-in estimators that compare the samples of one prompt, and need at least two."""
NEEDS_VALUES = frozenset({"gae"})
"""Built-in estimators that read the values of a critic."""


OWN_TEMPLATE_ARGUMENTS = frozenset({"conversation", "messages", "tokenize", "add_generation_prompt", "return_dict"})
"""Arguments of `apply_chat_template` that rlsdk sets itself."""


class MixtureConfig(Section):
    """One source of a mixture."""

    source: str
    """Data source, in the form of `data.train`."""
    weight: PositiveFloat = 1.0
    """Share of the prompts that are drawn from this source, relative to the other weights."""
    options: Options = empty_mapping()
    """Parameters of the source."""
    num_rows: PositiveInt | None = None
    """Number of rows: the first ones, or as many generated ones; null: all."""
    fields: Options = empty_mapping()
    """Fields that are added to every row of this source, `{task: gsm8k}`, for instance for the `rows` of a reward."""


class DataConfig(Section):
    """Where prompts come from."""

    train: str | None = None
    """`SOURCE:REST` of a source in `rlsdk plugins list`, a file (.jsonl, .jsonl.gz, .ndjson, .json, .parquet, .csv,
    .tsv), or a data set's folder or hub name."""
    mixture: tuple[MixtureConfig, ...] = empty_tuple()
    """Several sources in place of `train`; prompts are drawn from them by weight. Each source has its own epochs."""
    eval: str | None = None
    """Source of evaluation rows, in the form of `train`; null: `num_eval_rows` rows are held out of `train`."""
    options: Options = empty_mapping()
    """Parameters of the train source, for instance `split` of a hub data set, or those of a generated task."""
    eval_options: Options = empty_mapping()
    """Parameters of the eval source."""
    prompt_field: str | None = None
    """Field of a row that holds the prompt: a text, or a list of chat messages. If they end in the assistant's
    turn, that one is the answer. null: the first of `question`, `prompt`, `problem`, `instruction`, `input`, `query`,
    `messages` and `conversations` that the first row of a source has; the run says which."""
    answer_field: str | None = None
    """Field of a row that holds the reference answer, a text or one message of the assistant; it may be missing. null:
    the first of `answer`, `solution`, `completion`, `response`, `ground_truth`, `reward_model.ground_truth`, `label`,
    `target` and `output` that the first row has."""
    system_prompt: str | None = None
    """Text of the system message; used with a chat template only."""
    prompt_template: str = "{prompt}"
    """Text of the user message; `{prompt}` and `{any_field_of_the_row}` are filled in."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: uses the tokenizer's chat template if it has one."""
    chat_template_kwargs: Options = empty_mapping()
    """Variables of the chat template, for instance `{enable_thinking: false}` for models with optional thinking."""
    allow_special_tokens: bool = False
    """True: special tokens in the text of a row act as control tokens, so a row can end its turn and open another.
    False: they are encoded as plain text, and counted. Those in `system_prompt` and `prompt_template` always act."""
    max_prompt_tokens: PositiveInt = 1024
    """Most tokens of a prompt; longer prompts are dropped, and their number is reported. 1024 is lowered where the
    model has fewer positions."""
    shuffle: bool = True
    """Shuffles rows with `trainer.seed`, in another order in each epoch."""
    num_train_rows: PositiveInt | None = None
    """Number of training rows: the first ones, or as many generated ones; null: all (if rows are generated, the
    source's own default)."""
    num_eval_rows: PositiveInt | None = 256
    """Number of evaluation rows; null: all. Where 256 would leave no question to train on, an eighth of the questions
    is held out."""

    def problems(self) -> Iterator[Problem]:
        if self.system_prompt is not None and self.chat_template == "never":
            yield Problem(
                "system_prompt", f"{self.system_prompt!r} needs a chat template, but chat_template is 'never'"
            )
        if self.chat_template_kwargs and self.chat_template == "never":
            yield Problem(
                "chat_template_kwargs", f"{self.chat_template_kwargs!r} has no effect: chat_template is 'never'"
            )
        for name in sorted(OWN_TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            yield Problem(f"chat_template_kwargs.{name}", "is set by rlsdk itself; leave it out")
        if self.eval_options and self.eval is None:
            yield Problem("eval_options", f"{self.eval_options!r} has no effect without data.eval")
        if self.mixture and self.train is not None:
            yield Problem("mixture", f"replaces data.train, which is {self.train!r}; give one of the two")
        for field in ("options", "num_train_rows") if self.mixture else ():
            if getattr(self, field):
                yield Problem(field, "belongs to data.train; each source of data.mixture has its own")
        if self.eval is None and (self.train is not None or self.mixture) and self.num_eval_rows is None:
            yield Problem("num_eval_rows", "null needs data.eval; held-out rows must be a number")


class TrainerConfig(Section):
    """The training loop."""

    steps: Annotated[NonNegativeInt, NO_INFLUENCE] = 200
    """Trainer steps; each samples once, then makes its updates."""
    epochs: Annotated[PositiveFloat | None, NO_INFLUENCE] = None
    """Passes over the training prompts, in place of `steps`; rounded up to whole steps. For a mixture: draws of as many
    prompts as all sources have. null: `steps` is used."""
    prompts_per_step: PositiveInt = 64
    """Prompts in one step."""
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt (group size)."""
    updates_per_step: PositiveInt = 1
    """Mini-batches (optimizer steps) into which a step's samples are split, per epoch of the step."""
    epochs_per_step: PositiveInt = 1
    """Epochs over the samples of one step."""
    seed: NonNegativeInt = 0
    """Seed of data order, sampling and random initial weights."""
    run_dir: Annotated[str, NO_INFLUENCE] = "runs"
    """Folder that contains a folder for every run."""
    run_name: Annotated[str | None, NO_INFLUENCE] = None
    """Name of the run's folder; null: date and time."""
    save_every_steps: Annotated[PositiveInt | None, NO_INFLUENCE] = 50
    """Trainer steps between checkpoints; the last step is always saved. null: no checkpoints."""
    export_every_steps: Annotated[PositiveInt | None, NO_INFLUENCE] = None
    """Trainer steps between checkpoints that also contain the model in Hugging Face format; a multiple of
    `save_every_steps`. The last and the best checkpoint always contain it. null: every checkpoint."""
    keep_checkpoints: Annotated[PositiveInt, NO_INFLUENCE] = 3
    """Number of newest checkpoints to keep; the newest one that contains the model is kept as well."""
    resume: Annotated[str, NO_INFLUENCE] = "auto"
    """auto: from the newest complete checkpoint of this run's folder, if any; never; or the path of a checkpoint or
    run."""
    parity_threshold: Annotated[PositiveFloat, NO_INFLUENCE] = 0.05
    """Largest mean difference in nats between log-probs of the rollout and the train engine for the same tokens."""
    parity_action: Annotated[Literal["warn", "error"], NO_INFLUENCE] = "warn"
    """Action if `parity_threshold` is exceeded."""
    callbacks: Annotated[tuple[str, ...], NO_INFLUENCE] = empty_tuple()
    """Registered step callbacks, `pkg.mod:fn`, or `file.py:fn`."""

    @property
    def samples_per_step(self) -> int:
        """Samples in one step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_step * self.epochs_per_step

    def problems(self) -> Iterator[Problem]:
        if self.updates_per_step > self.samples_per_step:
            samples = f"{self.prompts_per_step} prompts x {self.samples_per_prompt} samples = {self.samples_per_step}"
            yield Problem("updates_per_step", f"{self.updates_per_step} is more than a step's samples ({samples})")
        if self.export_every_steps is not None:
            yield from self._export_problems(self.export_every_steps)

    def unused(self) -> Iterator[Problem]:
        if self.epochs is not None:
            yield Problem("steps", f"trainer.epochs is {self.epochs:g}")

    def _export_problems(self, every: int) -> Iterator[Problem]:
        saves = self.save_every_steps
        if saves is None:
            yield Problem("export_every_steps", f"{every} has no effect: save_every_steps is null, nothing is saved")
        elif every % saves:
            fitting = max(1, round(every / saves)) * saves
            yield Problem(
                "export_every_steps",
                f"{every} is no multiple of save_every_steps, which is {saves}: a model is exported with a checkpoint; "
                f"the nearest that fits is {fitting}",
            )


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


class SftConfig(Section):
    """Supervised training on the reference answers: the warm start of `rlsdk train`, and all of `rlsdk sft`."""

    steps: NonNegativeInt = 0
    """Optimizer steps; 0: no supervised training."""
    epochs: PositiveFloat | None = None
    """Passes over the rows, in place of `steps`; rounded up to whole steps. null: `steps` is used."""
    rows_per_step: PositiveInt = 64
    """Rows in one optimizer step."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate. The other settings are those of `train.optim`; the optimizer is reset afterwards."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the optimizer steps that are warm-up, in place of `warmup_steps`; rounded up. null: `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay to `train.optim.min_lr_ratio`."""
    save_every_steps: PositiveInt | None = 100
    """Optimizer steps between checkpoints, from which an interrupted run resumes; null: no checkpoints."""
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant that are learned of a conversation: all, in one row where the chat template keeps earlier
    turns as they are and in a row each where it changes them; or the last one, to which the others are the prompt."""
    answer_template: str = "{answer}"
    """Text that is learned; `{answer}` and `{any_field_of_the_row}` are filled in."""
    long_answers: Literal["drop", "cut"] = "drop"
    """Answers longer than `rollout.max_response_tokens`. drop: the row is dropped, and counted; cut: trains on the
    first tokens, without the token that ends a turn, so that the model does not learn to stop early."""

    @property
    def is_asked(self) -> bool:
        """Whether supervised training is configured."""
        return self.steps > 0 or self.epochs is not None

    def problems(self) -> Iterator[Problem]:
        known = self.epochs is None  # otherwise the steps depend on the data; checked again once it is read
        if known and self.warmup_ratio is None and self.schedule != "constant" and self.warmup_steps >= self.steps > 0:
            yield Problem("warmup_steps", value=self.warmup_steps, expected=f"fewer than sft.steps {self.steps}")

    def unused(self) -> Iterator[Problem]:
        if self.epochs is not None:
            yield Problem("steps", f"sft.epochs is {self.epochs:g}")
        yield from steps_of_share(self.warmup_ratio)


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

"""The configuration of a run: one frozen model per section, every field with its unit or meaning.

Values are strictly typed (no text taken for a number). Checks between fields of one section stand beside it, those
between sections in `RunConfig`; what depends on the installed backends is checked by `rlsdk.config.check_run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.algorithm import AlgorithmConfig
from rlsdk.config.base import Options, Section, empty_mapping, empty_tuple
from rlsdk.config.engines import ModelConfig, PlacementConfig, RolloutConfig, ShardingConfig, TrainConfig
from rlsdk.config.evaluation import CheckpointConfig, EvalConfig
from rlsdk.config.faults import FaultsConfig
from rlsdk.config.preferences import PreferencesConfig
from rlsdk.config.problem import Problem
from rlsdk.config.rewards import RewardConfig, RewardLimitsConfig, judge_pool_problems, reward_problems
from rlsdk.config.role_names import CRITIC
from rlsdk.config.role_sections import (
    CriticConfig,
    RefConfig,
    RewardModelConfig,
    critic_warmup_problems,
    reward_model_problems,
)
from rlsdk.config.schedule import ScheduleConfig, schedule_problems

NEEDS_GROUP = frozenset({"grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"})
"""Built-in estimators that compare the samples of one prompt, and see nothing in a single one."""
SINGLE_TURN = "single_turn"
"""The rollouter that calls the policy once for each sample."""
POLICY_GRADIENT = "policy_gradient"
"""The algorithm that is composed of the other fields of `algorithm`."""
NEEDS_VALUES = frozenset({"gae"})
"""Built-in estimators that read the values of a critic."""


OWN_TEMPLATE_ARGUMENTS = frozenset({"conversation", "messages", "tokenize", "add_generation_prompt", "return_dict"})
"""Of `apply_chat_template`, which a run passes itself."""


class MixtureConfig(Section):
    """One source of a mixture."""

    source: str
    """As `data.train`."""
    weight: PositiveFloat = 1.0
    """Share of the prompts that are drawn from this source, relative to the other weights."""
    options: Options = empty_mapping()
    """Parameters of the source."""
    num_rows: PositiveInt | None = None
    """Rows; uses the first so many, or generates so many; null: all that there are."""
    fields: Options = empty_mapping()
    """Fields that every row of this source gets, `{task: gsm8k}`, for instance for the `rows` of a reward."""


class DataConfig(Section):
    """Where prompts come from."""

    train: str | None = None
    """`SOURCE:REST` of a registered source (`reasoning_gym:chain_sum`), a file (.jsonl, .json, .parquet, .csv), or a
    data set's folder or hub name."""
    mixture: tuple[MixtureConfig, ...] = empty_tuple()
    """In place of `train`: several sources, from which prompts are drawn by weight. Each has its own epochs."""
    eval: str | None = None
    """As `train`, for evaluation; null: rows are held out of `train`, `num_eval_rows` of them."""
    options: Options = empty_mapping()
    """Parameters of the train source, for instance those of a reasoning-gym task, or `split` of a hub data set."""
    eval_options: Options = empty_mapping()
    """Parameters of the eval source."""
    prompt_field: str = "question"
    """Field of a row that holds the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field of a row that holds the reference answer; rows may lack it."""
    system_prompt: str | None = None
    """Text of the system message; used with a chat template only."""
    prompt_template: str = "{prompt}"
    """Text of the user message; `{prompt}` and `{any_field_of_the_row}` are filled in."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: the tokenizer's chat template where it has one."""
    chat_template_kwargs: Options = empty_mapping()
    """Variables of the chat template, for instance `{enable_thinking: false}` for models that can think or not."""
    allow_special_tokens: bool = False
    """True: special tokens in the text of a row become control tokens, so a row can end its turn and open another.
    False: they are encoded as text and counted. Those of `system_prompt` and `prompt_template` always count."""
    max_prompt_tokens: PositiveInt = 1024
    """Tokens; longer prompts are left out and counted."""
    shuffle: bool = True
    """Takes rows in an order drawn with `trainer.seed`, a new one each epoch."""
    num_train_rows: PositiveInt | None = None
    """Rows; uses the first so many, or generates so many; null: all that there are (the source's own default where
    rows are generated)."""
    num_eval_rows: PositiveInt | None = 256
    """Rows; null: all that there are."""

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
    """The loop."""

    steps: NonNegativeInt = 200
    """Trainer steps; each is one rollout, then updates."""
    epochs: PositiveFloat | None = None
    """In place of `steps`: passes over the training prompts, rounded up to whole steps; of a mixture, draws of as many
    prompts as all its sources have. null: `steps` counts."""
    prompts_per_step: PositiveInt = 64
    """Prompts in one step."""
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt: the group."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps into which a step's samples are cut (mini-batches), per epoch."""
    epochs_per_step: PositiveInt = 1
    """Times that the samples of a step are gone through."""
    seed: NonNegativeInt = 0
    """Of data order, sampling and random weights."""
    run_dir: str = "runs"
    """Folder under which every run has its own."""
    run_name: str | None = None
    """Name of the run's folder; null: made from date and time."""
    save_every_steps: PositiveInt | None = 50
    """Trainer steps between checkpoints, the last step always included; null: none at all."""
    export_every_steps: PositiveInt | None = None
    """Trainer steps between checkpoints that also hold the model in Hugging Face form, a multiple of
    `save_every_steps`; the last one and the best one always do. null: every checkpoint."""
    keep_checkpoints: PositiveInt = 3
    """Newest checkpoints that are kept, and besides them the newest that holds the model."""
    resume: str = "auto"
    """auto: from the newest whole checkpoint of this run's folder, if there is one; never; or the path of a
    checkpoint or run."""
    parity_threshold: PositiveFloat = 0.05
    """Nats: largest mean difference between the log-probs of rollout and train engine on the same tokens."""
    parity_action: Literal["warn", "error"] = "warn"
    """What happens past `parity_threshold`."""
    callbacks: tuple[str, ...] = empty_tuple()
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
    """Seconds without an answer, and without progress of those that are waited for, after which a wait is an error.
    Each phase has its own; raising one does not blunt the others."""

    start_s: PositiveFloat = 600.0
    """Starting the workers and building an engine; while tensors are read, from one to the next."""
    rollout_s: PositiveFloat = 600.0
    """Without a single token from a replica that has samples to make: progress, not the whole generation."""
    update_s: PositiveFloat = 1800.0
    """One micro-batch of a forward pass or of an optimizer step, not the whole of it."""
    sync_s: PositiveFloat = 600.0
    """Each stage of a weight sync, and each offload or wake."""
    save_s: PositiveFloat = 1800.0
    """One role's part of a checkpoint, written or read; of an exported model, one tensor."""
    collective_s: PositiveFloat = 600.0
    """Each collective between the ranks of an engine."""


class SftConfig(Section):
    """Supervised training on the reference answers: the warm start of `rlsdk train`, and all of `rlsdk sft`."""

    steps: NonNegativeInt = 0
    """Optimizer steps; 0: no warm start."""
    epochs: PositiveFloat | None = None
    """In place of `steps`: passes over the rows that are learned, rounded up to whole steps. null: `steps` counts."""
    rows_per_step: PositiveInt = 64
    """Rows in one optimizer step."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate; the rest of the optimizer is as in `train.optim`, with fresh moments afterwards."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    save_every_steps: PositiveInt | None = 100
    """Optimizer steps between checkpoints, from which a run that was killed goes on; null: none at all."""
    answer_template: str = "{answer}"
    """Text that is learned; `{answer}` and `{any_field_of_the_row}` are filled in."""
    long_answers: Literal["drop", "cut"] = "drop"
    """Answers longer than `rollout.max_response_tokens`. drop: the row is left out and counted; cut: its first tokens
    are learned, without an end-of-sequence token, so the model does not learn to stop early."""

    @property
    def is_asked(self) -> bool:
        """There is supervised training, of so many steps or epochs."""
        return self.steps > 0 or self.epochs is not None


class TrackingConfig(Section):
    """Where the run's numbers go."""

    trackers: tuple[str, ...] = Field(default=("jsonl", "tensorboard"), strict=False)
    """Registered trackers."""
    options: dict[str, Options] = empty_mapping()
    """Parameters by tracker name."""
    samples_per_step: NonNegativeInt = 4
    """Samples whose text is logged each step: the best and the worst of some prompts."""
    tokens_per_sample: NonNegativeInt = 512
    """First tokens of a logged sample that are logged one by one, with their log-probs; 0: text only."""

    def problems(self) -> Iterator[Problem]:
        for name in self.options:
            if name not in self.trackers:
                yield Problem(f"options.{name}", f"{name!r} is not one of tracking.trackers {list(self.trackers)}")


class RunConfig(Section):
    """All that defines a run."""

    model: ModelConfig = ModelConfig()
    """Which model is trained."""
    data: DataConfig = DataConfig()
    """Where prompts come from."""
    rewards: tuple[RewardConfig, ...] = empty_tuple()
    """Terms of the reward; the weighted sum of those that apply to a sample is its score."""
    reward_limits: RewardLimitsConfig = RewardLimitsConfig()
    """What rewards may cost, and what becomes of samples that failed."""
    reward_models: tuple[RewardModelConfig, ...] = empty_tuple()
    """Models whose scores are terms of the reward, beside `rewards`."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become a gradient."""
    train: TrainConfig = TrainConfig()
    """The train engine: the actor's, and what the other models take where their own section says nothing."""
    ref: RefConfig = RefConfig()
    """The frozen policy that the KL is measured from."""
    critic: CriticConfig = CriticConfig()
    """The model of values that is trained beside the policy."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout engine, and how training samples are drawn."""
    eval: EvalConfig = EvalConfig()
    """Figures on rows that are never trained on."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Which checkpoints are kept besides the newest."""
    placement: PlacementConfig = PlacementConfig()
    """Which role runs where."""
    trainer: TrainerConfig = TrainerConfig()
    """The loop."""
    schedule: ScheduleConfig = ScheduleConfig()
    """When groups are made, and with which weights."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    """Seconds after which a wait is an error."""
    faults: FaultsConfig = FaultsConfig()
    """What a run does by itself when a process of it is lost."""
    sft: SftConfig = SftConfig()
    """Supervised training on the reference answers."""
    preferences: PreferencesConfig = PreferencesConfig()
    """Training from pairs of answers: a reward model, or DPO."""
    sharding: ShardingConfig = ShardingConfig()
    """How weights go from the train to the rollout engine."""
    tracking: TrackingConfig = TrackingConfig()
    """Where the run's numbers go."""

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus response, or whole episode, in tokens."""
        return self.rollout.max_model_tokens or self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def adapts_concurrency(self) -> bool:
        """Samples under way at each replica follow its measured throughput (`rollout.concurrency`)."""
        depends_on_time = self.schedule.on_new_weights != "drain"
        return self.rollout.concurrency == "adapt" or (self.rollout.concurrency == "auto" and depends_on_time)

    @property
    def needs_values(self) -> bool:
        """True where the advantage, or the algorithm, reads the values of a critic."""
        own = self.algorithm
        return CRITIC in own.roles or (own.name == POLICY_GRADIENT and own.advantage in NEEDS_VALUES)

    def problems(self) -> Iterator[Problem]:
        yield from self._length_problems()
        yield from self._group_problems()
        yield from self._schedule_problems()
        yield from schedule_problems(self.schedule, self.placement, self.algorithm)
        yield from reward_problems(self.rewards)
        yield from judge_pool_problems(self.rewards, self.placement, self.schedule.max_staleness)
        yield from reward_model_problems(self.reward_models)
        yield from self._evaluation_problems()
        if self.needs_values:
            trainer = self.trainer
            yield from critic_warmup_problems(
                self.critic, trainer.steps, trainer.updates_per_step * trainer.epochs_per_step
            )

    def _length_problems(self) -> Iterator[Problem]:
        needed = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if self.max_model_tokens < needed:
            parts = f"{self.data.max_prompt_tokens} + {self.rollout.max_response_tokens} = {needed}"
            fields = "data.max_prompt_tokens + rollout.max_response_tokens"
            yield Problem("rollout.max_model_tokens", f"{self.max_model_tokens} is less than {fields} ({parts})")
        elif self.rollout.rollouter != SINGLE_TURN and self.rollout.max_model_tokens is None:
            yield Problem(
                "rollout.max_model_tokens",
                f"null makes room for a prompt and one response ({needed} tokens), but rollout.rollouter is "
                f"{self.rollout.rollouter!r}: give the most tokens of a whole episode, all turns and tool answers "
                f"included, for instance `--rollout.max_model_tokens {needed + 3 * self.rollout.max_response_tokens}`",
            )

    def _evaluation_problems(self) -> Iterator[Problem]:
        names = [reward.title for reward in self.rewards]
        for measure in self.eval.measures():
            part, field = measure.config, measure.field
            if part.correct_reward is not None and names and not part.rewards and part.correct_reward not in names:
                yield Problem(
                    f"{field}.correct_reward", f"{part.correct_reward!r}: expected one of the rewards {names}"
                )
            prompt, response = part.max_prompt_tokens, part.max_response_tokens
            needed = (prompt or self.data.max_prompt_tokens) + (response or self.rollout.max_response_tokens)
            if self.max_model_tokens < needed and (prompt or response):
                longer = "max_response_tokens" if response else "max_prompt_tokens"
                yield Problem(
                    f"{field}.{longer}",
                    f"{response or prompt}: prompt and response come to {needed} tokens, more than the "
                    f"{self.max_model_tokens} that the run makes room for; add `--rollout.max_model_tokens {needed}`",
                )

    def _group_problems(self) -> Iterator[Problem]:
        compares = self.algorithm.name == POLICY_GRADIENT and self.algorithm.advantage in NEEDS_GROUP
        if compares and self.trainer.samples_per_prompt < 2:
            yield Problem(
                "trainer.samples_per_prompt",
                f"{self.trainer.samples_per_prompt}: expected at least 2, because algorithm.advantage "
                f"{self.algorithm.advantage!r} compares the samples of a prompt",
            )

    def _schedule_problems(self) -> Iterator[Problem]:
        optim, total = self.train.optim, self.trainer.optimizer_steps
        if self.trainer.epochs is not None:
            return  # Steps follow from the data: asked again once it was read.
        if optim.schedule != "constant" and optim.warmup_steps >= total > 0:
            yield Problem(
                "train.optim.warmup_steps",
                f"{optim.warmup_steps}: expected fewer than the run's {total} optimizer steps, because "
                f"train.optim.schedule is {optim.schedule!r}; for a short run add `--train.optim.warmup_steps 0`",
            )

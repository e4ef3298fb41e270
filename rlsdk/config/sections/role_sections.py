"""Sections of the models besides the actor: reference, critic, reward models, teachers. Null fields default to those of
`train` and `model`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlsdk.config.problem import Problem
from rlsdk.config.sections.algorithm import DistillationConfig
from rlsdk.config.sections.base import Options, Section, empty_mapping, empty_tuple, fields_of, unused_revision
from rlsdk.config.sections.engines import DtypeName, OptimConfig
from rlsdk.config.sections.rewards import RemoteRewardConfig, RowValues
from rlsdk.interfaces import nearest
from rlsdk.interfaces.settings import PassLimits
from rlsdk.interfaces.spelling import Setting

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class ModelRoleConfig(Section, PassLimits):
    """Fields of every model besides the actor."""

    path: str | None = None
    """Folder in Hugging Face format, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub name; null: its main branch, or `model.revision` if the path is that of
    `model`."""
    dtype: DtypeName | None = None
    """Dtype of the parameters in computation; null: as `model.dtype`."""
    backend: str | None = None
    """Registered train backend; null: as `train.backend`."""
    options: Options | None = None
    """The backend's own options; null: those of `train` if the backend is the same."""
    engine_kwargs: Options | None = None
    """Passed to the engine's constructor unchanged; null: those of `train` if the backend is the same."""

    def problems(self) -> Iterator[Problem]:
        if self.micro_batch_tokens is not None and self.micro_batch_rows is not None:
            both = f"{self.micro_batch_tokens!r} and micro_batch_rows {self.micro_batch_rows!r}"
            yield Problem("micro_batch_tokens", both, expected="at most one of the two")

    def unused(self) -> Iterator[Problem]:
        return unused_revision(self.path)


class RefConfig(ModelRoleConfig):
    """The reference: a frozen policy for the KL. Loaded if `algorithm.kl_coef` is above 0."""

    path: str | None = None
    """Folder in Hugging Face format, or a name on the hub; null: the policy at the start of reinforcement learning."""


class CriticOptimConfig(OptimConfig):
    """The critic's AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""


class TrainedRoleConfig(ModelRoleConfig):
    """Fields of a model that is trained with the policy."""

    optim: OptimConfig
    """Optimizer and schedule."""
    activation_checkpointing: bool | None = None
    """Recomputes activations in the backward pass; null: as in `train`."""


class CriticConfig(TrainedRoleConfig):
    """The critic: a value model that is trained with the policy. Loaded if `algorithm.advantage` is `gae`."""

    path: str | None = None
    """Folder in Hugging Face format, or a name on the hub, with or without a value head (a new head is initialised with
    `trainer.seed`); null: as `model.path`."""
    optim: CriticOptimConfig = CriticOptimConfig()
    """Optimizer and schedule."""
    warmup_steps: NonNegativeInt = 0
    """First trainer steps, in which only the critic is updated."""


class NamedModelConfig(ModelRoleConfig):
    """Fields of a model of which a run may have several."""

    name: str | None = None
    """Name, in letters, digits, `-` and `_`: the role is `KIND.NAME`, and metrics contain it. Null, for a single one:
    the role is the kind alone."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.name is not None and not _NAME.fullmatch(self.name):
            yield Problem("name", value=self.name, expected="letters, digits, '-' and '_', such as 'helpful'")


class RewardModelConfig(NamedModelConfig):
    """One reward model: it scores the tokens of a whole row, and the score is added to those of `rewards`. Its
    tokenizer must be that of the policy. With `step_scores` it is a process reward model, which scores the ends of
    steps."""

    path: str
    """Folder in Hugging Face format, or a name on the hub, with a head of one label
    (`...ForSequenceClassification`; with `step_scores` what `rlsdk process-reward` wrote,
    `...ForTokenClassification`)."""
    name: str | None = None
    """Name, in letters, digits, `-` and `_`: the role is `reward.NAME`, and metrics contain it. Null, for a single
    reward model: the role is `reward`."""
    weight: float = 1.0
    """Factor of its score in a sample's score."""
    step_scores: Literal["each", "min", "mean", "product", "last"] | None = None
    """A process reward model, and what becomes of its scores, the probabilities that steps are right. each: reward of
    the step, at its last token; min, mean, product or last of them: score of the sample, 0 without a complete step.
    null: a reward model of whole answers."""
    step_separator: str = Field(default="\n", min_length=1)
    """With `step_scores`: text between two steps; as in `preferences` at its training."""

    def unused(self) -> Iterator[Problem]:
        yield from super().unused()
        if self.step_scores is None:
            yield Problem("step_separator", "step_scores is null")


class TeacherRolloutConfig(Section):
    """A rollout engine of the run that serves a teacher. Its log-probs are those at temperature 1."""

    backend: str | None = None
    """Registered rollout backend; null: as `rollout.backend`."""
    options: Options | None = None
    """The backend's own options; null: those of `rollout` if the backend is the same."""
    engine_kwargs: Options | None = None
    """Passed to the engine's constructor unchanged; null: those of `rollout` if the backend is the same."""
    tp_size: PositiveInt = 1
    """Tensor-parallel size of one replica."""
    max_running_samples: PositiveInt = 64
    """Most rows that one replica reads at once."""
    max_model_tokens: PositiveInt | None = None
    """Longest row, and one token more; null: that of the policy and one more. A longer prompt of its own needs more."""


class BestOfConfig(ModelRoleConfig):
    """`rlsdk eval`: a process reward model (`rlsdk process-reward`) that chooses among responses. Its tokenizer must be
    that of the policy."""

    path: str
    """Folder in Hugging Face format, or a name on the hub."""
    by: Literal["answer", "step"] = "answer"
    """answer: of the samples of a prompt, the one with the best score (`best@k` beside pass@k and maj@k). step: for
    each step of a response, `num_candidates` are sampled, and it continues from the best one."""
    step_scores: Literal["min", "mean", "product", "last"] = "min"
    """The score of an answer, of the probabilities that its steps are right; 0 without a complete step."""
    step_separator: str = Field(default="\n", min_length=1)
    """Text between two steps; as in `preferences` at the model's training."""
    num_candidates: PositiveInt = 8
    """Samples of each step with `by: step`."""

    def unused(self) -> Iterator[Problem]:
        yield from super().unused()
        if self.by == "answer":
            yield Problem("num_candidates", "by is 'answer', which chooses among eval.samples_per_prompt")
        else:
            yield Problem("step_scores", "by is 'step', where each step has its own score")


class TeacherConfig(NamedModelConfig):
    """One teacher: a frozen model, from whose log-probs of the policy's own samples the policy learns
    (`algorithm.distillation`). Each id must mean the same bytes in its tokenizer as in the policy's. A train engine
    computes them, or a rollout engine of the run (`rollout`), or a service (`url`). A string is short for `path`."""

    path: str | None = None
    """Folder in Hugging Face format, or a name on the hub; null without a `url` or `log_probs`: the policy itself, at
    the weights with which the step begins. It then reads a `prompt_template` of its own, and there is no second
    model."""
    weights: Literal["now", "start"] = "now"
    """Of the policy itself. now: the weights with which the step begins; start: those with which reinforcement learning
    began, which are below an adapter (`model.lora`), at no second model; it needs no prompt of its own."""
    rollout: TeacherRolloutConfig | None = None
    """A rollout engine serves it (vLLM, SGLang); null: a train engine computes its log-probs. `rollout: {}` takes all
    of it from `rollout`."""
    url: str | None = None
    """URL, up to `/v1`, of a service with the OpenAI completions API that gives log-probs of prompts, in place of
    `path`: `http://127.0.0.1:8000/v1`."""
    model: str | None = None
    """Name of the model at the service."""
    log_probs: str | None = None
    """`rlsdk distill`: a file that `rlsdk generate --log-probs` wrote, in place of a model: its log-probs of the
    answers of the rows. The student learns the tokens of the file, and of a conversation the answer alone."""
    remote: RemoteRewardConfig | None = None
    """Settings of requests to the service; null: the defaults."""
    name: str | None = None
    """Name, in letters, digits, `-` and `_`: the role is `teacher.NAME`, and metrics contain it. Null, for a single
    teacher: the role is `teacher`."""
    prompt_template: str | None = None
    """Text of the user message that this teacher reads, `{prompt}\n{solution}`: `{prompt}` and `{any_field_of_the_row}`
    are filled in, so that it may know what the policy does not. null: `data.prompt_template`, as the policy."""
    tokenizer: str | None = None
    """Folder or hub name of its tokenizer, which is only compared with the policy's, or reads the text with `align:
    text`; null: the model's own. A service needs it."""
    align: Literal["tokens", "text"] = "tokens"
    """tokens: it reads the policy's token ids, which must mean the same bytes to it. text: it reads its own tokens of
    the same text, in its own chat template; its log-probs are shared out over the policy's tokens between boundaries
    that both have. Objective `sampled` only."""
    weight: NonNegativeFloat = 1.0
    """Factor of its part of the advantage; 0: its gap is only measured and logged."""
    temperature: PositiveFloat | None = None
    """Its logits are divided by it before log-probs are computed; null: by `rollout.temperature`, as the policy's
    are."""
    rows: dict[str, RowValues] = empty_mapping()
    """Field of the data row -> values for which it teaches, `{task: [math, code]}`, read as `rewards.N.rows` are.
    Empty: every row."""
    sources: tuple[str, ...] = empty_tuple()
    """Sources of `data.mixture` whose rows it teaches, as named there. Empty: those of every source."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for field, values in self.rows.items():
            if not values:
                yield Problem(f"rows.{field}", "[]: expected at least one value; leave the field out for every row")
        if self.weights == "start" and not self.is_policy:
            yield Problem("weights", "start belongs to a teacher without a path, which is the policy itself")
        if self.is_policy and self.prompt_template is None and self.weights == "now":
            yield Problem(
                "path", "null is the policy itself, which needs a prompt_template of its own to teach anything"
            )
        if self.align == "text" and self.is_policy:
            yield Problem("align", "text belongs to a teacher with a tokenizer of its own; path is null: the policy")
        if self.align == "text" and self.rollout is not None and self.rollout.max_model_tokens is None:
            yield Problem("rollout.max_model_tokens", "is required with align 'text': its rows may have more tokens")
        if self.is_policy and self.rollout is not None:
            yield Problem("rollout", "belongs to a teacher with a path; the policy itself is served with its own")
        yield from self._of_service()
        if self.log_probs is not None:
            for name in ("path", "rollout", "url", "prompt_template"):
                if getattr(self, name) is not None:
                    yield Problem(name, f"and log_probs {self.log_probs!r}: a file has its log-probs without it")
            if self.temperature not in (None, 1.0):
                yield Problem(
                    "temperature", value=self.temperature, expected="1.0: a file has log-probs at temperature 1"
                )

    def _of_service(self) -> Iterator[Problem]:
        if self.url is None:
            for name in ("model", "remote"):
                if getattr(self, name) is not None:
                    yield Problem(name, "belongs to a teacher that is a service; it has no url")
            return
        if not self.url.startswith(("http://", "https://")):
            yield Problem("url", value=self.url, expected="a URL such as http://127.0.0.1:8000/v1")
        for name in ("path", "rollout"):
            if getattr(self, name) is not None:
                yield Problem(name, f"and url {self.url!r}: expected one of the two, a model of the run or a service")
        if self.model is None:
            yield Problem("model", "is required beside url: the name of the model at the service")
        if self.tokenizer is None:
            yield Problem("tokenizer", "is required beside url: folder or hub name of the model that is served there")

    @property
    def is_policy(self) -> bool:
        """Whether it is the policy itself, with another prompt."""
        return self.path is None and self.url is None and self.log_probs is None

    @property
    def has_engine(self) -> bool:
        """Whether the run has an engine for it."""
        return self.path is not None

    @property
    def is_served(self) -> bool:
        """Whether a rollout engine or a service gives its log-probs: those at temperature 1."""
        return self.rollout is not None or self.url is not None

    def unused(self) -> Iterator[Problem]:
        yield from super().unused()
        of_train = ("backend", "options", "engine_kwargs", *(one.name for one in dataclasses.fields(PassLimits)))
        if self.is_policy:
            names = ("revision", "dtype", *of_train, "tokenizer")
            yield from fields_of(names, "path is null, so that it is the policy itself")
        elif self.log_probs is not None:
            yield from fields_of(("revision", "dtype", *of_train, "tokenizer", "align"), "it is a file of log-probs")
        elif self.is_served:
            names = of_train if self.url is None else ("revision", "dtype", *of_train)
            yield from fields_of(names, "a rollout engine serves it" if self.url is None else "it is a service")

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str) else data


def name_problems(section: str, models: Sequence[NamedModelConfig]) -> Iterator[Problem]:
    """Problems of models with the same role; `section` is the list that they are in."""
    seen: dict[str, int] = {}
    for at, model in enumerate(models):
        if model.name is None and len(models) > 1:
            what = section.replace("_", " ")
            yield Problem(f"{section}.{at}.name", f"is required where there are {len(models)} {what}")
        if model.name is not None and seen.setdefault(model.name, at) != at:
            first = f"{section}.{seen[model.name]}"
            yield Problem(f"{section}.{at}.name", value=model.name, expected=f"another, because {first} has it")


def teacher_problems(
    teachers: Sequence[TeacherConfig],
    sources: Sequence[str],
    distillation: DistillationConfig,
    temperature: float,
    *,
    keeps_start: bool,
) -> Iterator[Problem]:
    """Problems of teachers with the same role, of sources that the run does not mix, and of what is asked of them.

    Args:
        teachers: of the run.
        sources: of its mixture.
        distillation: how the policy learns from them.
        temperature: at which the policy samples.
        keeps_start: the policy's workers have it as it was at the start, too: below its adapter.
    """
    yield from name_problems("teachers", teachers)
    if not teachers and not distillation.reward_coef:
        yield Problem(
            "teachers",
            "at least one is required, because algorithm.distillation.reward_coef is 0, so that rewards teach "
            f"nothing: {Setting('teachers', 'MODEL')}",
        )
    if distillation.objective == "exact" and any(one.prompt_template is not None for one in teachers):
        yield Problem(
            "algorithm.distillation.objective",
            value="exact",
            expected="'sampled', because a teacher has a prompt_template of its own",
        )
    if distillation.objective == "exact" and any(one.is_policy and one.prompt_template is None for one in teachers):
        yield Problem(
            "algorithm.distillation.objective",
            value="exact",
            expected="'sampled' or 'top_k', because a teacher is the policy itself",
        )
    for at, teacher in enumerate(teachers):
        if teacher.weights == "start" and not keeps_start:
            yield Problem(
                f"teachers.{at}.weights",
                value="start",
                expected="'now': only a policy with an adapter (model.lora.rank) has its start in itself; without one, "
                f"load it as a model: `{Setting(f'teachers.{at}.path', 'MODEL')}`",
            )
        own = temperature if teacher.temperature is None else teacher.temperature
        if teacher.is_served and own != 1.0:
            said = "its own" if teacher.temperature is not None else "that of rollout.temperature, because it has none"
            yield Problem(
                f"teachers.{at}.temperature",
                value=own,
                expected=f"1.0 (this is {said}): rollout engines and services give log-probs of prompts at temperature "
                "1. Set it to 1.0, or let a train engine compute them (leave out `rollout`)",
            )
        if teacher.align == "text" and distillation.objective != "sampled":
            yield Problem(
                "algorithm.distillation.objective",
                value=distillation.objective,
                expected=f"'sampled', because teachers.{at}.align is 'text', and a divergence compares the same tokens",
            )
        if teacher.is_served and distillation.objective == "exact":
            yield Problem(
                "algorithm.distillation.objective",
                value="exact",
                expected=f"'top_k' or 'sampled', because teachers.{at} is no train engine, and gives no hidden states",
            )
        for place, source in enumerate(teacher.sources):
            if source not in sources:
                yield Problem(
                    f"teachers.{at}.sources.{place}",
                    value=source,
                    expected=f"one of data.mixture, {list(sources)}{nearest(source, sources)}"
                    if sources
                    else "no source, because there is no data.mixture",
                )


def dynamic_sampling_problems(models: tuple[RewardModelConfig, ...], num_samples: int) -> Iterator[Problem]:
    """Problems of dynamic sampling with scores that are not known when a group is judged, or with nothing to compare.

    Args:
        models: the run's reward models.
        num_samples: samples of each prompt.
    """
    field = "algorithm.dynamic_sampling.enabled"
    off = f"`{Setting(field, False)}`"
    scoring = [f"reward_models.{at} ({model.path})" for at, model in enumerate(models) if model.weight]
    if scoring:
        yield Problem(
            field,
            f"true cannot be combined with {', '.join(scoring)}: a group is judged when it is graded, before a reward "
            f"model scores it, so it would be judged by a part of its score; do not replace groups ({off}), or serve "
            f"the model as a reward (`rlsdk reward serve`, `{Setting('rewards', 'URL')}`)",
        )
    if num_samples < 2:
        yield Problem(
            field,
            f"true needs trainer.samples_per_prompt of at least 2, to compare the samples of a prompt, and it is "
            f"{num_samples}; raise it, or do not replace groups ({off})",
        )


def critic_warmup_problems(critic: CriticConfig, steps: int, updates: int) -> Iterator[Problem]:
    """Problem of a warm-up that takes the whole run."""
    optim = critic.optim
    if critic.warmup_steps >= steps > 0:
        yield Problem(
            "critic.warmup_steps", value=critic.warmup_steps,expected=f"fewer than trainer.steps {steps}, because the "
            "actor is not updated in them"
        )  # fmt: skip
    if optim.warmup_ratio is None and optim.schedule != "constant" and optim.warmup_steps >= steps * updates > 0:
        yield Problem(
            "critic.optim.warmup_steps",
            value=optim.warmup_steps,
            expected=f"fewer than the run's {steps * updates} optimizer steps, because "
            f"critic.optim.schedule is {optim.schedule!r}",
            commands=(Setting("critic.optim.warmup_steps", 0),),
        )

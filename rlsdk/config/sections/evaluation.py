"""Sections of evaluation on rows that are never trained on, and of what depends on its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Options, Section, empty_mapping, empty_tuple, fields_of
from rlsdk.config.sections.rewards import RewardConfig, own_engine_problems, reward_problems
from rlsdk.config.sections.role_sections import BestOfConfig
from rlsdk.config.sections.sampling import temperature_problems

SET_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")
"""Pattern of an evaluation set's name, which is part of metric and file names."""
SAMPLED, GREEDY = "sampled", "greedy"
"""The two measures of an evaluation without named sets."""
FIGURES = ("accuracy", "accuracy_se", "reward", "reward_se", "tokens", "tokens_max", "truncated_share", "log_prob",
           "entropy", "invalid_share")  # fmt: skip
"""Metrics of every set; pass@k, maj@k, reward/NAME and rollout/NAME are added to them."""
AT_K = re.compile(r"(pass|maj|best)@[1-9]\d*")
"""Pattern of metrics of several samples of a prompt."""
MAX_VOTES = 256
"""Largest n for which maj@k with k < n is computed: beyond it, binomials overflow float64."""


class EvalSetConfig(Section):
    """One evaluation set: its rows, its prompts, and the sampling and grading of its responses."""

    data: str | None = None
    """Data source, in the form of `data.train`; null: the evaluation rows of the run (of `data.eval`, or held out of
    training)."""
    options: Options = empty_mapping()
    """Parameters of the source."""
    num_rows: PositiveInt | None = None
    """Number of rows, the first ones; null: all."""
    prompt_field: str | None = None
    """Field of a row that holds the prompt; null: as `data.prompt_field`. The other fields about rows default to those
    of `data` too."""
    answer_field: str | None = None
    """Field of a row that holds the reference answer."""
    prompt_template: str | None = None
    """Text of the user message."""
    system_prompt: str | None = None
    """Text of the system message; '': none."""
    chat_template_kwargs: Options | None = None
    """Variables of the chat template, for instance `{enable_thinking: false}`."""
    max_prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt; longer prompts are dropped, and counted."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt (n in pass@k and maj@k)."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: the smallest set of tokens with a total probability of at least `top_p`."""
    top_k: NonNegativeInt = 0
    """Samples from the `top_k` most probable tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Samples from tokens whose probability is at least `min_p` times that of the most probable one; 0: all."""
    max_response_tokens: PositiveInt | None = None
    """Most tokens of a response; null: as `rollout.max_response_tokens`."""
    rewards: tuple[RewardConfig, ...] = empty_tuple()
    """Terms of the score; empty: those of the run."""
    correct_reward: str | None = None
    """Name of the reward that decides whether a sample is correct; null: the first."""
    correct_from: float = 1.0
    """A sample is correct if that reward is at least this value."""

    def problems(self) -> Iterator[Problem]:
        yield from temperature_problems(self.temperature, can_be_greedy=True)
        if self.temperature == 0 and self.samples_per_prompt > 1:
            yield Problem(
                "samples_per_prompt",
                value=self.samples_per_prompt,
                expected="1, because temperature 0 gives the same response every time",
            )
        if self.options and self.data is None:
            yield Problem("options", f"{self.options!r} has no effect without a source of the set's own in data")
        yield from reward_problems(self.rewards)
        yield from own_engine_problems(self.rewards)
        names = [reward.title for reward in self.rewards]
        if self.correct_reward is not None and names and self.correct_reward not in names:
            yield Problem("correct_reward", value=self.correct_reward, expected=f"one of {names}")

    def unused(self) -> Iterator[Problem]:
        if self.temperature == 0:
            yield from fields_of(("top_p", "top_k", "min_p"), "temperature 0 takes the most probable token")


class WatchConfig(Section):
    """An evaluation metric, and whether a higher or lower value is better."""

    metric: str | None = None
    """Name of the metric, for instance `eval/accuracy_greedy`, or `eval/NAME/accuracy` of a set; null: off."""
    mode: Literal["max", "min"] = "max"
    """Whether a higher or a lower value is better."""

    def unused(self) -> Iterator[Problem]:
        if self.metric is None:
            yield from fields_of((name for name in type(self).model_fields if name != "metric"), "metric is null")


class EarlyStoppingConfig(WatchConfig):
    """Ends the run, after saving, if a metric does not improve for some evaluations."""

    patience: PositiveInt = 3
    """Consecutive evaluations without improvement, counting from the one before the first step."""
    min_delta: NonNegativeFloat = 0.0
    """An improvement is a change from the best value by more than this."""


class CheckpointConfig(Section):
    """How checkpoints are written, and which are kept besides the newest `trainer.keep_checkpoints`."""

    best: WatchConfig = WatchConfig()
    """The checkpoint with the best value of a metric: written when the value is measured, and kept."""
    background: bool = False
    """Writes checkpoints while the next step samples: only its first update waits until the training ranks have written
    their parts; nothing waits for checksums and the disk. One checkpoint at a time; a run that dies meanwhile resumes
    from the previous one. Requires that no other role takes turns on the training ranks' devices."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One kind of sampling in an evaluation; its name is part of metrics, seeds and files."""

    name: str
    pattern: str
    """Pattern of its metrics' names; `{}` is the metric."""
    field: str
    """Field of the configuration, for messages."""
    config: EvalSetConfig

    def metric(self, figure: str) -> str:
        return self.pattern.format(figure)


HELD_OUT = Measure(name="held_out", pattern="eval/{}", field="eval", config=EvalSetConfig())
"""The evaluation rows of the run without sampling: used by stages that generate no samples."""


OF_UNNAMED = ("temperature", "top_p", "top_k", "samples_per_prompt", "greedy", "correct_reward", "correct_from")
"""Fields of an evaluation without named sets."""


class EvalConfig(Section):
    """Evaluation on rows that are never trained on: one set of rows, or several named sets."""

    every_steps: PositiveInt | None = 20
    """Trainer steps between evaluations; the last step is always evaluated. null: no evaluation."""
    temperature: PositiveFloat = 1.0
    """Temperature of the sampled responses."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling of the sampled responses: the smallest set of tokens with a total probability of at least
    `top_p`."""
    top_k: NonNegativeInt = 0
    """Sampled responses: from the `top_k` most probable tokens; 0: all."""
    samples_per_prompt: NonNegativeInt = 1
    """Sampled responses per prompt; 0: greedy only."""
    greedy: bool = True
    """Also generates one greedy response per prompt."""
    at_start: bool = True
    """Also evaluates before the first step."""
    correct_reward: str | None = None
    """Name of the reward that decides whether a sample is correct; null: the first."""
    correct_from: float = 1.0
    """A sample is correct if that reward is at least this value."""
    sets: dict[str, EvalSetConfig] = empty_mapping()
    """Evaluation sets by name, in place of `temperature`, `top_p`, `top_k`, `samples_per_prompt`, `greedy` and
    `correct_*`; their metrics are named `eval/NAME/...`."""
    save_samples: Literal["gzip", "plain", "never"] = "gzip"
    """Whether and how to save all samples of an evaluation, one JSON object per line, in
    `eval_samples/step_N/NAME.jsonl.gz` of the run."""
    best_of: BestOfConfig | None = None
    """`rlsdk eval`: a process reward model that chooses among responses; null: none."""
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    """Ends the run if a metric does not improve for some evaluations."""

    def problems(self) -> Iterator[Problem]:
        yield from temperature_problems(self.temperature, can_be_greedy=False)
        if self.every_steps is not None and not self.sets and not self.greedy and self.samples_per_prompt == 0:
            yield Problem("samples_per_prompt", "0 with eval.greedy false leaves nothing to measure")
        for name in self.sets:
            if not SET_NAME.fullmatch(name):
                yield Problem(
                    f"sets.{name}", "expected a name of letters, digits, '_', '.' and '-' that begins with a letter"
                )
        plain = EvalConfig.model_fields
        for field in OF_UNNAMED:
            if self.sets and getattr(self, field) != plain[field].default:
                yield Problem(field, f"{getattr(self, field)!r} has no effect beside eval.sets; each has its own")

    def unused(self) -> Iterator[Problem]:
        if self.sets:
            yield from fields_of(OF_UNNAMED, "each of eval.sets has its own")
        elif not self.samples_per_prompt:
            yield from fields_of(("temperature", "top_p", "top_k"), "eval.samples_per_prompt is 0")

    def measures(self) -> Sequence[Measure]:
        """The measures of an evaluation, in order."""
        if self.sets:
            return [
                Measure(name=name, pattern=f"eval/{name}/{{}}", field=f"eval.sets.{name}", config=part)
                for name, part in self.sets.items()
            ]
        judged: dict[str, Any] = {"correct_reward": self.correct_reward, "correct_from": self.correct_from}
        parts = {}
        if self.samples_per_prompt:
            parts[SAMPLED] = EvalSetConfig(
                samples_per_prompt=self.samples_per_prompt,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                **judged,
            )
        if self.greedy:
            parts[GREEDY] = EvalSetConfig(temperature=0.0, **judged)
        return [
            Measure(name=name, pattern=f"eval/{{}}_{name}", field="eval", config=part) for name, part in parts.items()
        ]


def powers_of_two(count: int) -> list[int]:
    """1, 2, 4, ... up to `count`, and `count` itself."""
    powers = [1 << at for at in range(count.bit_length()) if 1 << at <= count]
    return sorted({*powers, count}) if count else []

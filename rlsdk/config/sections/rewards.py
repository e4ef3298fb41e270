"""Sections of rewards: which rewards, for which rows, and their resource limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Options, Section, empty_mapping, fields_of, unused_revision
from rlsdk.config.sections.engines import DtypeName, PlacementConfig
from rlsdk.config.sections.role_kinds import ACTOR, JUDGE, base_role, judge_role
from rlsdk.config.sections.sampling import temperature_problems
from rlsdk.interfaces.settings import NO_INFLUENCE, JudgeSettings, RequestSettings, RewardLimits

RowValues = Annotated[tuple[str | int | float | bool | None, ...], Field(strict=False)]
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
TAKEN = frozenset({"accuracy", "groups_with_signal", "invalid_share", "mean", "std"})
"""Names under `reward/` that every run logs."""


class RemoteRewardConfig(Section, RequestSettings):
    """Requests to a reward service, for a reward named by a URL. Redirects are not followed and proxies not used."""

    token_env: str | None = None
    """Environment variable whose value is sent as `Authorization: Bearer VALUE`."""
    headers_from_env: dict[str, str] = empty_mapping()
    """Header -> environment variable with its value, so that the configuration holds no secrets."""
    check_at_start: Annotated[bool, NO_INFLUENCE] = True
    """Sends an empty request to the service before the run takes a device."""

    def problems(self) -> Iterator[Problem]:
        for header in self.headers_from_env:
            if not _HEADER.fullmatch(header):
                yield Problem(f"headers_from_env.{header}", expected="the name of a header, such as 'X-Api-Key'")

    def unused(self) -> Iterator[Problem]:
        if not self.retries:
            yield Problem("retry_wait_s", "retries is 0")


class JudgeEngineConfig(Section):
    """A rollout engine of the run as judge; its role is `judge`, or `judge.LABEL`. Its weights are those of its model
    and never change."""

    path: str
    """Folder in Hugging Face format, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub name; null: its main branch."""
    dtype: DtypeName | None = None
    """Dtype of its parameters; null: as `model.dtype`."""
    backend: str | None = None
    """Registered rollout backend; null: as `rollout.backend`."""
    options: Options | None = None
    """The backend's own options; null: those of `rollout` if the backend is the same."""
    engine_kwargs: Options | None = None
    """Passed to the engine's constructor unchanged; null: those of `rollout` if the backend is the same."""
    tp_size: PositiveInt = 1
    """Tensor-parallel size of one replica."""
    max_running_samples: PositiveInt = 64
    """Most samples that one replica decodes at once."""
    max_model_tokens: PositiveInt = 4096
    """Longest question plus reply, in tokens; a sample with a longer question fails."""

    def unused(self) -> Iterator[Problem]:
        return unused_revision(self.path)


class JudgeConfig(Section, JudgeSettings):
    """A model that judges every response: a rollout engine of the run (`engine`), or a service with the OpenAI chat API
    (`url` and `model`; timeouts, retries and secrets are in `remote`)."""

    engine: JudgeEngineConfig | None = None
    """The judge as an engine of the run."""
    url: str | None = None
    """The judge as a service: its URL up to `/v1`, `http://127.0.0.1:8000/v1`."""
    model: str | None = None
    """Name of the model at the service."""
    choices: dict[str, float] = empty_mapping()
    """Verdict -> score, `{yes: 1, no: 0}`, case-insensitive; empty: the verdict is a number."""

    def problems(self) -> Iterator[Problem]:
        yield from temperature_problems(self.temperature, can_be_greedy=True)
        if "{response}" not in self.template:
            yield Problem("template", expected="the placeholder {response}, the text to judge")
        if (self.engine is None) == (self.url is None):
            yield Problem("engine", expected="one of `engine` (a model of the run) and `url` (of a service)")
        if (self.url is None) != (self.model is None):
            yield Problem("model", value=self.model, expected="together with `url`, as the service names it")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield Problem("url", value=self.url, expected="a URL such as http://127.0.0.1:8000/v1")
        if not self.choices and self.highest <= self.lowest:
            yield Problem("highest", value=self.highest, expected=f"more than lowest, which is {self.lowest!r}")
        try:
            groups = 1 if self.pattern is None else re.compile(self.pattern).groups
        except re.error as error:
            yield Problem("pattern", value=self.pattern, expected=f"a regular expression: {error}")
            return
        if groups != 1:
            yield Problem("pattern", value=self.pattern, expected=f"one group, the verdict, and it has {groups}")

    def unused(self) -> Iterator[Problem]:
        if self.choices:
            yield from fields_of(("lowest", "highest"), "choices say the score of each verdict")


class RewardConfig(Section):
    """One term of the reward; a sample's score is the weighted sum of all terms that apply to it. A string is short for
    `name`."""

    name: str
    """A registered reward, `pkg.mod:fn`, `file.py:fn`, the URL of a service (`http://host:8700/score`), or `judge`."""
    label: str | None = None
    """Name in metrics: letters, digits, `-`, `_` and `.`; required if two entries have the same `name`."""
    weight: float = 1.0
    """Factor of this term in the score; 0: only measured and logged, and its failures fail no sample."""
    options: Options = empty_mapping()
    """Keyword arguments of the function."""
    rows: dict[str, RowValues] = empty_mapping()
    """Field of the data row -> values for which this reward applies, `{source: [gsm8k, math]}`. All fields must match;
    null matches rows without the field; `metadata.task` reads nested objects. Empty: every row."""

    remote: RemoteRewardConfig | None = None
    """Request settings if `name` is a URL or `judge`; null: the defaults."""
    judge: JudgeConfig | None = None
    """The judge if `name` is `judge`."""

    @property
    def is_remote(self) -> bool:
        """Whether a service computes this reward."""
        return self.judge is not None or self.name.startswith(("http://", "https://"))

    @property
    def title(self) -> str:
        """Name in metrics: the label, or the function's name if it is named by file or module."""
        short = self.name.rpartition(":")[2]
        return self.label or (self.name if short in TAKEN or "://" in self.name else short)

    def problems(self) -> Iterator[Problem]:
        if self.label is not None and (not _LABEL.fullmatch(self.label) or self.label in TAKEN):
            yield Problem(
                "label",
                value=self.label,
                expected=f"letters, digits, '-', '_' and '.', and none of {sorted(TAKEN)}, which are "
                "metrics of every run",
            )
        if self.remote is not None and not self.is_remote:
            yield Problem("remote", f"belongs to a reward that is named by a URL, or a judge; name is {self.name!r}")
        if (self.name == "judge") != (self.judge is not None):
            yield Problem("judge", f"belongs to the reward named 'judge', which needs it; name is {self.name!r}")
        if self.remote is not None and self.judge is not None and self.judge.engine is not None:
            yield Problem("remote", "belongs to a judge that is a service; this one is an engine of the run")
        if self.is_remote and self.options:
            yield Problem("options", f"{list(self.options)}: a service has options of its own, set where it starts")
        for field, values in self.rows.items():
            if not values:
                yield Problem(f"rows.{field}", "[]: expected at least one value; leave the field out for every row")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data


class RewardLimitsConfig(Section, RewardLimits):
    """Resource limits of rewards. A sample that exceeds a limit has failed: it is counted, and `on_failure` sets its
    score."""

    on_failure: Literal["drop"] | float = "drop"
    """Score of a sample for which a reward of non-zero weight failed, or no reward applies. drop: no score and no
    gradient; a number: this score, with which it is trained on. In both cases it counts as failed."""
    max_failure_share: Annotated[float, NO_INFLUENCE] = Field(default=0.5, ge=0.0, le=1.0)
    """If a larger share of a step's samples fails, the run stops and reports the counts by kind."""
    num_workers: Annotated[PositiveInt | None, NO_INFLUENCE] = None
    """Number of grading processes; null: depends on the number of processors."""


def own_engine_problems(rewards: tuple[RewardConfig, ...]) -> Iterator[Problem]:
    """Problems of judges that only training rewards may have."""
    for at, reward in enumerate(rewards):
        if reward.judge is not None and reward.judge.engine is not None:
            yield Problem(
                f"rewards.{at}.judge.engine",
                "belongs to the rewards of the run, which evaluation sets without rewards of their own share; here "
                "name a service in judge.url",
            )


def judge_pool_problems(
    rewards: tuple[RewardConfig, ...], placement: PlacementConfig, max_staleness: int
) -> Iterator[Problem]:
    """Problems of judges that take turns on devices with models that train while samples wait for them."""
    given = placement.roles
    if not max_staleness or placement.preset is not None:
        return
    for reward in rewards:
        role = judge_role(reward.label)
        pool = given.get(role) or given.get(JUDGE) or given.get(ACTOR)
        beside = sorted(other for other, own in given.items() if own == pool and base_role(other) != JUDGE)
        if reward.judge is not None and reward.judge.engine is not None and beside:
            yield Problem(
                f"placement.roles.{role}",
                value=pool,
                expected=f"a pool of its own, because at schedule.max_staleness {max_staleness} samples are "
                f"judged while {', '.join(beside)} may have the devices of this one",
            )


def reward_problems(rewards: tuple[RewardConfig, ...]) -> Iterator[Problem]:
    """Problems of terms with the same name in metrics."""
    first: dict[str, int] = {}
    for at, reward in enumerate(rewards):
        if first.setdefault(reward.title, at) != at:
            yield Problem(
                f"rewards.{at}.label",
                value=reward.label,
                expected=f"a label of its own, because rewards.{first[reward.title]} is {reward.title!r}, too",
            )

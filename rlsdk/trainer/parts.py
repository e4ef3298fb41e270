"""What a run needs besides engines: tokenizer, prompts, rewards, estimator, objective, trackers, callbacks."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.algorithms import PolicyObjective
from rlsdk.config import RunConfig
from rlsdk.data import Prompt, PromptDataset, PromptStream
from rlsdk.interfaces import (
    AdvantageEstimator,
    Batch,
    BatchError,
    ConfigError,
    PolicyLossInputs,
    RewardSample,
    SamplingParams,
    StepCallback,
    Tracker,
    TrackerContext,
)
from rlsdk.kit.hf import load_tokenizer, stop_token_ids
from rlsdk.registry import ComponentKind, Registry, absolute, load_function
from rlsdk.rewards import RewardDef, RewardLimits, RewardResult, RewardRunner
from rlsdk.trainer.checkpoint import step_of
from rlsdk.trainer.run_data import load_prompts, with_steps

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.trainer.events import RunView


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Made once per run; nothing in it owns a device."""

    config: RunConfig
    """With `trainer.steps` where the run was given `trainer.epochs`."""
    run_dir: Path
    tokenizer: Any
    train_prompts: PromptDataset
    prompts: PromptStream
    """Which of them come next."""
    eval_prompts: Sequence[Prompt]
    rewards: RewardRunner | None
    """None in supervised training, which grades nothing."""
    sampling: SamplingParams
    advantage: AdvantageEstimator
    objective: PolicyObjective
    trackers: Sequence[Tracker]
    callbacks: Sequence[StepCallback]

    def reward_samples(self, batch: Batch, prompts: Sequence[Prompt]) -> list[RewardSample]:
        """One per row."""
        owners = [prompts[uid] for uid in batch["uid"].tolist()]
        texts = self.decode_responses(batch)
        cut = batch["truncated"].tolist()
        return [
            RewardSample(prompt=p.text, response=text, answer=p.answer, row=p.row, truncated=truncated)
            for p, text, truncated in zip(owners, texts, cut, strict=True)
        ]

    def decode_responses(self, batch: Batch) -> list[str]:
        """Text of each row's response."""
        mask = batch["response_mask"]
        flat = batch["input_ids"][mask].tolist()
        ends = batch.row_sum(mask.long()).cumsum(0).tolist()
        ids = [flat[start:end] for start, end in pairwise([0, *ends])]
        return decode(self.tokenizer, ids, self.sampling.stop_token_ids)

    def score(self, batch: Batch, prompts: Sequence[Prompt]) -> RewardResult:
        """Every row's reward. Never raises for what a reward function does."""
        if self.rewards is None:
            raise ConfigError("rewards: expected at least one; this run was set up without any")
        return self.rewards.score(self.reward_samples(batch, prompts))

    def track(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Tells every tracker."""
        for tracker in self.trackers:
            tracker.log(step, metrics)
            if samples:
                tracker.log_samples(step, samples)

    def show_samples(self, batch: Batch, prompts: Sequence[Prompt], rewards: RewardResult) -> list[Mapping[str, Any]]:
        """A few rows with their text, one from each of several prompts."""
        wanted = self.config.tracking.samples_per_step
        stride = max(batch.num_rows // max(wanted, 1), 1)
        rows = list(range(0, batch.num_rows, stride))[:wanted]
        picked = batch.select(rows)
        owners = [prompts[uid] for uid in picked["uid"].tolist()]
        texts = self.decode_responses(picked)
        return [
            {
                "prompt": prompt.text,
                "response": text,
                "answer": prompt.answer,
                "score": float(rewards.scores[row]),
                **{f"reward/{name}": float(values[row]) for name, values in rewards.by_reward.items()},
                "advantage": float(
                    picked.row_sum(picked["advantages"])[at]
                    / max(int(picked.row_sum(picked["response_mask"].long())[at]), 1)
                ),
            }
            for at, (row, prompt, text) in enumerate(zip(rows, owners, texts, strict=True))
        ]

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()
        for tracker in self.trackers:
            tracker.close()


def decode(tokenizer: Any, responses: Sequence[Sequence[int]], stop_token_ids: Sequence[int]) -> list[str]:
    """Text of each response without the token that ended it. Other special tokens stay visible: left out, they would
    make a response that a model spoilt with them look right."""
    bare = [ids[:-1] if ids and ids[-1] in stop_token_ids else ids for ids in responses]
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        # What `batch_decode` does in the end; row by row it costs ten times as much.
        texts: list[str] = tokenizer.backend_tokenizer.decode_batch(bare, skip_special_tokens=False)
    else:
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in bare]
    return texts


def resolve_rewards(config: RunConfig, registry: Registry) -> list[RewardDef]:
    """Registered names become import strings; everything else is a path to a function, looked up now so that a typo
    shows before any device is taken.

    Raises:
        ConfigError: no reward at all, or one that cannot be found.
    """
    if not config.rewards:
        names = registry.usable(ComponentKind.REWARD)
        raise ConfigError(
            f"rewards: expected at least one; give --reward NAME with one of {names}, or file.py:function"
        )
    found = []
    for reward in config.rewards:
        target = reward.name
        if ":" not in target:
            registered = registry.target(ComponentKind.REWARD, target)
            if not isinstance(registered, str):
                raise ConfigError(
                    f"rewards: {target!r} was registered as an object; it must be named as 'package.module:function', "
                    "because rewards run in a process of their own"
                )
            target = registered
        found.append(RewardDef(name=reward.name, target=target, weight=reward.weight, options=dict(reward.options)))
    return found


def start_rewards(config: RunConfig, registry: Registry, run_dir: Path) -> RewardRunner:
    """The grading processes; their imports go on in the background."""
    limits = RewardLimits(timeout_s=config.reward_limits.timeout_s, memory_mb=config.reward_limits.memory_mb)
    workers = config.reward_limits.num_workers or max(1, min(8, (os.cpu_count() or 1) // 2))
    logs = run_dir / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    runner = RewardRunner(resolve_rewards(config, registry), limits, num_workers=workers, log_path=logs / "rewards.log")
    runner.start()
    return runner


def load_run_tokenizer(config: RunConfig) -> Any:
    """The policy's tokenizer."""
    return load_tokenizer(
        config.model.tokenizer or config.model.path or "",
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )


def build_parts(
    config: RunConfig,
    registry: Registry,
    run_dir: Path,
    view: RunView,
    *,
    rewarded: bool = True,
    resume: Path | None = None,
) -> RunParts:
    """Everything that can be made, and can fail, before a worker exists. Supervised training needs no reward; `resume`
    is the checkpoint that the run goes on from."""
    rewards = start_rewards(config, registry, run_dir) if rewarded else None
    tokenizer = load_run_tokenizer(config)
    train, evaluation = load_prompts(config, registry, tokenizer, view)
    config = with_steps(config, len(train))
    algorithm = config.algorithm
    return RunParts(
        config=config,
        run_dir=run_dir,
        tokenizer=tokenizer,
        train_prompts=train,
        prompts=PromptStream(train, seed=config.trainer.seed, shuffle=config.data.shuffle),
        eval_prompts=list(evaluation or ()),
        rewards=rewards,
        sampling=sampling_params(config, tokenizer),
        advantage=registry.function(ComponentKind.ADVANTAGE, algorithm.advantage),
        objective=PolicyObjective(
            loss=_loss_target(config, registry),
            loss_options=dict(algorithm.loss_options),
            kl_coef=0.0 if algorithm.kl_in_reward else algorithm.kl_coef,
            kl_estimator=algorithm.kl_estimator,
            entropy_coef=algorithm.entropy_coef,
        ),
        trackers=build_trackers(config, registry, run_dir, None if resume is None else step_of(resume)),
        callbacks=[registry.function(ComponentKind.CALLBACK, name) for name in config.trainer.callbacks],
    )


def sampling_params(config: RunConfig, tokenizer: Any) -> SamplingParams:
    """How training samples are drawn."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=stop_token_ids(
            tokenizer, config.model.path, rollout.stop_token_ids, revision=config.model.revision
        ),
        stop_strings=rollout.stop_strings,
    )


def build_trackers(
    config: RunConfig, registry: Registry, run_dir: Path, resume_step: int | None = None
) -> list[Tracker]:
    return [
        registry.component(ComponentKind.TRACKER, name)(
            TrackerContext(
                run_dir=str(run_dir),
                run_name=run_dir.name,
                config=config.model_dump(mode="json"),
                options=config.tracking.options.get(name, {}),
                resume_step=resume_step,
            )
        )
        for name in config.tracking.trackers
    ]


def _loss_target(config: RunConfig, registry: Registry) -> Any:
    name = config.algorithm.loss
    if ".py:" in name:
        return LossOfFile(absolute(name))
    return name if ":" in name else registry.target(ComponentKind.LOSS, name)


@dataclass(frozen=True)
class LossOfFile:
    """A policy loss of a file, which must be at the same place on every node: it goes to the workers as its name."""

    target: str

    def __call__(self, inputs: PolicyLossInputs, **options: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """As the function does, loaded in this process."""
        losses: tuple[Tensor, Mapping[str, Tensor]] = self._function(inputs, **options)
        return losses

    @property
    def zero_without_advantage(self) -> bool:
        """What the function promises."""
        return bool(getattr(self._function, "zero_without_advantage", False))

    @property
    def _function(self) -> Any:
        return _loaded_loss(self.target)


@functools.cache
def _loaded_loss(target: str) -> Any:
    """Once for a process: it is asked for in every micro-batch."""
    return load_function(target, what="policy loss", takes=("inputs",))


def check_failures(result: RewardResult, config: RunConfig, view: RunView) -> None:
    """Shows what went wrong with rewards.

    Raises:
        BatchError: more samples failed than `reward_limits.max_failure_share` allows.
    """
    failed = int((~result.valid).sum())
    if not failed:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.failures.items()))
    share = failed / len(result.valid)
    view.notice(f"rewards: {failed} of {len(result.valid)} samples have no score ({kinds}); {_example(result)}")
    if share > config.reward_limits.max_failure_share:
        raise BatchError(
            f"rewards: {share:.0%} of the samples have no score ({kinds}), more than reward_limits.max_failure_share "
            f"{config.reward_limits.max_failure_share:.0%}. {_example(result)}"
        )


def _example(result: RewardResult) -> str:
    """The first failure, in words."""
    first = next(iter(result.examples), None)
    return f"first: {first.kind} in {first.reward!r}, sample {first.sample}: {first.message}" if first else ""

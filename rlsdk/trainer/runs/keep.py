"""Samples that are graded and kept as rows to train on: rejection sampling, and pairs for preference training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.config import RunConfig
from rlsdk.config.sections.evaluation import HELD_OUT
from rlsdk.data import DataRow, PromptDataset, PromptStream
from rlsdk.data.rows import JsonValue
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.interfaces.spelling import Setting
from rlsdk.rollouts import Group, Sample, request_seed
from rlsdk.system.temporary import held_folder
from rlsdk.trainer.checkpoints.run_folder import Notice
from rlsdk.trainer.generation.sampler import Draw, sample_all
from rlsdk.trainer.inputs.data import load_prompts
from rlsdk.trainer.inputs.prompt_formats import prompt_format
from rlsdk.trainer.inputs.run_rewards import RunRewards, start_run_rewards
from rlsdk.trainer.inputs.tokenizer import load_run_tokenizer, sampling_params
from rlsdk.trainer.roles.placement import resolve_device
from rlsdk.trainer.runs.build_stream import open_stream
from rlsdk.trainer.runs.inference import check_no_judges, known_ends, open_rollout
from rlsdk.trainer.runs.keep_rules import Keeping, KeepRule
from rlsdk.trainer.runs.sampled_log_probs import LogProbs
from rlsdk.trainer.tracking.events import RunView

if TYPE_CHECKING:
    from rlsdk.registry import Registry

REFERENCE = "reference"
"""Field of a kept row with the answer that the data had; its answer field holds the sample."""


@dataclass(frozen=True, kw_only=True)
class KeepReport:
    """What became of the samples."""

    num_prompts: int
    num_samples: int
    num_failed: int
    """Without a score."""
    num_cut: int
    """Ended by their limit of tokens, not by the model."""
    num_rows: int
    """Rows that were kept."""
    num_without: int
    """Prompts of which no row was kept."""
    mean_score: float
    """Over the samples with a score; NaN without any."""

    def line(self, rule: KeepRule) -> str:
        """The report on one line."""
        kept = f"kept {self.num_rows:,} {'pairs' if rule.keeping is Keeping.PAIRS else 'answers'}"
        sampled = f"{self.num_samples:,} samples of {self.num_prompts:,} prompts"
        score = "" if math.isnan(self.mean_score) else f", mean score {self.mean_score:.3g}"
        parts = [f"{kept} of {sampled}{score}"]
        if self.num_without:
            parts.append(f"{self.num_without:,} prompts without any")
        if self.num_cut:
            kept = "kept, too" if rule.keeping is Keeping.ALL else "never kept"
            parts.append(f"{self.num_cut:,} samples cut at rollout.max_response_tokens, {kept}")
        if self.num_failed:
            parts.append(f"{self.num_failed:,} without a score")
        return "; ".join(parts)


def kept_rows(
    rows: Sequence[DataRow], groups: Sequence[Group], rule: KeepRule, answer_field: str | None, *, graded: bool = True
) -> tuple[list[Mapping[str, JsonValue]], KeepReport]:
    """The rows to train on, by prompt, and the report.

    Args:
        rows: of the prompts, as selected.
        groups: the graded samples of each prompt.
        rule: which are kept.
        answer_field: `data.answer_field`; None: the one that was found in each row's source.
        graded: rewards gave the samples scores.
    """
    kept = [list(_kept_of(row, group, rule, answer_field, graded)) for row, group in zip(rows, groups, strict=True)]
    samples = [sample for group in groups for sample in group.samples]
    scores = [sample.total for sample in samples if graded and not sample.grade.has_failed]
    report = KeepReport(
        num_prompts=len(groups),
        num_samples=len(samples),
        num_failed=len(samples) - len(scores) if graded else 0,
        num_cut=sum(sample.truncated for sample in samples),
        num_rows=sum(map(len, kept)),
        num_without=sum(not part for part in kept),
        mean_score=math.fsum(scores) / len(scores) if scores else math.nan,
    )
    return list(chain.from_iterable(kept)), report


def _kept_of(
    row: DataRow, group: Group, rule: KeepRule, answer_field: str | None, graded: bool
) -> Iterator[Mapping[str, JsonValue]]:
    made = [sample for sample in group.samples if sample.rows]
    if rule.keeping is Keeping.ALL:
        yield from (_answered(row, sample, answer_field, graded) | {"truncated": sample.truncated} for sample in made)
        return
    usable = [sample for sample in made if not sample.grade.has_failed and not sample.truncated]
    if not usable:
        return
    best, worst = max(usable, key=_score), min(usable, key=_score)
    match rule.keeping:
        case Keeping.BEST:
            yield _answered(row, best, answer_field)
        case Keeping.ABOVE:
            first: dict[str, Sample] = {}
            for sample in usable:
                if sample.total > rule.above:
                    first.setdefault(sample.text, sample)
            yield from (_answered(row, sample, answer_field) for sample in first.values())
        case Keeping.PAIRS:
            if best.total > worst.total and best.text != worst.text:
                scores = {"chosen_score": best.total, "rejected_score": worst.total}
                yield {**_asked(row), "chosen": best.text, "rejected": worst.text, **scores}


def _score(sample: Sample) -> float:
    return sample.total


def _answered(row: DataRow, sample: Sample, answer_field: str | None, graded: bool = True) -> dict[str, JsonValue]:
    """The row with a sample as its answer, in the field where `sft` looks for one."""
    made = {**row.row, "score": sample.total} if graded and not sample.grade.has_failed else dict(row.row)
    if row.answer is not None:
        made[REFERENCE] = row.answer
    turns = row.row.get(row.fields.prompt)
    if row.is_split and isinstance(turns, list):
        return {**made, row.fields.prompt: [*turns[:-1], {"role": "assistant", "content": sample.text}]}
    name = answer_field or row.fields.answer
    # A nested field cannot be replaced by its name; `answer` is found before it.
    return {**made, name if name in row.row else "answer": sample.text}


def _asked(row: DataRow) -> Mapping[str, JsonValue]:
    """The row without the answer that its conversation ended in."""
    turns = row.row.get(row.fields.prompt)
    if row.is_split and isinstance(turns, list):
        return {**row.row, row.fields.prompt: turns[:-1]}
    return row.row


class _Notices(RunView):
    """Passes notices on."""

    def __init__(self, notice: Notice) -> None:
        self._notice = notice

    def notice(self, text: str) -> None:
        self._notice(text)


def keep_samples(
    config: RunConfig,
    registry: Registry,
    rule: KeepRule,
    *,
    num_prompts: int | None,
    num_samples: int,
    notice: Notice,
    log_probs: LogProbs | None = None,
) -> list[Mapping[str, JsonValue]]:
    """Samples and grades responses to training prompts; returns the rows that are kept. Held-out rows are never used.

    Args:
        config: with `model.path`, the model that samples.
        registry: the installed backends and components.
        rule: which samples are kept.
        num_prompts: of the training prompts, in the order of `data.shuffle` and `trainer.seed`; None: all.
        num_samples: responses per prompt.
        notice: receives the report.
        log_probs: which log-probs of the samples are written, and where.

    Raises:
        ConfigError: there is no data or no reward, the samples have several turns, or the rollout engine gives no
            log-probs of prompts.
        DataError: no sample is kept.
    """
    _check(config, rule, num_samples)
    served = config
    if log_probs is not None:
        log_probs.check(config, registry, rule)
        served = log_probs.with_room(config)
    with held_folder("generate") as folder, ExitStack() as stack:
        logs, form = Path(folder), prompt_format(config)
        rewards = start_run_rewards(config, registry, logs, ()) if config.rewards else RunRewards()
        stack.callback(rewards.close)
        check_no_judges(rewards)
        tokenizer = load_run_tokenizer(config.model)
        train = load_prompts(config, registry, tokenizer, _Notices(notice), measures=[HELD_OUT]).train
        prompts = _first(train, config, num_prompts)
        sampling = sampling_params(config.rollout, known_ends(config, tokenizer, [prompts], notice))
        rewards.wait_ready()
        rollout = open_rollout(served, registry, device=resolve_device(config.placement), log_dir=logs)
        group = stack.enter_context(rollout).group
        draw = Draw(source="train", num_samples=num_samples, sampling=sampling)
        with closing(open_stream(config, registry, group, tokenizer, rewards, notice)) as stream:
            groups = sample_all(stream, list(prompts), draw, seed=(config.trainer.seed, "keep"))
        rows, report = kept_rows(prompts.rows, groups, rule, form.answer_field, graded=bool(config.rewards))
        if log_probs is not None and rows:
            log_probs.write(config, rule, groups, group, tokenizer)
    notice(report.line(rule))
    if not rows:
        limit = config.rollout.max_response_tokens
        way_out = (
            f"Let answers be longer ({Setting('rollout.max_response_tokens', 2 * limit)})"
            if report.num_cut > report.num_samples // 2
            else f"Sample more responses of each prompt ({Setting('samples_per_prompt', 2 * num_samples)})"
        )
        raise DataError(f"generate: {report.line(rule)}: nothing to train on. {way_out}, or keep others")
    return rows


def _first(train: PromptDataset, config: RunConfig, count: int | None) -> PromptDataset:
    """The first prompts of an epoch, in ascending order."""
    if count is None or count >= len(train):
        return train
    stream = PromptStream(train, seed=request_seed(config.trainer.seed, "keep"), shuffle=config.data.shuffle)
    return train.subset(sorted({prompt.index for prompt in stream.take(count)}))


def _check(config: RunConfig, rule: KeepRule, num_samples: int) -> None:
    if config.data.train is None and not config.data.mixture:
        raise ConfigError(f"data.train: expected the prompts to sample; give {Setting('data.train', 'SOURCE')}")
    if not config.rewards and rule.keeping is not Keeping.ALL:
        raise ConfigError(
            f"rewards: expected what grades the samples; give {Setting('rewards', '[{name: NAME}]')}, or keep all "
            f"({Setting('keep', 'all')})"
        )
    if not config.rollout.is_single_turn:
        made = config.rollout.environment or config.rollout.rollouter
        raise ConfigError(
            f"rollout: samples of {made!r} have several turns and are not kept as rows, which hold one answer; leave "
            "rollout.rollouter and rollout.environment out"
        )
    if rule.keeping is Keeping.PAIRS and num_samples < 2:
        raise ConfigError(
            f"samples_per_prompt: {num_samples}: pairs need at least 2 responses to a prompt; give "
            f"{Setting('samples_per_prompt', 8)}"
        )

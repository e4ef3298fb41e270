"""Metrics that something depends on (best checkpoint, early stopping), and those that evaluations can report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlsdk.config.derived.pair_roles import PairTraining
from rlsdk.config.problem import Problem
from rlsdk.config.sections.evaluation import AT_K, FIGURES, MAX_VOTES, Measure, powers_of_two
from rlsdk.config.sections.schema import RunConfig
from rlsdk.interfaces import nearest

SFT_METRICS = ("sft/eval_loss", "sft/eval_loss_se")
"""Metrics of the evaluations of `rlsdk sft`."""
_OF_REWARD_MODEL = ("loss", "accuracy", "score_margin", "score")
_OF_DPO = ("loss", "accuracy", "reward_margin", "chosen_reward", "rejected_reward", "chosen_nll")
_OF_KTO = ("loss", "accuracy", "kl", "reward_margin")
_OF_PROCESS_REWARD = ("loss", "accuracy", "score", "label")
_NAMES_SHOWN = 12


@dataclass(frozen=True)
class Reported:
    """What the evaluations of a run can report."""

    metrics: Sequence[str]
    prefixes: Sequence[str] = ()
    """Beginnings of the names of metrics that only samples show."""

    def includes(self, metric: str) -> bool:
        return metric in self.metrics or any(metric.startswith(prefix) for prefix in self.prefixes)


def watched(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Field and metric of everything that depends on the value of a metric."""
    fields = {"checkpoint.best": config.checkpoint.best, "eval.early_stopping": config.eval.early_stopping}
    return ((f"{path}.metric", watch.metric) for path, watch in fields.items() if watch.metric is not None)


def watch_problems(config: RunConfig, reported: Reported) -> Iterator[Problem]:
    """Problems of metrics that something depends on but no evaluation can report."""
    for path, metric in watched(config):
        if config.eval.every_steps is None:
            yield Problem(path, f"{metric!r} is never measured: eval.every_steps is null")
        elif not reported.includes(metric):
            near = _wrong_k(config, metric) or nearest(metric, reported.metrics) or _listed(reported.metrics)
            yield Problem(path, f"{metric!r} is not a metric of the evaluations{near}")


def reported_in_rl(config: RunConfig) -> Reported:
    """What the evaluations of `rlsdk train` can report. Whether answers are marked, so that there is a maj@k, or a
    sample fails, so that there is an invalid_share, is known only in an evaluation."""
    metrics: list[str] = []
    prefixes: list[str] = []
    for measure in config.eval.measures():
        own = measure.config.rewards
        titles = [reward.title for reward in own] if own else config.reward_titles
        missing = set() if titles else {"accuracy", "accuracy_se"}
        # Reward models do not score evaluations, so with them there is no score to report, as without any reward.
        unscored = config.reward_models or not titles
        missing |= {"reward", "reward_se"} if unscored and not own else set()
        figures = [*(figure for figure in FIGURES if figure not in missing), *(f"reward/{title}" for title in titles)]
        metrics += map(measure.metric, [*figures, *(_of_several_samples(measure) if titles else ())])
        if not config.rollout.is_single_turn:
            prefixes.append(measure.pattern.partition("{}")[0] + "rollout/")
    return Reported(metrics, prefixes)


def reported_in_sft() -> Reported:
    """What the evaluations of `rlsdk sft` can report."""
    return Reported(SFT_METRICS)


def reported_on_pairs(config: RunConfig, kind: PairTraining) -> Reported:
    """What the evaluations of `rlsdk dpo`, `kto`, `reward-model` and `process-reward` report."""
    of_kind = {
        PairTraining.REWARD_MODEL: _OF_REWARD_MODEL,
        PairTraining.DPO: _OF_DPO,
        PairTraining.KTO: _OF_KTO,
        PairTraining.PROCESS_REWARD: _OF_PROCESS_REWARD,
    }
    figures = of_kind[kind]
    if kind is PairTraining.DPO and config.preferences.nll_coef:
        figures = (*figures, "sft_loss")
    return Reported([f"eval/{figure}_pairs" for figure in figures])


def _of_several_samples(measure: Measure) -> Iterator[str]:
    """Metrics that need several samples of a prompt."""
    num_samples = measure.config.samples_per_prompt
    if num_samples < 2:
        return
    yield "answered_share"
    for k in powers_of_two(num_samples):
        yield f"pass@{k}"
        if k == num_samples or num_samples <= MAX_VOTES:
            yield f"maj@{k}"


def _wrong_k(config: RunConfig, metric: str) -> str:
    """What is said of a pass@k or maj@k that no set has; empty for other metrics."""
    for measure in config.eval.measures():
        if not re.fullmatch(re.escape(measure.pattern).replace(r"\{\}", AT_K.pattern), metric):
            continue
        field, count = f"{measure.field}.samples_per_prompt", measure.config.samples_per_prompt
        if known := [measure.metric(figure) for figure in _of_several_samples(measure) if AT_K.fullmatch(figure)]:
            return f": {field} is {count}, so there are {', '.join(known)}"
        return f": it needs several samples of a prompt, but {field} is {count}"
    return ""


def _listed(metrics: Sequence[str]) -> str:
    more = f" and {len(metrics) - _NAMES_SHOWN} more" if len(metrics) > _NAMES_SHOWN else ""
    return f"; they have {', '.join(metrics[:_NAMES_SHOWN])}{more}"

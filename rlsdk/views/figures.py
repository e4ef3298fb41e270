"""Formats evaluation metrics for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from rlsdk.config import RunConfig

_NAMED = re.compile(r"eval/(?P<set>[^/]+)/(?P<figure>.+)")
_UNNAMED = re.compile(r"eval/(?P<figure>.+)_(?P<set>[a-z]+)")
_AT_K = re.compile(r"(pass|maj|best)@(\d+)")


def by_set(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Set -> metric -> value, from the metrics of an evaluation."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        # `eval/reward/NAME_sampled` has a slash, too: its set is named at the end.
        match = _UNNAMED.fullmatch(name) if _is_unnamed(name, metrics) else _NAMED.fullmatch(name)
        if match is not None:
            found.setdefault(match["set"], {})[match["figure"]] = value
    return found


def _is_unnamed(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether the set is a suffix of a metric's name: there is an accuracy with such a name."""
    match = _UNNAMED.fullmatch(name)
    return match is not None and any(f"eval/{figure}_{match['set']}" in metrics for figure in ("accuracy", "loss"))


def eval_lines(step: int, metrics: Mapping[str, float], rules: Mapping[str, str]) -> Iterator[str]:
    """A line per set: accuracy and its definition, then the other metrics."""
    if "sft/eval_loss" in metrics:
        error = metrics.get("sft/eval_loss_se")
        spread = f" \N{PLUS-MINUS SIGN}{error:.4f}" if error else ""
        yield f"eval after step {step}: loss of held-out answers {metrics['sft/eval_loss']:.4f}{spread}"
    for name, figures in by_set(metrics).items():
        parts = [_accuracy(figures, rules.get(name))] if "accuracy" in figures else []
        if "reward" in figures and figures["reward"] != figures.get("accuracy"):
            parts.append(f"reward {_number(figures, 'reward')}")
        if largest := _largest_k(figures):
            parts += [
                f"{at} {figures[at]:.1%}"
                for at in (f"pass@{largest}", f"maj@{largest}", f"best@{largest}")
                if at in figures
            ]
        if "loss" in figures:
            parts.append(f"loss {figures['loss']:.4f}")
        if "tokens" in figures:
            parts.append(f"{figures['tokens']:.0f} tokens")
        parts += [
            f"{word} {figures[figure]:.1%}"
            for figure, word in (("truncated_share", "truncated"), ("invalid_share", "without a grade"))
            if figures.get(figure)
        ]
        yield f"eval after step {step}, {name}: {', '.join(parts)}"


FIGURES = {"reward": "reward/mean", "accuracy": "reward/accuracy", "tokens a response": "response/tokens_mean",
           "loss": "sft/loss", "loss of pairs": "reward_model/loss", "accuracy of pairs": "reward_model/accuracy",
           "DPO loss": "dpo/loss", "DPO accuracy": "dpo/accuracy"}  # fmt: skip
"""What people call a metric of steps."""


def named(metrics: Mapping[str, float], other: Mapping[str, float]) -> dict[str, str]:
    """The main figures of an evaluation, under the words that people use for them: `accuracy, greedy`. A reward that
    is the accuracy, in this evaluation and in the `other` one, is left out."""
    found: dict[str, str] = {}
    others = by_set(other)
    if "sft/eval_loss" in metrics:
        found["loss of held-out answers"] = f"{metrics['sft/eval_loss']:.4f}"
    for name, figures in by_set(metrics).items():
        if not math.isnan(figures.get("accuracy", math.nan)):
            found[f"accuracy, {name}"] = share(figures, "accuracy")
        both = [one for one in (figures, others.get(name, {})) if "reward" in one]
        if "reward" in figures and any(one["reward"] != one.get("accuracy") for one in both):
            found[f"reward, {name}"] = _number(figures, "reward")
        if "loss" in figures:
            found[f"loss, {name}"] = f"{figures['loss']:.4f}"
        if "tokens" in figures:
            found[f"tokens a response, {name}"] = f"{figures['tokens']:.0f}"
    return found


def named_step(metrics: Mapping[str, float]) -> dict[str, str]:
    """The main figures of a training step, under the words that people use for them."""
    in_percent = {name for name in FIGURES.values() if name.endswith("/accuracy")}
    return {
        words: f"{metrics[name]:.1%}" if name in in_percent else f"{metrics[name]:.4g}"
        for words, name in FIGURES.items()
        if name in metrics and not math.isnan(metrics[name])
    }


def figure_lines(metrics: Mapping[str, float], rules: Mapping[str, str]) -> Iterator[str]:
    """Every metric on its own line, with an explanation if needed."""
    sets = by_set(metrics)
    width = max(map(len, metrics), default=0) + 2
    for name, value in metrics.items():
        note = next(
            (f"  correct: {rules[part]}" for part in sets if part in rules and name == _accuracy_of(part, metrics)), ""
        )
        yield f"{name:<{width}}{value:.4f}{note}"


def gains(config: RunConfig, first: Mapping[str, float], last: Mapping[str, float]) -> Iterator[str]:
    """Change from the first to the last evaluation, by set; empty if they are the same evaluation."""
    if first == last:
        return
    before, after = by_set(first), by_set(last)
    for measure in config.eval.measures():
        old, new = before.get(measure.name, {}), after.get(measure.name, {})
        for figure, text, form in (("accuracy", share, "+.1%"), ("reward", _number, "+.3f")):
            gain = new.get(figure, math.nan) - old.get(figure, math.nan)
            if not math.isnan(gain):  # the reward where no reward says what is right
                at = f"{figure} on held-out prompts, {measure.name}"
                yield f"{at}: {text(old, figure)} before, {text(new, figure)} after ({gain:{form}})"
                break


def share(figures: Mapping[str, float], name: str) -> str:
    """A value in percent, with its standard error if known."""
    if math.isnan(figures[name]):
        return "unknown"
    error = figures.get(f"{name}_se")
    return f"{figures[name]:.1%}" + (f" \N{PLUS-MINUS SIGN}{error:.1%}" if error else "")


def _accuracy(figures: Mapping[str, float], rule: str | None) -> str:
    if rule and math.isnan(figures["accuracy"]) and figures.get("invalid_share", 0.0) < 1:
        return f"accuracy - (several values of {rule}: say with eval.correct_from what is right)"
    return f"accuracy {share(figures, 'accuracy')}" + (f" ({rule})" if rule else "")


def _number(figures: Mapping[str, float], name: str) -> str:
    if math.isnan(figures[name]):
        return "unknown"
    error = figures.get(f"{name}_se")
    return f"{figures[name]:.3f}" + (f" \N{PLUS-MINUS SIGN}{error:.3f}" if error else "")


def _largest_k(figures: Mapping[str, float]) -> int:
    return max((int(match[2]) for name in figures if (match := _AT_K.fullmatch(name))), default=0)


def _accuracy_of(name: str, metrics: Mapping[str, float]) -> str:
    unnamed = f"eval/accuracy_{name}"
    return unnamed if unnamed in metrics else f"eval/{name}/accuracy"

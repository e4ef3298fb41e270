"""Detects a run that cannot learn, and reports the probable cause and where to look."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsdk.config.sections.algorithm import POLICY_GRADIENT
from rlsdk.config.sections.old_log_probs import cuts_of
from rlsdk.interfaces.spelling import Setting, spell
from rlsdk.registry import ComponentKind

if TYPE_CHECKING:
    from rlsdk.config import RunConfig, TrainerConfig
    from rlsdk.registry import Registry

PATIENCE = 3
"""Number of consecutive steps with a symptom before a warning."""
SAMPLES = "samples.jsonl in the run's folder shows responses with their scores"


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """A problem that shows in a step's metrics."""

    name: str
    is_shown: Callable[[Mapping[str, float]], bool]
    describe: Callable[[Mapping[str, float]], str]
    patience: int = PATIENCE
    """Consecutive steps before a warning."""


ADVANTAGES = "advantages"
"""Beside the metrics of a step: 1 if some token had an advantage. An estimator that compares no samples of a prompt
gives advantages where `reward/groups_with_signal` is 0, for instance with one sample a prompt."""


def _is_uniform(metrics: Mapping[str, float]) -> bool:
    """Whether all samples of the step got the same score, up to rounding."""
    return metrics.get("reward/std", 1.0) <= 1e-12 * abs(metrics.get("reward/mean", 0.0))


def _has_no_signal(metrics: Mapping[str, float]) -> bool:
    if metrics.get("teacher/tokens"):
        return False  # Teachers give advantages whatever the scores are.
    same = metrics.get("reward/groups_with_signal") == 0.0 and metrics.get("reward/invalid_share", 0.0) < 1.0
    return same and (not metrics.get(ADVANTAGES) or _is_uniform(metrics))


def _is_saturated(metrics: Mapping[str, float]) -> bool:
    return _has_no_signal(metrics) and metrics.get("reward/accuracy") == 1.0


def _describe_no_signal(metrics: Mapping[str, float]) -> str:
    same = _is_uniform(metrics)
    every = "every sample" if same else "every sample of a prompt"
    likely = (
        "The reward may never find what it looks for (the answer's mark, the field of the reference), the task may be "
        "too hard for this model, or responses may be cut"
        if same
        else "Prompts may be too easy or too hard each: more samples_per_prompt, another temperature, or other data"
    )
    seen = f"{every} got the same score (mean {metrics.get('reward/mean', 0.0):.3g})"
    if metrics.get("policy/grad_norm", 0.0) > 0:
        others = "what moves the weights are other terms (a KL, the entropy, a critic)"
        return f"{seen}, so scores give no gradient; {others}. {likely}; {SAMPLES}"
    return f"{seen}, so there is no gradient. {likely}; {SAMPLES}"


def _is_not_finite(metrics: Mapping[str, float]) -> bool:
    values = [metrics.get(f"{area}/{name}", 0.0) for area in ("policy", "critic") for name in ("grad_norm", "loss")]
    skipped = metrics.get("policy/skipped_updates", 0.0) + metrics.get("critic/skipped_updates", 0.0)
    return skipped > 0 or not all(map(math.isfinite, values))


def _is_dead(metrics: Mapping[str, float]) -> bool:
    """Whether samples differ in score, and the gradient is exactly 0 all the same."""
    differ = metrics.get("reward/groups_with_signal", 0.0) > 0.0
    return differ and metrics.get("policy/grad_norm") == 0.0 and not _is_not_finite(metrics)


def _describe_dead(metrics: Mapping[str, float]) -> str:
    return (
        "scores differ, and yet the gradient is exactly 0. Either no response counts in the loss (algorithm.lengths, "
        "algorithm.correction, entropy_share), or the policy no longer depends on its weights, because an update made "
        f"them so large that its probabilities are 0, 1 or all equal (policy/entropy "
        f"{metrics.get('policy/entropy', math.nan):.4g} nats). The learning rate is too high then (policy/lr "
        f"{metrics.get('policy/lr', math.nan):.3g}, train.optim.lr), and these weights do not recover: start from "
        f"scratch with a lower one, such as `{Setting('train.optim.lr', 1e-6)}`, or resume a checkpoint of before"
    )


SYMPTOMS = (
    Symptom(
        name="saturated",
        is_shown=_is_saturated,
        describe=lambda _: "every sample is correct, so there is nothing left to learn here. Stop, or take harder data",
    ),
    Symptom(
        name="no_signal", is_shown=lambda m: _has_no_signal(m) and not _is_saturated(m), describe=_describe_no_signal
    ),
    Symptom(
        name="not_finite",
        is_shown=_is_not_finite,
        describe=lambda m: (
            "gradients are not finite, and such updates are left out. The learning rate may be too high "
            f"(train.optim.lr), rewards too large (reward/mean {m.get('reward/mean', 0.0):.3g}), or float16 too narrow "
            "(model.dtype bfloat16)"
        ),
    ),
    Symptom(name="dead", is_shown=_is_dead, describe=_describe_dead, patience=1),
    Symptom(
        name="truncated",
        is_shown=lambda m: m.get("response/truncated_share") == 1.0,
        describe=lambda m: (
            f"every response was cut at its limit ({m.get('response/tokens_max', 0.0):.0f} tokens), so none has ended. "
            f"Raise rollout.max_response_tokens, or check that the model knows how to end: {SAMPLES}"
        ),
    ),
)


def supervised_symptoms(label: str, field: str) -> Sequence[Symptom]:
    """The symptoms of training on answers, or on pairs.

    Args:
        label: prefix of its metrics.
        field: its learning rate.
    """

    def is_finite(metrics: Mapping[str, float]) -> bool:
        return all(math.isfinite(metrics[f"{label}/{name}"]) for name in ("grad_norm", "loss"))

    def is_dead(metrics: Mapping[str, float]) -> bool:
        return metrics[f"{label}/grad_norm"] == 0.0 and is_finite(metrics)

    return (
        Symptom(
            name="not_finite",
            is_shown=lambda m: not is_finite(m),
            describe=lambda m: (
                f"loss or gradient are not finite ({label}/loss {m[f'{label}/loss']:.3g}), and such updates are left "
                f"out. The learning rate may be too high ({field}), or float16 too narrow (model.dtype bfloat16)"
            ),
        ),
        Symptom(
            name="learned",
            is_shown=lambda m: is_dead(m) and m[f"{label}/loss"] == 0.0,
            describe=lambda _: "loss and gradient are exactly 0: there is nothing left to learn here",
        ),
        Symptom(
            name="dead",
            is_shown=lambda m: is_dead(m) and m[f"{label}/loss"] != 0.0,
            describe=lambda m: (
                f"the gradient is exactly 0, and the loss is not ({label}/loss {m[f'{label}/loss']:.4g}): the model no "
                "longer depends on its weights, because an update made them so large that its probabilities are 0, 1 "
                f"or all equal. The learning rate is too high then ({label}/lr {m[f'{label}/lr']:.3g}, {field}), and "
                f"these weights do not recover: start from scratch with a lower one, such as `{Setting(field, 1e-5)}`, "
                "or resume a checkpoint of before"
            ),
            patience=1,
        ),
    )


class LearningWatch:
    """Counts the consecutive steps with each symptom. Warns once per symptom, and again if it reappears."""

    def __init__(self, symptoms: Sequence[Symptom] = SYMPTOMS) -> None:
        self._symptoms = symptoms
        self._shown: dict[str, int] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Processes a step's metrics; yields warnings."""
        for symptom in self._symptoms:
            count = self._shown.get(symptom.name, 0) + 1 if symptom.is_shown(metrics) else 0
            self._shown[symptom.name] = count
            if count == symptom.patience:
                steps = f"in step {step}" if count == 1 else f"for {count} steps in a row, up to step {step}"
                yield f"warning: {steps}, {symptom.describe(metrics)}"


LEARNING_RATES = (1e-10, 0.05)
"""A weight of a model is about 0.02, and AdamW changes each by about the learning rate in an update: below, float32
rounds the change away; above, one update leaves nothing of what the model knows."""


def rate_notices(config: RunConfig, fields: Iterable[str]) -> Iterator[str]:
    """Warnings about learning rates with which a run trains nothing, or destroys its model.

    Args:
        config: of the run.
        fields: paths of its learning rates.
    """
    least, most = LEARNING_RATES
    for field in fields:
        rate: float = functools.reduce(getattr, field.split("."), config)  # type: ignore[assignment]
        if rate > most:
            yield (
                f"warning: {field} {rate:g}: AdamW changes every weight by about this much in an update, and most "
                f"weights are smaller than 0.1, so that the first update destroys the model; usual are 1e-6 to 1e-3: "
                f"`{Setting(field, 1e-5)}`"
            )
        elif rate < least:
            yield f"warning: {field} {rate:g}: too small to change a weight of usual size, so that nothing is learned"


def setting_notices(config: RunConfig, registry: Registry) -> Iterator[str]:
    """Notices about risky settings: stale samples, updates of unequal size, a loss without a ratio."""
    if cuts := cuts_of(config.rollout):
        yield (
            f"{cuts}: tokens are sampled from a part of the policy's distribution. KLs (policy/kl, policy/approx_kl, "
            "mismatch/*) are means over such tokens, and policy/sample_nll stands in place of policy/entropy, which "
            "they do not show"
        )
    if config.schedule.uncorrected:
        yield "warning: stale samples are trained without a correction (schedule.uncorrected)"
    if config.algorithm.name == POLICY_GRADIENT:
        loss = registry.function(ComponentKind.LOSS, config.algorithm.loss)
        if notice := uneven_notice(config.trainer):
            yield notice
        if warning := off_policy_warning(config.algorithm.loss, loss, config.trainer):
            yield warning


def uneven_notice(trainer: TrainerConfig) -> str | None:
    """Notice if a step's samples cannot be split evenly over its updates."""
    samples, updates = trainer.prompts_per_step * trainer.samples_per_prompt, trainer.updates_per_step
    if samples % updates == 0:
        return None
    even = min((n for n in range(1, samples + 1) if samples % n == 0), key=lambda n: (abs(n - updates), n))
    return (
        f"trainer.updates_per_step {updates}: {samples} samples a step (trainer.prompts_per_step "
        f"{trainer.prompts_per_step} x trainer.samples_per_prompt {trainer.samples_per_prompt}) are not a multiple of "
        "it, so updates differ in size; each averages over its own samples. "
        f"`{Setting('trainer.updates_per_step', even)}` makes them equal"
    )


def repeated_notice(trainer: TrainerConfig, num_rows: int) -> str | None:
    """Warning if a step takes more prompts than the data has, so that it repeats rows."""
    asked = trainer.prompts_per_step
    if asked <= num_rows:
        return None
    return (
        f"warning: trainer.prompts_per_step {asked} is more than the {num_rows} training rows, so every step takes "
        f"each row about {asked / num_rows:.2g} times, and an epoch is less than a step. For one group a row add "
        f"`{Setting('trainer.prompts_per_step', num_rows)}`; for more samples of each, raise trainer.samples_per_prompt"
    )


def off_policy_warning(name: str, loss: object, trainer: TrainerConfig) -> str | None:
    """Warning if a loss without a ratio (`on_policy_only`) is used for several updates on the same samples.

    The first update changes the weights, so that the samples are off-policy for the second one. Without a ratio the
    loss does not correct this, and without a clip it is not bounded.
    """
    updates = trainer.updates_per_step * trainer.epochs_per_step
    if updates == 1 or not getattr(loss, "on_policy_only", False):
        return None
    fields = {"updates_per_step": trainer.updates_per_step, "epochs_per_step": trainer.epochs_per_step}
    asked = " and ".join(f"trainer.{field} {value}" for field, value in fields.items() if value > 1)
    wanted = spell(*(Setting(f"trainer.{field}", 1) for field, value in fields.items() if value > 1))
    return (
        f"warning: algorithm.loss {name!r} has no ratio and no clip, but {asked} makes {updates} updates of a step's "
        f"samples: from the second update on they are samples of an older policy, and nothing corrects that. "
        f"Use {wanted}, or a loss with a ratio: {Setting('algorithm.loss', 'ppo_clip')}"
    )


def quantized_notice(
    quantized: int, total: int, metrics: Mapping[str, float], *, accounted: bool = False
) -> str | None:
    """Notice, after the first step, that samples come from quantized weights: they are off-policy even if no sample is
    stale.

    Args:
        quantized: number of tensors that are served as float8.
        total: number of tensors that are served.
        metrics: metrics of the step.
        accounted: whether the policy that sampled is in the ratio, or in a weight of it.
    """
    if not quantized:
        return None
    text = (
        f"{quantized} of {total} tensors are sampled from as float8 with block scales: log-probs of samples are those "
        f"of the rounded policy, {metrics.get('parity/log_prob_diff_mean', math.nan):.2g} nats from the trained one "
        "(parity/log_prob_diff_mean)"
    )
    if "mismatch/kl_k1" in metrics:
        return f"{text}; mismatch/* shows how far apart they are"
    if accounted:
        return f"{text}; it is in the ratio"
    return (
        f"{text}, and nothing corrects that. Give {Setting('algorithm.correction.mode', 'truncate')}, which also "
        "measures mismatch/*"
    )

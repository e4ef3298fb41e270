"""Samples section of a report: by prompt, samples of its first step next to those of its last. Text of models is
escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.views.report.conversation import conversation
from rlsdk.views.report.markup import escaped, figure, number_of
from rlsdk.views.report.tokens import coloured, tokens_of

MAX_PROMPTS = 60
OPEN_PROMPTS = 20
"""Prompts that are expanded initially."""
MAX_IN_GROUP = 8
"""Most samples shown per prompt and step."""
ROUNDING, NEGLIGIBLE = 2.0**-44, 2.0**-50
"""As in `rlsdk.algorithms.signal`, which imports torch."""
Sample = Mapping[str, Any]


def sample_section(samples: Sequence[Sample]) -> str:
    """Filters, and a box for each prompt: prompts that were sampled at several steps first, then those whose samples
    scored differently, the newest first."""
    if not samples:
        return "<p>No samples yet: the first step of reinforcement learning logs them (tracking.samples_per_step).</p>"
    by_prompt: dict[object, list[Sample]] = {}
    for at, sample in enumerate(samples):
        by_prompt.setdefault(str(sample["prompt"]) if "prompt" in sample else at, []).append(sample)
    ordered = sorted(
        by_prompt.values(), key=lambda found: (_num_steps(found) > 1, _differs(found), _step(found[-1])), reverse=True
    )
    boxes = [_box(found) for found in ordered[:MAX_PROMPTS]]
    more = len(by_prompt) - MAX_PROMPTS
    note = f" {MAX_PROMPTS} are below; samples.jsonl has all." if more > 0 else ""
    folded = "".join(boxes[OPEN_PROMPTS:])
    rest = f'<details class="more"><summary>{len(boxes) - OPEN_PROMPTS} more prompts</summary>{folded}</details>'
    return (
        f"<p class=quiet>{len(samples)} samples of {len(by_prompt)} prompts were logged.{note}</p>"
        f"{_filters()}{_colours(samples)}{''.join(boxes[:OPEN_PROMPTS])}{rest if folded else ''}"
    )


def score_range(samples: Sequence[Sample]) -> tuple[float, float]:
    """Lowest and highest logged score; 0 and 1 if there are none."""
    scores = [score for sample in samples if (score := number_of(sample.get("score"))) is not None]
    return (min(scores), max(scores)) if scores else (0.0, 1.0)


def _filters() -> str:
    kinds = {
        "all": "all samples",
        "best": "highest score",
        "zero": "lowest score",
        "better": "advantage above 0",
        "worse": "advantage below 0",
    }
    choices = "".join(f'<option value="{name}">{label}</option>' for name, label in kinds.items())
    return (
        '<form id="filters" class="bar"><label>find <input type="search" name="text"></label>'
        f'<label>show <select name="kind">{choices}</select></label>'
        '<label>steps <input type="number" name="from" min="0"> to <input type="number" name="to" min="0"></label>'
        '<output id="found" class="quiet"></output></form>'
    )


def _colours(samples: Sequence[Sample]) -> str:
    if not any("log_probs" in sample for sample in samples):
        return ""
    recomputed = any("train_log_probs" in sample for sample in samples)
    why = (
        '<span><span class="swatch t u2">red</span> the train engine finds the token likelier, '
        '<span class="swatch t d2">blue</span> less likely</span>'
        if recomputed
        else "<span>this run did not recompute log-probs (algorithm.old_log_probs), so there is no difference to show"
        "</span>"
    )
    difference = '<option value="difference">log-prob difference, train against rollout</option>'
    chance = '<option value="probability">unlikely tokens</option>'
    order = difference + chance if recomputed else chance + difference
    none = '<option value="none">no colours</option>'
    return (
        f'<div class="bar"><label>colours <select id="colors">{order}{none}</select></label>'
        f'<span class="legend">{why}; <span class="swatch t p2">amber</span> sampled though unlikely. '
        "Touch a token for its numbers.</span></div>"
    )


def _box(samples: Sequence[Sample]) -> str:
    steps = sorted({_step(sample) for sample in samples})
    shown = [steps[0], steps[-1]] if len(steps) > 1 else steps
    columns = "".join(_column([s for s in samples if _step(s) == step], step) for step in shown)
    times = f' <span class="quiet">sampled at {len(steps)} steps; the first and the last</span>' if shown[1:] else ""
    prompt, answer = samples[0].get("prompt", ""), samples[0].get("answer")
    reference = "" if answer is None else f'<div class="label">reference answer</div>{_text(answer)}'
    return (
        f'<section class="prompt"><div class="label">prompt{times}</div><div class="text ask">{escaped(prompt)}</div>'
        f'{reference}<div class="times">{columns}</div></section>'
    )


def _column(samples: Sequence[Sample], step: float) -> str:
    cards = "".join(_card(sample) for sample in samples[:MAX_IN_GROUP])
    return f'<div class="time"><h3>step {step:.0f}</h3>{_strip(samples)}<div class="group">{cards}</div></div>'


def _strip(samples: Sequence[Sample]) -> str:
    """Scores of the whole group, including samples whose text was not logged."""
    scores: list[Any] = next((s["group_scores"] for s in samples if isinstance(s.get("group_scores"), list)), [])
    logged = {s.get("sample") for s in samples if isinstance(s.get("sample"), int)}
    marks = "".join(
        f"<i{' class=on' if at in logged else ''}>{figure(score) or 'none'}</i>" for at, score in enumerate(scores[:64])
    )
    return (
        f'<div class="figures"><span>scores of the group</span><div class="strip">{marks}</div></div>' if marks else ""
    )


def _card(sample: Sample) -> str:
    score, advantage = number_of(sample.get("score")), number_of(sample.get("advantage"))
    terms = {name.removeprefix("reward/"): value for name, value in sample.items() if name.startswith("reward/")}
    named = {"score": score, **({} if list(terms.values()) == [score] else terms)}
    shown = "".join(
        f"<div><span>{escaped(name)}</span> {figure(value)}</div>" for name, value in named.items() if figure(value)
    )
    if advantage is not None:
        sign = "plus" if advantage > 0 else "minus" if advantage < 0 else ""
        shown += f'<div><span>advantage</span> <b class="{sign}">{f"{advantage:+.3g}" if advantage else "0"}</b></div>'
    tokens = tokens_of(sample)
    if talk := conversation(sample.get("episode"), tokens):
        return _framed(sample, shown, talk, has_tokens=bool(tokens))
    rest = sample.get("rest")
    text = coloured(tokens) + (escaped(rest) if isinstance(rest, str) else "") if tokens else escaped(
        sample.get("response", "")
    )  # fmt: skip
    return _framed(sample, shown, f'<div class="text">{text}</div>', has_tokens=bool(tokens))


def _framed(sample: Sample, figures: str, content: str, *, has_tokens: bool) -> str:
    score, advantage = (_attribute(number_of(sample.get(name))) for name in ("score", "advantage"))
    return (
        f'<div class="sample" data-step="{_step(sample):.0f}" data-score="{score}" data-advantage="{advantage}">'
        f'<div class="figures">{figures}</div>{content}{"<div class=token></div>" if has_tokens else ""}</div>'
    )


def _text(value: object) -> str:
    return f'<div class="text">{escaped(value)}</div>'


def _attribute(value: float | None) -> str:
    return "" if value is None else repr(value)


def _num_steps(samples: Sequence[Sample]) -> int:
    return len({_step(sample) for sample in samples})


def _differs(samples: Sequence[Sample]) -> bool:
    """Whether one of its groups has different scores, beyond what rounding does to them."""
    groups = [sample["group_scores"] for sample in samples if isinstance(sample.get("group_scores"), list)]
    scores = [[score for one in group if (score := number_of(one)) is not None] for group in groups]
    return any(
        not math.isclose(min(group), max(group), rel_tol=ROUNDING, abs_tol=NEGLIGIBLE) for group in scores if group
    )


def _step(sample: Sample) -> float:
    step = sample.get("step")
    return float(step) if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 1e15 else 0.0

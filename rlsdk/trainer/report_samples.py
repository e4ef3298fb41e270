"""Samples of a report: by prompt, the first response to it beside the last. Whatever a model wrote is text."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

MAX_PROMPTS = 40
COLUMNS = ("response", "answer")


def sample_groups(samples: Sequence[Mapping[str, Any]]) -> str:
    """A box for each prompt, the newest first; one that was sampled again shows its first and its last response."""
    if not samples:
        return "<p>None were logged (tracking.samples_per_step).</p>"
    by_prompt: dict[object, list[Mapping[str, Any]]] = {}
    for at, sample in enumerate(samples):
        by_prompt.setdefault(str(sample["prompt"]) if "prompt" in sample else at, []).append(sample)
    again = sorted(by_prompt.values(), key=lambda found: (len(found) > 1, _step(found[-1])), reverse=True)
    boxes = [_box(str(found[0].get("prompt", "")), found) for found in again[:MAX_PROMPTS]]
    note = f"<p>{len(samples)} samples of {len(by_prompt)} prompts; {len(boxes)} prompts are shown.</p>"
    return note + "".join(boxes)


def _box(prompt: str, samples: Sequence[Mapping[str, Any]]) -> str:
    shown = [samples[0], samples[-1]] if len(samples) > 1 else [samples[0]]
    cards = "".join(_card(sample) for sample in shown)
    times = f" ({len(samples)} times)" if len(samples) > 1 else ""
    return (
        f'<details open><summary>prompt{times}</summary><div class="text">{html.escape(prompt)}</div>'
        f'<div class="pair">{cards}</div></details>'
    )


def _card(sample: Mapping[str, Any]) -> str:
    terms = {name.removeprefix("reward/"): value for name, value in sample.items() if name.startswith("reward/")}
    figures = {"score": sample.get("score"), "advantage": sample.get("advantage"), **terms}
    shown = " · ".join(
        f"{html.escape(str(name))} {_number(value)}" for name, value in figures.items() if _number(value)
    )
    texts = "".join(
        f'<div class="label">{name}</div><div class="text">{html.escape(str(sample[name]))}</div>'
        for name in COLUMNS
        if sample.get(name) is not None
    )
    return f'<div class="card"><strong>step {html.escape(str(sample.get("step", "?")))}</strong> {shown}{texts}</div>'


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        return ""
    return f"{value:.3g}"


def _step(sample: Mapping[str, Any]) -> float:
    step = sample.get("step")
    return float(step) if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 1e15 else 0.0

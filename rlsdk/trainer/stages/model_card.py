"""The model card of an export: base model, data, method and results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlsdk.config import RunConfig
from rlsdk.system.printable import printable
from rlsdk.version import __version__

FILE = "README.md"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SETTINGS = ("algorithm", "model.lora.rank", "train.optim", "rollout.temperature", "rollout.top_p",
            "rollout.max_response_tokens",
            "trainer.prompts_per_step", "trainer.samples_per_prompt", "trainer.updates_per_step", "trainer.seed",
            "preferences.beta", "sft.steps", "sft.lr")  # fmt: skip
"""Settings needed to reproduce the run. Paths and options of functions are left out: they may be private."""
LICENCE = "license"


def model_card(
    config: RunConfig,
    *,
    step: int,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
    trained_by: str = "",
) -> str:
    """Returns Markdown, headed by the metadata that the Hugging Face hub reads.

    No licence is stated: it depends on the licences of the base model and the data, which are not known here.
    `rlsdk push --license` writes it.

    Args:
        config: the run's configuration.
        step: step after which the model was exported.
        before: metrics of the first evaluation.
        after: metrics of the last evaluation.
        trained_by: name of the training method; empty: the algorithm's name.
    """
    base, data = config.model.path or "", config.data.train or ""
    kind = trained_by or config.algorithm.recipe or config.algorithm.advantage
    known_base, known_data = _hub_name(base), _hub_name(data)
    head = {
        "library_name": "peft" if config.model.lora.rank and config.model.lora.export == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlsdk", kind],
        **({"base_model": known_base} if known_base else {}),
        **({"datasets": [known_data]} if known_data else {}),
    }
    lines = [
        _front_matter(head),
        f"# {_shown(base) or 'A model'}, trained with {kind}",
        "",
        f"Trained with [rlsdk](https://pypi.org/project/rlsdk/) {__version__}; the weights after step {step}.",
        "",
        "| | |",
        "|---|---|",
        *_rows({"base model": _shown(base), "data": _shown(data), "rewards": _rewards(config), "algorithm": kind}),
        "",
        "## Figures",
        *_figures(before or {}, after or {}),
        "",
        "## Settings",
        "",
        "| field | value |",
        "|---|---|",
        *_rows(dict(_settings(config.model_dump(mode="json")))),
        "",
        "## Licence",
        "",
        "Not stated. The licences of the base model and of the data apply; state yours before you share this model "
        "(`rlsdk push ... --license NAME`).",
        "",
        "## Limits",
        "",
        "Trained to score well on the rewards above. What they do not measure was not trained for, and may have become "
        "worse. Not tested for safety.",
    ]
    return printable("\n".join(lines) + "\n")


def with_licence(card: str, licence: str) -> str:
    """Returns the card with this licence in its metadata, which replaces an earlier one."""
    head, rest = card.removeprefix("---\n").split("\n---\n", 1)
    kept = [line for line in head.splitlines() if not line.startswith(f"{LICENCE}:")]
    text = f"The licence of this model is `{licence}`. Those of the base model and of the data apply besides."
    body = re.sub(r"(## Licence\n\n)[^\n]*", lambda found: found[1] + text, rest)
    return "---\n" + "\n".join([*kept, f"{LICENCE}: {json.dumps(licence)}"]) + "\n---\n" + body


def _front_matter(fields: Mapping[str, Any]) -> str:
    """YAML with JSON values, which are valid YAML for every character."""
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---"])


def _hub_name(name: str) -> str:
    """`org/name` of a model or data set on the hub; empty for a local path or a registered source."""
    stem = name.partition(":")[0]
    return stem if HUB_NAME.fullmatch(stem) else ""


def _shown(name: str) -> str:
    """A hub name unchanged; only the last part of a path, since the rest may be private."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".", "~")) else name


def _rewards(config: RunConfig) -> str:
    graded = [f"{_shown(reward.name)} x {reward.weight:g}" for reward in config.rewards]
    return ", ".join([*graded, *(f"model {_shown(model.path)} x {model.weight:g}" for model in config.reward_models)])


def _figures(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
    names = [name for name in {**before, **after} if name.startswith(("eval/", "sft/eval_loss")) and "_se" not in name]
    if not names:
        yield "\nNothing was evaluated."
        return
    yield "\nOn held-out prompts, before and after training; standard errors behind the sign.\n"
    yield "| figure | before | after |"
    yield "|---|---|---|"
    for name in names:
        yield f"| {_cell(name.removeprefix('eval/'))} | {_value(before, name)} | {_value(after, name)} |"


def _value(figures: Mapping[str, float], name: str) -> str:
    if name not in figures or math.isnan(figures[name]):
        return ""
    stem, _, part = name.rpartition("_")
    error = next((figures[other] for other in (f"{name}_se", f"{stem}_se_{part}") if other in figures), None)
    return f"{figures[name]:.4g}" + (f" \N{PLUS-MINUS SIGN} {error:.2g}" if error else "")


def _settings(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path in SETTINGS:
        value: Any = fields
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        yield from _leaves(path, value)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{path}.{name}", item)
    elif value not in (None, "", [], ()):
        yield path, str(value)


def _rows(rows: Mapping[str, str]) -> Iterator[str]:
    return (f"| {_cell(name)} | {_cell(text)} |" for name, text in rows.items() if text)


def _cell(text: str) -> str:
    """Escapes text for a table cell, so that it adds no column, line or tag."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")

"""The data of a run: its sources, loaded, split into training and evaluation, and tokenized."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rlsdk.config import RunConfig, config_error
from rlsdk.data import (
    DataRow,
    PromptDataset,
    PromptFormat,
    check_source,
    distinct,
    drop_seen,
    load_rows,
    split_by_content,
)
from rlsdk.interfaces import ConfigError, DataError, Example
from rlsdk.registry import ComponentKind, Registry
from rlsdk.trainer.sft import AnswerSettings, learned_answers

if TYPE_CHECKING:
    from rlsdk.trainer.events import RunView


@dataclass(frozen=True, kw_only=True)
class SourceRows:
    """The rows of one source of training data."""

    field: str
    """Of the configuration, for messages."""
    name: str
    weight: float
    rows: Sequence[DataRow]


def prompt_format(config: RunConfig) -> PromptFormat:
    data = config.data
    return PromptFormat(
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        prompt_template=data.prompt_template,
        system_prompt=data.system_prompt,
        chat_template=data.chat_template,
        chat_template_kwargs=dict(data.chat_template_kwargs),
        allow_special_tokens=data.allow_special_tokens,
    )


def source_names(config: RunConfig) -> dict[str, str]:
    """Field of the configuration -> the data source that it names."""
    data = config.data
    found = {f"data.mixture.{at}.source": part.source for at, part in enumerate(data.mixture)}
    found |= {} if data.train is None else {"data.train": data.train}
    found |= {} if data.eval is None else {"data.eval": data.eval}
    ptx = config.algorithm.ptx.source
    return found | ({} if ptx is None else {"algorithm.ptx.source": ptx})


def check_sources(config: RunConfig, registry: Registry) -> None:
    """Refuses data that are not there before the run has a folder or a process.

    Raises:
        ConfigError, DataError: a source of `data` cannot be found; the message begins with its field.
    """
    kinds = registry.usable(ComponentKind.DATASET)
    for field, name in source_names(config).items():
        try:
            check_source(name, kinds=kinds)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{field}: {error}") from error


def load_prompts(
    config: RunConfig, registry: Registry, tokenizer: Any, view: RunView, *, held_out: bool | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Train and evaluation prompts that share no question. Says what was left out.

    `held_out` False keeps every row of the training sources for training; None: where nothing is evaluated.

    Raises:
        ConfigError, DataError: the source or a row of it cannot be used.
    """
    data, form = config.data, prompt_format(config)
    sources = _load_train(config, registry)
    if data.eval is not None:
        held = distinct(_load(registry, data.eval, data.eval_options, None), form=form)[: data.num_eval_rows]
        sources = _without(sources, held, form, view)
    elif config.eval.every_steps is not None if held_out is None else held_out:
        rows = [row for source in sources for row in source.rows]
        _, held = split_by_content(rows, form=form, num_eval=data.num_eval_rows, seed=config.trainer.seed)
        sources = _without(sources, held, form, None)
    else:
        held = []
    train = _tokenized(sources, tokenizer, form, data.max_prompt_tokens, view)
    if not held:
        return train, None
    evaluation = PromptDataset(held, tokenizer, form, max_prompt_tokens=data.max_prompt_tokens, name="eval")
    view.notice(f"eval data: {evaluation.report.line()}")
    return train, evaluation


def load_examples(
    config: RunConfig, registry: Registry, tokenizer: Any, train: PromptDataset, view: RunView
) -> list[Example]:
    """Prompts and answers of the supervised term (`algorithm.ptx`); none where its coefficient is 0.

    Raises:
        ConfigError, DataError: the source or a row of it cannot be used.
    """
    ptx = config.algorithm.ptx
    if not ptx.coef:
        return []
    if ptx.source is not None:
        rows = _load(registry, ptx.source, ptx.source_options, None)
        form, limit = prompt_format(config), config.data.max_prompt_tokens
        train = PromptDataset(rows, tokenizer, form, max_prompt_tokens=limit, name="algorithm.ptx")
        view.notice(f"ptx data: {train.report.line()}")
    settings = AnswerSettings(
        template=ptx.answer_template,
        max_tokens=config.rollout.max_response_tokens,
        long_answers="drop",
        allow_special_tokens=config.data.allow_special_tokens,
        section="algorithm.ptx",
        can_cut=False,
    )
    prompts, answers = learned_answers(train, tokenizer, settings, view.notice)
    return [
        Example(prompt_ids=prompt.prompt_ids, answer_ids=answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def with_steps(config: RunConfig, num_prompts: int) -> RunConfig:
    """The configuration with `trainer.steps` in place of `trainer.epochs`.

    Args:
        config: of the run; without `trainer.epochs` it is returned as it is.
        num_prompts: training prompts that were kept.

    Raises:
        ConfigError: the schedule does not fit the number of steps.
    """
    epochs = config.trainer.epochs
    if epochs is None:
        return config
    steps = math.ceil(Fraction(repr(epochs)) * num_prompts / config.trainer.prompts_per_step)
    trainer = config.trainer.model_copy(update={"steps": steps, "epochs": None})
    resolved = config.model_copy(update={"trainer": trainer})
    if problems := list(resolved.problems()):
        raise config_error(problems)
    return resolved


def _load_train(config: RunConfig, registry: Registry) -> list[SourceRows]:
    data = config.data
    if data.mixture:
        return [
            SourceRows(
                field=f"data.mixture.{at}",
                name=part.source,
                weight=part.weight,
                rows=[
                    replace(row, row={**row.row, **part.fields})
                    for row in _load(registry, part.source, part.options, part.num_rows)
                ],
            )
            for at, part in enumerate(data.mixture)
        ]
    if data.train is None:
        raise ConfigError(
            "data.train: expected a data source; give --data FILE, FOLDER, org/name or reasoning_gym:TASK"
        )
    rows = _load(registry, data.train, data.options, data.num_train_rows)
    return [SourceRows(field="data.train", name=data.train, weight=1.0, rows=rows)]


def _load(registry: Registry, name: str, options: Mapping[str, Any], limit: int | None) -> list[DataRow]:
    return load_rows(
        name,
        kinds=registry.usable(ComponentKind.DATASET),
        resolve=lambda kind: registry.component(ComponentKind.DATASET, kind),
        options=options,
        limit=limit,
    )


def _without(
    sources: Sequence[SourceRows], held: Sequence[DataRow], form: PromptFormat, view: RunView | None
) -> list[SourceRows]:
    """The sources without the evaluation's questions; `view` is told how many rows that were.

    Raises:
        DataError: nothing is left of a source.
    """
    left, num_dropped = [], 0
    for source in sources:
        rows, dropped = drop_seen(source.rows, held, form=form)
        num_dropped += dropped
        if not rows:
            raise DataError(
                f"{source.field}: all {len(source.rows)} rows of {source.name!r} stand in the evaluation rows; lower "
                "data.num_eval_rows, or name other rows in data.eval"
            )
        left.append(replace(source, rows=rows))
    if num_dropped and view is not None:
        view.notice(f"data: left {num_dropped} train rows out whose question stands in the evaluation rows")
    return left


def _tokenized(
    sources: Sequence[SourceRows], tokenizer: Any, form: PromptFormat, limit: int, view: RunView
) -> PromptDataset:
    made = []
    for source in sources:
        name = "train" if len(sources) == 1 else source.name
        made.append(PromptDataset(source.rows, tokenizer, form, max_prompt_tokens=limit, name=name))
        share = "" if len(sources) == 1 else f" {source.name} ({source.weight / sum(s.weight for s in sources):.1%})"
        view.notice(f"train data{share}: {made[-1].report.line()}")
    if len(made) == 1:
        return made[0]
    return PromptDataset.mix(made, [source.weight for source in sources], [source.name for source in sources])

"""Prompts of a run: where they come from, how they are rendered, which are held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlsdk.config import RunConfig
from rlsdk.data import (
    PromptDataset,
    PromptFormat,
    check_source,
    distinct,
    drop_seen,
    load_rows,
    split_by_content,
)
from rlsdk.interfaces import ConfigError, DataError
from rlsdk.registry import ComponentKind, Registry

if TYPE_CHECKING:
    from rlsdk.trainer.events import RunView


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


def check_sources(config: RunConfig, registry: Registry) -> None:
    """Refuses data that are not there before the run has a folder or a process.

    Raises:
        ConfigError, DataError: a source of `data` cannot be found; the message begins with its field.
    """
    kinds = registry.usable(ComponentKind.DATASET)
    for field, name in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if name is not None:
            try:
                check_source(name, kinds=kinds)
            except (ConfigError, DataError) as error:
                raise type(error)(f"{field}: {error}") from error


def load_prompts(
    config: RunConfig, registry: Registry, tokenizer: Any, view: RunView, *, held_out: bool | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Train and evaluation prompts that share no question. Says what was left out.

    `held_out` False keeps every row of `data.train` for training; None: where nothing is evaluated.

    Raises:
        ConfigError, DataError: the source or a row of it cannot be used.
    """
    data, form = config.data, prompt_format(config)
    if data.train is None:
        raise ConfigError(
            "data.train: expected a data source; give --data FILE, FOLDER, org/name or reasoning_gym:TASK"
        )
    kinds = registry.usable(ComponentKind.DATASET)

    def load(name: str, options: Mapping[str, Any], limit: int | None) -> Any:
        return load_rows(
            name,
            kinds=kinds,
            resolve=lambda kind: registry.component(ComponentKind.DATASET, kind),
            options=options,
            limit=limit,
        )

    rows = load(data.train, data.options, data.num_train_rows)
    if held_out is None:
        held_out = config.eval.every_steps is not None
    if not held_out and data.eval is None:
        held: list[Any] = []
    elif data.eval is not None:
        held = distinct(load(data.eval, data.eval_options, None), form=form)[: data.num_eval_rows]
        rows, dropped = drop_seen(rows, held, form=form)
        if dropped:
            view.notice(f"data: left {dropped} train rows out whose question stands in the evaluation rows")
    else:
        rows, held = split_by_content(rows, form=form, num_eval=data.num_eval_rows, seed=config.trainer.seed)
    train = PromptDataset(rows, tokenizer, form, max_prompt_tokens=data.max_prompt_tokens, name="train")
    view.notice(f"train data: {train.report.line()}")
    if not held:
        return train, None
    evaluation = PromptDataset(held, tokenizer, form, max_prompt_tokens=data.max_prompt_tokens, name="eval")
    view.notice(f"eval data: {evaluation.report.line()}")
    return train, evaluation

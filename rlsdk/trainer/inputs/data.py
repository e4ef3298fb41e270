"""The data of a run: its sources, loaded, split into training and evaluation, and tokenized."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rlsdk.config import Measure, RunConfig, config_error
from rlsdk.config.sections.base import Section
from rlsdk.data import (
    AnswerEnds,
    DataRow,
    NoPromptError,
    Prompt,
    PromptDataset,
    PromptFormat,
    distinct,
    drop_seen,
    load_rows,
)
from rlsdk.interfaces import ConfigError, DataError, Example
from rlsdk.interfaces.spelling import Setting, called, under
from rlsdk.registry import ComponentKind, Registry
from rlsdk.trainer.inputs.answers import AnswerSettings, learned_answers
from rlsdk.trainer.inputs.prompt_formats import hold_out, prompt_format, set_format

if TYPE_CHECKING:
    from rlsdk.trainer.tracking.events import RunView


HELD_OUT = "held out"
"""Source of the run's own evaluation rows."""
MIN_TOKENIZED = 64
"""Smallest number of rows tokenized at once where only the first few are needed."""


@dataclass(frozen=True, kw_only=True)
class SourceRows:
    """The rows of one source of training data."""

    field: str
    """Configuration field, for messages."""
    name: str
    weight: float
    rows: Sequence[DataRow]


@dataclass(frozen=True, kw_only=True)
class EvalRows:
    """The rows of an evaluation set, and the format of its prompts."""

    source: str
    """Their source: `HELD_OUT`, or the configuration field that names it."""
    rows: Sequence[DataRow]
    kept_out: Sequence[DataRow]
    """Rows whose questions are not trained on: `rows`, or all that were held out."""
    form: PromptFormat


@dataclass(frozen=True, kw_only=True)
class RunPrompts:
    """All prompts of a run."""

    train: PromptDataset
    sets: Mapping[str, PromptDataset]
    """Evaluation prompts by name of the measure."""


def load_prompts(
    config: RunConfig,
    registry: Registry,
    tokenizer: Any,
    view: RunView,
    *,
    measures: Sequence[Measure],
    of_pairs: bool = False,
    of_steps: bool = False,
) -> RunPrompts:
    """Loads training and evaluation prompts that share no question. Reports rows that were left out.

    Args:
        config: the run's configuration.
        registry: the installed backends and components.
        tokenizer: the policy's tokenizer.
        view: receives notices about the rows.
        measures: evaluation measures; empty: no row is held out, and `data.eval` is only excluded from training.
        of_pairs: rows are preference pairs.
        of_steps: rows are solutions in steps.

    Raises:
        ConfigError, DataError: the source or a row of it cannot be used.
    """
    sources = _load_train(config, registry)
    form = prompt_format(config, of_pairs=of_pairs, of_steps=of_steps)
    rows = _eval_rows(config, registry, measures, sources, form)
    if config.data.eval is not None and not any(part.source == HELD_OUT for part in rows.values()):
        held = _held_out(config, registry, sources, form)
        sources = _without(sources, EvalRows(source=HELD_OUT, rows=held, kept_out=held, form=form), form, view)
    for part in {id(part.kept_out): part for part in rows.values()}.values():
        # Held-out rows are in the training source by design; only rows of a separate evaluation source are reported.
        split = part.source == HELD_OUT and config.data.eval is None
        sources = _without(sources, part, form, None if split else view)
    train = _tokenized(sources, tokenizer, form, config.data.max_prompt_tokens, view)
    return RunPrompts(train=train, sets=_eval_prompts(rows, measures, config, tokenizer, view))


def load_eval_prompts(
    config: RunConfig, registry: Registry, tokenizer: Any, view: RunView, *, measures: Sequence[Measure]
) -> Mapping[str, PromptDataset]:
    """Loads only the evaluation prompts, by measure: the same as in `load_prompts`; nothing else is tokenized.

    Raises:
        ConfigError, DataError: as `load_prompts`.
    """
    rows = _eval_rows(config, registry, measures, None, prompt_format(config))
    return _eval_prompts(rows, measures, config, tokenizer, view)


def first_prompts(config: RunConfig, registry: Registry, tokenizer: Any, count: int) -> list[Prompt]:
    """The first prompts of the run's own evaluation rows; tokenizes no more rows than needed.

    Raises:
        ConfigError, DataError: as `load_prompts`.
    """
    form = prompt_format(config)
    rows = _held_out(config, registry, None, form)
    found: list[Prompt] = []
    for start in range(0, len(rows), max(count, MIN_TOKENIZED)):
        part = rows[start : start + max(count, MIN_TOKENIZED)]
        try:
            prompts = PromptDataset(part, tokenizer, form, max_prompt_tokens=config.data.max_prompt_tokens, name="eval")
        except NoPromptError:
            if not found and start + len(part) >= len(rows):
                raise
            continue
        found += prompts[: count - len(found)]
        if len(found) == count:
            break
    return found


def load_examples(
    config: RunConfig, registry: Registry, tokenizer: Any, train: PromptDataset, view: RunView, ends: AnswerEnds
) -> list[Example]:
    """Loads prompts and answers of the supervised loss term (`algorithm.ptx`); empty if its coefficient is 0.

    Raises:
        ConfigError, DataError: the source or a row of it cannot be used.
    """
    ptx = config.algorithm.ptx
    if not ptx.coef:
        return []
    if ptx.source is not None:
        rows = _load(registry, "algorithm.ptx.source", ptx.source, ptx.source_options, None)
        form, limit = prompt_format(config), config.data.max_prompt_tokens
        train = PromptDataset(rows, tokenizer, form, max_prompt_tokens=limit, name="algorithm.ptx")
        view.notice(f"ptx data: {train.report.line()}")
    settings = AnswerSettings(
        template=ptx.answer_template,
        max_tokens=config.rollout.max_response_tokens,
        long_answers="drop",
        form=prompt_format(config),
        ends=ends,
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
        config: the run's configuration; returned unchanged if `trainer.epochs` is not set.
        num_prompts: number of training prompts that were kept.

    Raises:
        ConfigError: the schedule does not fit the number of steps.
    """
    return _counted(config, "trainer", num_prompts, config.trainer.prompts_per_step)


def with_sft_steps(config: RunConfig, num_rows: int) -> RunConfig:
    """As `with_steps` for `sft`, whose epochs are passes over the rows that are trained on."""
    return _counted(config, "sft", num_rows, config.sft.rows_per_step)


def with_pair_steps(config: RunConfig, num_pairs: int) -> RunConfig:
    """As `with_steps` for `preferences`, whose epochs are passes over the used pairs."""
    return _counted(config, "preferences", num_pairs, config.preferences.pairs_per_step)


def _counted(config: RunConfig, name: str, num_rows: int, rows_per_step: int) -> RunConfig:
    section: Section = getattr(config, name)
    epochs: float | None = getattr(section, "epochs")  # noqa: B009 - of three sections
    if epochs is None:
        return config
    steps = math.ceil(Fraction(repr(epochs)) * num_rows / rows_per_step)
    counted = section.model_copy(update={"steps": steps, "epochs": None})
    resolved = config.model_copy(update={name: counted})
    own = [replace(problem, path=f"{name}.{problem.path}") for problem in counted.problems()]
    if problems := [*own, *resolved.problems()]:
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
                    for row in _load(registry, f"data.mixture.{at}", part.source, part.options, part.num_rows)
                ],
            )
            for at, part in enumerate(data.mixture)
        ]
    if data.train is None:
        raise ConfigError(
            f"data.train: expected a data source; give {Setting('data.train', 'FILE')}, FOLDER, org/name or SOURCE:REST"
        )
    rows = _load(registry, "data.train", data.train, data.options, data.num_train_rows)
    return [SourceRows(field="data.train", name=data.train, weight=1.0, rows=rows)]


def _load(registry: Registry, field: str, name: str, options: Mapping[str, Any], limit: int | None) -> list[DataRow]:
    """The rows of a source; errors begin with the field that names it."""
    try:
        return load_rows(
            name,
            kinds=registry.usable(ComponentKind.DATASET),
            resolve=lambda kind: registry.component(ComponentKind.DATASET, kind),
            options=options,
            limit=limit,
        )
    except (ConfigError, DataError) as error:
        raise type(error)(f"{under(field, name)}{error}") from error


def _held_out(
    config: RunConfig, registry: Registry, sources: Sequence[SourceRows] | None, form: PromptFormat
) -> list[DataRow]:
    """The run's own evaluation rows: those of `data.eval`, or held out of the training sources (None: not loaded)."""
    data = config.data
    if data.eval is not None:
        return distinct(_load(registry, "data.eval", data.eval, data.eval_options, None), form=form)[
            : data.num_eval_rows
        ]
    sources = _load_train(config, registry) if sources is None else sources
    rows = [row for source in sources for row in source.rows]
    return hold_out(config, rows, form)[0]


def _eval_rows(
    config: RunConfig,
    registry: Registry,
    measures: Sequence[Measure],
    sources: Sequence[SourceRows] | None,
    train_form: PromptFormat,
) -> dict[str, EvalRows]:
    """Evaluation rows by measure. Measures with the same rows share them."""
    held: list[DataRow] | None = None
    found: dict[str, EvalRows] = {}
    for measure in measures:
        part, form = measure.config, set_format(train_form, measure.config)
        if part.data is not None:
            source = f"{measure.field}.data"
            rows = distinct(_load(registry, source, part.data, part.options, None), form=form)
        else:
            held = _held_out(config, registry, sources, train_form) if held is None else held
            rows, source = held, HELD_OUT
        asked = rows if part.num_rows is None or len(rows) <= part.num_rows else rows[: part.num_rows]
        kept_out = rows if source == HELD_OUT else asked
        found[measure.name] = EvalRows(source=source, rows=asked, kept_out=kept_out, form=form)
    return found


def _eval_prompts(
    rows: Mapping[str, EvalRows], measures: Sequence[Measure], config: RunConfig, tokenizer: Any, view: RunView
) -> dict[str, PromptDataset]:
    """Tokenizes evaluation prompts, once for measures with the same prompts."""
    made: list[tuple[EvalRows, int, PromptDataset]] = []
    found: dict[str, PromptDataset] = {}
    for measure in measures:
        part, limit = rows[measure.name], measure.config.max_prompt_tokens or config.data.max_prompt_tokens
        same = (
            prompts
            for other, most, prompts in made
            if other.rows is part.rows and other.form == part.form and most == limit
        )
        prompts = next(same, None)
        if prompts is None:
            name = f"eval {measure.name}" if measure.name in config.eval.sets else "eval"
            prompts = PromptDataset(part.rows, tokenizer, part.form, max_prompt_tokens=limit, name=name)
            made.append((part, limit, prompts))
            view.notice(f"{name} data: {prompts.report.line()}")
        found[measure.name] = prompts
    return found


def _without(
    sources: Sequence[SourceRows], held: EvalRows, form: PromptFormat, view: RunView | None
) -> list[SourceRows]:
    """Removes an evaluation's questions from the sources; `view` receives the number of removed rows.

    Raises:
        DataError: no row of a source is left.
    """
    left, num_dropped = [], 0
    for source in sources:
        rows, dropped = drop_seen(source.rows, held.kept_out, form=form, seen_form=held.form)
        num_dropped += dropped
        if not rows:
            raise DataError(
                f"{source.field}: all {len(source.rows)} rows of {called(source.name)!r} are also in the "
                "evaluation rows; lower data.num_eval_rows, or name other rows in data.eval"
            )
        left.append(replace(source, rows=rows))
    if num_dropped and view is not None:
        view.notice(f"data: dropped {num_dropped} training rows whose question is also in the evaluation rows")
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

"""Which data sources a run names, and whether they exist. Imports no torch: the check precedes that import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlsdk.config import RunConfig
from rlsdk.data import (
    DataRow,
    Loader,
    check_plain,
    check_source,
    load_rows,
    missing_field,
    parse_source,
)
from rlsdk.data.files import existing_file
from rlsdk.interfaces import ConfigError, DataError, PluginError
from rlsdk.interfaces.spelling import under
from rlsdk.registry import ComponentKind, Registry
from rlsdk.rewards import check_routes
from rlsdk.trainer.inputs.prompt_formats import hold_out, prompt_format
from rlsdk.trainer.inputs.reward_preflight import check_gradable, rationale_notices

SMALL_BYTES = 4 << 20
"""Largest file, in bytes, that is read whole before a run starts (takes about 0.1 s)."""
FILES = ("jsonl", "json", "csv", "parquet")
"""Data source kinds whose rows are read before a run starts."""


def source_names(config: RunConfig) -> dict[str, str]:
    """Maps each configuration field to the data source that it names."""
    data = config.data
    found = {f"data.mixture.{at}.source": part.source for at, part in enumerate(data.mixture)}
    found |= {} if data.train is None else {"data.train": data.train}
    found |= {} if data.eval is None else {"data.eval": data.eval}
    ptx = config.algorithm.ptx.source
    found |= {} if ptx is None else {"algorithm.ptx.source": ptx}
    return found | {
        f"eval.sets.{name}.data": part.data for name, part in config.eval.sets.items() if part.data is not None
    }


def check_rows(
    config: RunConfig,
    registry: Registry,
    *,
    of_pairs: bool = False,
    of_steps: bool = False,
    rewarded: bool = False,
    taught: bool = False,
    learned: bool = False,
    has_template: bool = True,
) -> Sequence[str]:
    """Checks rows before the run starts a process: all rows of a small file, the first row of others.

    Files only; sources that need a library or the network are read when the run starts.

    Args:
        config: the run's configuration.
        registry: the installed backends and components.
        of_pairs: every row must hold the two answers of a pair (`preferences.chosen_field`, `rejected_field`).
        of_steps: every row must hold a solution in steps, and their labels.
        learned: the answers are trained on, so at least one row must have an answer.
        rewarded: rewards grade the rows; checks whether rlsdk's own rewards can grade them.
        taught: teachers teach them; checks whether the rows have the fields and values of their `rows`.
        has_template: whether the tokenizer has a chat template, as far as is known.

    Returns:
        Notices about the rows.

    Raises:
        ConfigError, DataError: a file cannot be read, a row has no prompt, or there are too few questions to hold some
            out; the message begins with the configuration field.
    """
    data = config.data
    form = prompt_format(config, of_pairs=of_pairs, of_steps=of_steps)
    parts: list[tuple[str, str, Mapping[str, Any], int | None, Mapping[str, Any]]] = []
    if data.train is not None:
        parts = [("data.train", data.train, data.options, data.num_train_rows, {})]
    if data.mixture:
        parts = [(f"data.mixture.{i}", p.source, p.options, p.num_rows, p.fields) for i, p in enumerate(data.mixture)]
    rows: list[DataRow] = []
    is_whole = True
    for field, name, options, limit, fields in parts:
        try:
            found, all_of_it = _rows_of_file(name, registry, options, limit)
            found = [replace(row, row={**row.row, **fields}) for row in found]
            found = form.select(found)
            if not has_template or form.chat_template == "never":
                check_plain(found)
            if learned and found and all(row.answer is None for row in found):
                raise missing_field(
                    form.answer_name(found[0]), found[0], "answer_field; no row has it", flag="data.answer_field"
                )
        except (ConfigError, DataError) as error:
            raise type(error)(f"{under(field, name)}{error}") from error
        rows, is_whole = [*rows, *found], is_whole and all_of_it
    said = ""
    if rows and is_whole and _holds_out(config):
        try:
            _, said = hold_out(config, rows, form)
        except DataError as error:
            prefix = "data.mixture: " if data.train is None else under("data.train", data.train)
            raise DataError(f"{prefix}{error}") from error
    if taught and rows and is_whole:
        check_routes(config.teachers, ((row.source, row.row) for row in rows), whole=False, field="teachers")
    notices = [said] if said else []
    if not (rewarded and rows and is_whole):
        return notices
    own = check_gradable(config.rewards, rows, registry, only=lambda name: registry.is_own(ComponentKind.REWARD, name))
    return [*notices, *own, *rationale_notices(config.rewards, rows)]


def _rows_of_file(
    name: str, registry: Registry, options: Mapping[str, Any], limit: int | None
) -> tuple[list[DataRow], bool]:
    """Rows of a file, and whether these are all the rows that the run will read."""
    kinds = registry.usable(ComponentKind.DATASET)
    source = parse_source(name, kinds)
    if source.kind not in FILES:
        return [], False
    is_small = existing_file(source.rest).stat().st_size <= SMALL_BYTES
    if not is_small and source.kind == "json":  # one array, which is read as a whole
        return [], False
    most = limit if is_small else 1
    return load_rows(name, kinds=kinds, resolve=_loader_of(registry), options=options, limit=most), is_small


def _holds_out(config: RunConfig) -> bool:
    measures = config.eval.measures() if config.eval.every_steps is not None else []
    return config.data.eval is None and any(measure.config.data is None for measure in measures)


def source_checks(config: RunConfig, registry: Registry) -> Iterator[Callable[[], bool]]:
    """Yields a check for each data source that the configuration names. A check returns True, or raises ConfigError or
    DataError if the source does not exist; the message begins with its field. Checks need no folder and no process."""
    for field, name in source_names(config).items():
        yield functools.partial(_check_source, field, name, registry)


def _check_source(field: str, name: str, registry: Registry) -> bool:
    try:
        check_source(name, kinds=registry.usable(ComponentKind.DATASET), resolve=_loader_of(registry))
    except (ConfigError, DataError) as error:
        raise type(error)(f"{field}: {error}") from error
    except PluginError as error:  # Its plugin is not installed, or broken.
        raise ConfigError(f"{field}: {error}") from error
    return True


def _loader_of(registry: Registry) -> Callable[[str], Loader]:
    return lambda kind: registry.component(ComponentKind.DATASET, kind)

"""Evaluation and generation with a run, a checkpoint or a model folder: `rlsdk.evaluate`, `rlsdk.generate`, and the
commands of these names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.api.paths import with_absolute_paths
from rlsdk.api.python_inputs import Reward, Rows, stage_inputs
from rlsdk.api.settings import Settings, from_keywords
from rlsdk.api.table import Table
from rlsdk.config import RunConfig, config_error
from rlsdk.config.checks.commands import EVAL_FIGURES, GENERATE, GENERATE_KEPT
from rlsdk.config.derived.roles import best_of_role, rollout_role
from rlsdk.config.loading.load import read_config
from rlsdk.config.loading.reads import Reader, unread
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.spelling import as_given
from rlsdk.kit.files.adapter_config import holds_adapter, settings_of
from rlsdk.registry import Registry
from rlsdk.system.quantities import counted
from rlsdk.trainer.inputs.model_config import file_problems, model_fields

if TYPE_CHECKING:
    from rlsdk.data.rows import Messages
    from rlsdk.trainer.tracking.events import RunView

GENERATION = ("model", "data", "rollout", "placement")
"""Sections of the configuration that generation acts on."""
KEEPING = (*GENERATION, "rewards", "reward_limits")
"""Those that generation of rows to train on acts on."""
NUM_PROMPTS = 5
"""Prompts of the data, if no number is given."""


def evaluate(
    model: str | os.PathLike[str],
    data: Rows | None = None,
    reward: Reward | None = None,
    *,
    sets: Sequence[str] = (),
    checkpoint: str | None = None,
    view: RunView | None = None,
    trust_run: bool = False,
    **fields: Any,
) -> dict[str, float]:
    """Evaluates a model on held-out prompts.

    Args:
        model: path of a run, a checkpoint or a model folder. A run also provides its configuration: data, rewards,
            templates.
        data: as for `rlsdk.train`; None: the held-out rows of the run.
        reward: as for `rlsdk.train`.
        sets: names of evaluation sets (`eval.sets`, `sampled`, `greedy`); empty: all.
        checkpoint: of a run: `best`, `newest` or a step; None: the newest.
        view: shows progress; None: as for `rlsdk.train`.
        trust_run: also run the code that the run's own `config.yaml` names: see SECURITY.md.
        fields: of the configuration, as for `rlsdk.train`.

    Raises:
        ConfigError, DataError: something cannot be used.
        EvaluationError: too many samples have no grade.
    """
    from rlsdk.trainer.runs.inference import evaluate_model
    from rlsdk.trainer.stages.evaluation.schedule import EvaluationError
    from rlsdk.views import shown

    settings = from_keywords(fields, EVAL_FIGURES, config=None, trust_run=trust_run)
    with (
        stage_inputs(settings, eval_data=data, reward=reward, eval_argument="data") as given,
        shown(view) as watching,
    ):
        config, registry = configured(Path(model), given.settings, EVAL_FIGURES, checkpoint=checkpoint)
        found, _ = evaluate_model(config, registry, watching, sets=sets)
    if found.failure is not None:
        raise EvaluationError(found.failure)
    return dict(found.metrics)


def generate(
    model: str | os.PathLike[str],
    prompts: Sequence[str] | str | Messages | Sequence[Messages] = (),
    *,
    data: Rows | None = None,
    num_prompts: int | None = None,
    samples_per_prompt: int = 1,
    reward: Reward | None = None,
    keep: str | None = None,
    log_probs: int | None = None,
    log_probs_file: str | os.PathLike[str] | None = None,
    checkpoint: str | None = None,
    trust_run: bool = False,
    **fields: Any,
) -> Table:
    """Generates responses of a run's model, of a checkpoint or of a model folder.

    Args:
        model: path of a run, a checkpoint or a model folder.
        prompts: a text or a list of texts; messages (`[{"role": "user", "content": "Hello"}]`) or a list of such
            conversations; empty: the first evaluation prompts.
        data: source of prompts; None: that of the run.
        num_prompts: number of prompts from the data; None: 5, or all with `keep`.
        samples_per_prompt: responses to each.
        reward: as for `rlsdk.train`; with `keep`, grades the responses.
        keep: returns rows to train on, of training prompts, in place of all responses: `best` (of each prompt, for
            `sft`), `above:0.5` (all with a higher score), `pairs` (best and worst, for `dpo`), or `all`, which needs
            no reward.
        log_probs: k, with `keep`: also writes the log-probs of the responses' tokens, and of the k most probable ones
            in each place, for `distill`.
        log_probs_file: file that they are written into.
        checkpoint: of a run: `best`, `newest` or a step; None: the newest.
        trust_run: as for `evaluate`.
        fields: of the configuration, as for `rlsdk.train`.

    Returns:
        A row per response: `prompt`, `response`, and `answer` if the data has one. With `keep`, rows of the data whose
        answer is a response (with its `score`; the data's own answer is in `reference`), or with `chosen` and
        `rejected`.

    Raises:
        ConfigError, DataError: something cannot be used, or no response is kept.
    """
    settings = from_keywords(fields, GENERATE if keep is None else GENERATE_KEPT, config=None, trust_run=trust_run)
    texts = given_prompts(prompts)
    if (log_probs is None) is not (log_probs_file is None) or (log_probs is not None and keep is None):
        raise ConfigError("log_probs: k, log_probs_file and keep belong together: keep='all' keeps every response")
    if keep is not None:
        if texts:
            raise ConfigError("prompts: keep samples the prompts of data, of which rows to train on are made")
        with stage_inputs(settings, data=data, reward=reward) as given:
            return run_keeping(
                Path(model),
                given.settings,
                keep,
                num_prompts=num_prompts,
                n=samples_per_prompt,
                checkpoint=checkpoint,
                log_probs=None if log_probs is None or log_probs_file is None else (log_probs, Path(log_probs_file)),
            )
    if reward is not None:
        raise ConfigError("reward: nothing is graded without keep; give keep='best', 'above:0.5', 'pairs' or 'all'")
    with stage_inputs(settings, eval_data=data, eval_argument="data") as given:
        return run_generation(
            Path(model),
            given.settings,
            texts,
            num_prompts=num_prompts,
            n=samples_per_prompt,
            checkpoint=checkpoint,
        )


def run_keeping(
    path: Path,
    settings: Settings,
    keep: str,
    *,
    num_prompts: int | None,
    n: int,
    checkpoint: str | None,
    log_probs: tuple[int, Path] | None = None,
) -> Table:
    """Rows to train on, made of graded responses to training prompts.

    Raises:
        ConfigError, DataError: something cannot be used, or no response is kept.
    """
    config, registry = configured(path, settings, GENERATE_KEPT, checkpoint=checkpoint, sections=KEEPING)

    from rlsdk.trainer.runs.keep import keep_samples
    from rlsdk.trainer.runs.keep_rules import KeepRule
    from rlsdk.trainer.runs.sampled_log_probs import LogProbs

    rule, wanted = KeepRule.parse(keep), None
    if log_probs is not None:
        count, file = log_probs
        if count < 0:
            raise ConfigError(f"{as_given('log_probs', count)}: expected 0 or more tokens in each place")
        wanted = LogProbs(count=count, path=file)
    kept = keep_samples(
        config, registry, rule, num_prompts=num_prompts, num_samples=n, notice=_to_stderr, log_probs=wanted
    )
    return Table([dict(row) for row in kept])


def given_prompts(prompts: object) -> list[str] | list[Messages]:
    """The prompts of a call, as a list of texts or of conversations.

    Raises:
        ConfigError: something else is among them, or both.
    """
    found: list[Any] = [prompts]
    if isinstance(prompts, Iterable) and not isinstance(prompts, str | Mapping):
        found = list(prompts)
    if found and all(isinstance(one, Mapping) for one in found):
        found = [found]
    texts = [one for one in found if isinstance(one, str)]
    conversations = [one for one in found if _is_conversation(one)]
    if len(found) not in (len(texts), len(conversations)):
        odd = next((one for one in found if not isinstance(one, str) and not _is_conversation(one)), None)
        if odd is None and len(found) == len(texts) + len(conversations):
            both = f"{counted(len(texts), 'text')} and {counted(len(conversations), 'conversation')}"
            raise ConfigError(
                f"prompts: {both}: expected one kind in a call; "
                'a text is a conversation as [{"role": "user", "content": TEXT}], without the prompt '
                "template of the run"
            )
        raise ConfigError(
            f"prompts: {repr(odd)[:200]}: expected a text or a list of texts, or else messages "
            '[{"role": "user", "content": TEXT}, ...] or a list of such conversations'
        )
    return texts or conversations


def _is_conversation(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


def run_generation(
    path: Path,
    settings: Settings,
    texts: Sequence[str] | Sequence[Messages],
    *,
    num_prompts: int | None,
    n: int,
    checkpoint: str | None,
) -> Table:
    """Responses to the given prompts, or to the first evaluation prompts of the data."""
    config, registry = configured(path, settings, GENERATE, checkpoint=checkpoint, sections=GENERATION)

    from rlsdk.trainer.runs.inference import sample_prompts

    rows = Table()
    count = NUM_PROMPTS if num_prompts is None else num_prompts
    sampled = sample_prompts(config, registry, texts, num_prompts=count, num_samples=n, notice=_to_stderr)
    for prompt, responses in sampled:
        for response in responses:
            line: dict[str, Any] = {"prompt": prompt.text, "response": response}
            rows.append(line if prompt.answer is None else {**line, "answer": prompt.answer})
    return rows


def _model_flags(folder: Path) -> list[str]:
    """The flags that name a model, or the model of an adapter and the adapter."""
    if not holds_adapter(folder):
        return [f"--model.path={folder}"]
    settings = settings_of(folder).items()
    return [f"--{field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in settings]


def configured(
    path: Path,
    settings: Settings,
    reader: Reader,
    *,
    checkpoint: str | None = None,
    sections: Collection[str] | None = None,
) -> tuple[RunConfig, Registry]:
    """The configuration that the model was trained with, if any, overridden by the settings; without trackers.

    Args:
        path: of a run, a checkpoint or a model.
        settings: the settings of the call.
        reader: the command.
        checkpoint: of a run: `best`, `newest` or a step; None: the newest.
        sections: of the configuration that the command acts on; None: all.

    Raises:
        ConfigError: a setting, or a file of the model, that cannot be used.
    """
    from rlsdk.trainer.checkpoints.model_source import find_model

    registry = Registry.discover()
    source = find_model(path, _to_stderr, checkpoint=checkpoint)
    base = [source.config] if source.config else []
    loaded = read_config(
        [*base, *settings.files],
        settings.flags,
        registry,
        values=settings.values,
        sections=sections,
        reader=reader,
        forced=[*_model_flags(source.model), "--tracking.trackers=[]", "--sft.steps=0"],
    )
    # What the model was trained with is not a mistake of whoever uses it.
    given = [one for one in loaded.given if one.origin.rpartition(":")[0] not in map(str, base)]
    problems, lines = unread(given, loaded.config, reader, loaded.problems, loaded.idle)
    if loaded.config is None or problems:
        raise config_error(problems)
    for line in lines:
        _to_stderr(line)
    config = with_absolute_paths(loaded.config)
    model_fields(config)
    models = [rollout_role(config).loading_weights()]
    if config.eval.best_of is not None and reader.may_read("eval.best_of"):
        models.append(best_of_role(config))
    if problems := list(file_problems(config, models)):
        raise config_error(problems)
    return config, registry


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)

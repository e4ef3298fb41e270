"""Training from Python: `rlsdk.train`, `sft`, `distill`, `dpo`, `kto`, `reward_model` and `process_reward`, as the
commands of these names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rlsdk.api.in_process import run_here
from rlsdk.api.python_inputs import Reward, Rows
from rlsdk.api.run import Run
from rlsdk.api.settings import Settings, from_keywords

if TYPE_CHECKING:
    from rlsdk.config.checks.training import Training
    from rlsdk.trainer.tracking.events import RunView

Path = str | os.PathLike[str]


def train(
    model: Path | None = None,
    data: Rows | None = None,
    reward: Reward | None = None,
    *,
    algorithm: str | None = None,
    steps: int | None = None,
    eval_data: Rows | None = None,
    run_name: str | None = None,
    seed: int | None = None,
    config: Path | None = None,
    view: RunView | None = None,
    trust_run: bool = False,
    **fields: Any,
) -> Run:
    """Trains with reinforcement learning until `steps` are done, or until Ctrl-C, after which the run is saved at the
    end of a step.

        run = rlsdk.train("Qwen/Qwen2.5-0.5B-Instruct", rows, score, steps=100, trainer={"prompts_per_step": 16})

    Without arguments it runs the quickstart: a small new model learns to spell words backward.

    Args:
        model: folder in Hugging Face format, or a name on the hub.
        data: a name (file, folder, `org/name`, `SOURCE:REST`) or rows: a list of mappings, a `datasets.Dataset`, a
            generator. Rows are written into the run's folder.
        reward: a function of a `RewardSample`, of TRL's or verl's signature, a registered name, `file.py:fn`, or
            `{"name": any of these, "weight": 1.0, "options": {}}`; a list of them adds up. A function of a script or
            a notebook goes to the graders as source: see docs/python.md.
        algorithm: a recipe (`rlsdk algorithms list`): grpo, ppo, dapo, ...
        steps: trainer steps (`trainer.steps`).
        eval_data: as `data`, for evaluation; None: rows are held out of `data`.
        run_name: name of the run's folder in `trainer.run_dir`; an existing run of that name is resumed. None: a new
            run.
        seed: of data order, sampling and random weights.
        config: a YAML file, which all other settings override.
        view: shows progress; None: a chart in a notebook, lines in a terminal. `rlsdk.Quiet()` shows nothing.
        trust_run: also run code that a `config` from a run's folder names.
        fields: any other field of the configuration, by section (`rollout={"max_response_tokens": 256}`), or alone
            with two underscores for each dot (`data__num_eval_rows=16`).

    Raises:
        ConfigError, DataError: something cannot be used; nothing was started, and no folder was created.
    """
    from rlsdk.config.checks.training import Training

    settings = from_keywords(
        fields,
        Training.RL.reader,
        config=config,
        trust_run=trust_run,
        model__path=model,
        algorithm__recipe=algorithm,
        trainer__steps=steps,
        trainer__run_name=run_name,
        trainer__seed=seed,
    )
    return _run(Training.RL, settings, view, data=data, eval_data=eval_data, reward=reward)


def sft(
    model: Path | None = None,
    data: Rows | None = None,
    *,
    steps: int | None = None,
    run_name: str | None = None,
    seed: int | None = None,
    config: Path | None = None,
    view: RunView | None = None,
    trust_run: bool = False,
    **fields: Any,
) -> Run:
    """Supervised training on the reference answers of rows; exports `run.model`. Arguments as for `train`.

    Args:
        model: see `train`.
        data: see `train`; rows hold a prompt and an answer.
        steps: optimizer steps (`sft.steps`).
        run_name: see `train`.
        seed: see `train`.
        config: see `train`.
        view: see `train`.
        trust_run: see `train`.
        fields: see `train`; `sft={"lr": 1e-5, "rows_per_step": 64}`.

    Raises:
        ConfigError, DataError: as `train`.
    """
    from rlsdk.config.checks.training import Training

    settings = from_keywords(
        fields,
        Training.SFT.reader,
        config=config,
        trust_run=trust_run,
        model__path=model,
        sft__steps=steps,
        trainer__run_name=run_name,
        trainer__seed=seed,
    )
    return _run(Training.SFT, settings, view, data=data)


def distill(
    model: Path | None = None,
    teacher: Path | None = None,
    data: Rows | None = None,
    *,
    steps: int | None = None,
    run_name: str | None = None,
    seed: int | None = None,
    config: Path | None = None,
    view: RunView | None = None,
    trust_run: bool = False,
    **fields: Any,
) -> Run:
    """Distillation on the reference answers of rows: learns a teacher's probabilities of each token; exports
    `run.model`. Arguments as for `sft`.

        rlsdk.distill("org/small", "org/large", rows, steps=200)

    Args:
        model: see `train`.
        teacher: folder or hub name of the teacher; None: `teachers` among the fields.
        data: see `sft`.
        steps: see `sft`.
        run_name: see `train`.
        seed: see `train`.
        config: see `train`.
        view: see `train`.
        trust_run: see `train`.
        fields: see `train`; `algorithm.distillation` has the objective, here `exact` by default.

    Raises:
        ConfigError, DataError: as `train`.
    """
    from rlsdk.config.checks.training import Training

    settings = from_keywords(
        fields,
        Training.DISTILL.reader,
        config=config,
        trust_run=trust_run,
        model__path=model,
        teachers=None if teacher is None else os.fspath(teacher),
        sft__steps=steps,
        trainer__run_name=run_name,
        trainer__seed=seed,
    )
    return _run(Training.DISTILL, settings, view, data=data)


def dpo(model: Path | None = None, data: Rows | None = None, *, steps: int | None = None, **fields: Any) -> Run:
    """Direct preference optimization: trains a policy on pairs of answers; exports `run.model`.

    Args:
        model: see `train`.
        data: see `train`; rows hold a prompt, `chosen` and `rejected` (`preferences.chosen_field`, ...).
        steps: optimizer steps (`preferences.steps`).
        fields: see `train`, with its `run_name`, `seed`, `config`, `view`, `trust_run`.

    Raises:
        ConfigError, DataError: as `train`.
    """
    from rlsdk.config.checks.training import Training

    return _pairs(Training.DPO, model, data, steps, **fields)


def kto(model: Path | None = None, data: Rows | None = None, *, steps: int | None = None, **fields: Any) -> Run:
    """Kahneman-Tversky optimization: trains a policy on labelled answers; exports `run.model`. Arguments as for `dpo`.

    Args:
        model: see `train`.
        data: see `train`; rows hold a prompt, an answer as for `sft`, and `label` (`preferences.label_field`).
        steps: see `dpo`.
        fields: see `dpo`.

    Raises:
        ConfigError, DataError: as `train`.
    """
    from rlsdk.config.checks.training import Training

    return _pairs(Training.KTO, model, data, steps, **fields)


def reward_model(
    model: Path | None = None, data: Rows | None = None, *, steps: int | None = None, **fields: Any
) -> Run:
    """Trains a reward model on pairs of answers (Bradley-Terry); exports `run.model`. Arguments as for `dpo`.

    Args:
        model: see `train`.
        data: see `dpo`.
        steps: see `dpo`.
        fields: see `dpo`.

    Raises:
        ConfigError, DataError: as `train`.
    """
    from rlsdk.config.checks.training import Training

    return _pairs(Training.REWARD_MODEL, model, data, steps, **fields)


def process_reward(
    model: Path | None = None, data: Rows | None = None, *, steps: int | None = None, **fields: Any
) -> Run:
    """Trains a process reward model on solutions with labelled steps; exports `run.model`. Arguments as for `dpo`.

    Args:
        model: see `train`.
        data: see `train`; rows hold a prompt, `completions` (texts of the steps) and `labels` (of each).
        steps: see `dpo`.
        fields: see `dpo`.

    Raises:
        ConfigError, DataError: as `train`.
    """
    from rlsdk.config.checks.training import Training

    return _pairs(Training.PROCESS_REWARD, model, data, steps, **fields)


def _pairs(
    training: Training,
    model: Path | None,
    data: Rows | None,
    steps: int | None,
    *,
    run_name: str | None = None,
    seed: int | None = None,
    config: Path | None = None,
    view: RunView | None = None,
    trust_run: bool = False,
    **fields: Any,
) -> Run:
    settings = from_keywords(
        fields,
        training.reader,
        config=config,
        trust_run=trust_run,
        model__path=model,
        preferences__steps=steps,
        trainer__run_name=run_name,
        trainer__seed=seed,
    )
    return _run(training, settings, view, data=data)


def _run(training: Training, settings: Settings, view: RunView | None, **given: Any) -> Run:
    result = run_here(training, settings, view, **given)
    return Run(result.run_dir, result=result)

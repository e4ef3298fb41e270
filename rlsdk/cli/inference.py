"""`rlsdk generate` and `rlsdk eval`: use a run, a checkpoint or a model folder."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rlsdk.config import RunConfig, load_config
from rlsdk.kit.atomic import atomic_write_json
from rlsdk.kit.printable import json_line, printable
from rlsdk.registry import Registry


def generate(
    path: Path, prompts: Sequence[str], num_prompts: int, n: int, checkpoint: str | None, args: Sequence[str]
) -> None:
    """Prints responses to the given prompts, or to the first evaluation prompts of the data."""
    from rlsdk.trainer.inference import sample_prompts

    config, registry = _config(path, args, checkpoint, sections=("model", "data", "rollout", "placement"))
    for prompt, responses in sample_prompts(config, registry, prompts, num_prompts=num_prompts, num_samples=n):
        for response in responses:
            line: dict[str, Any] = {"prompt": prompt.text, "response": response}
            print(json_line(line if prompt.answer is None else {**line, "answer": prompt.answer}))


def evaluate(
    path: Path,
    args: Sequence[str],
    *,
    sets: Sequence[str],
    checkpoint: str | None,
    output: Path | None,
    samples: Path | None,
) -> None:
    """Prints figures on the evaluation prompts.

    Raises:
        EvaluationError: too many samples have no grade; the figures are printed and written all the same.
    """
    from rlsdk.cli.console import ConsoleView
    from rlsdk.cli.figures import figure_lines
    from rlsdk.trainer.evaluations import EvaluationError
    from rlsdk.trainer.inference import evaluate_model
    from rlsdk.trainer.samples import write_eval_samples

    config, registry = _config(path, args, checkpoint)
    view = ConsoleView()
    found, rules = evaluate_model(config, registry, view, sets=sets)
    for line in figure_lines(found.metrics, rules):
        print(printable(line))
    if output is not None:
        known = {name: None if math.isnan(value) else value for name, value in found.metrics.items()}
        atomic_write_json(output, known)
    if samples is not None and found.samples:
        compress = config.eval.save_samples == "gzip"
        for file in write_eval_samples(samples, None, found.samples, compress=compress):
            view.notice(f"samples  {file}")
    if found.failure is not None:
        raise EvaluationError(found.failure)


def _config(
    path: Path, args: Sequence[str], checkpoint: str | None, sections: Collection[str] | None = None
) -> tuple[RunConfig, Registry]:
    """The configuration that the model was trained with, where there is one, then the flags; no trackers.

    Args:
        path: of a run, a checkpoint or a model.
        args: as typed.
        checkpoint: of a run: `best`, `newest` or a step; None: the newest.
        sections: of the configuration that the command acts on; None: all.
    """
    from rlsdk.trainer.inference import find_model

    registry = Registry.discover()
    source = find_model(path, lambda text: print(text, file=sys.stderr), checkpoint=checkpoint)
    flags = [*args, f"--model.path={source.model}", "--tracking.trackers=[]", "--sft.steps=0"]
    return load_config([source.config] if source.config else [], flags, registry, sections=sections), registry

"""`rlsdk generate` and `rlsdk eval`, for a run, a checkpoint or a model folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlsdk.api.inference import configured, run_generation, run_keeping
from rlsdk.api.settings import Settings
from rlsdk.cli.training.train import command_here, quoted
from rlsdk.config.checks.commands import EVAL, EVAL_FIGURES
from rlsdk.system.atomic import atomic_path, atomic_write_json
from rlsdk.system.printable import json_line, printable
from rlsdk.system.streams import stdout_aside


def generate(
    path: Path, prompts: Sequence[str], num_prompts: int | None, n: int, checkpoint: str | None, args: Sequence[str]
) -> None:
    """Prints responses to the given prompts, or to the first evaluation prompts of the data."""
    settings = Settings(flags=args)
    with stdout_aside():
        rows = run_generation(path, settings, prompts, num_prompts=num_prompts, n=n, checkpoint=checkpoint)
    for row in rows:
        print(json_line(row))


def keep(
    path: Path,
    rule: str,
    num_prompts: int | None,
    n: int,
    checkpoint: str | None,
    output: Path | None,
    log_probs: int | None,
    args: Sequence[str],
) -> None:
    """Prints rows to train on, or writes them into a file, and the `log_probs` of their tokens beside it."""
    wanted = None if log_probs is None or output is None else (log_probs, output.with_suffix(".safetensors"))
    with stdout_aside():
        rows = run_keeping(
            path, Settings(flags=args), rule, num_prompts=num_prompts, n=n, checkpoint=checkpoint, log_probs=wanted
        )
    lines = [json_line(row) for row in rows]
    if output is None:
        print("\n".join(lines))
        return
    with atomic_path(output) as draft:
        draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = "dpo" if rule == "pairs" else "sft"
    print(f"rows  {output}")
    if wanted is not None:
        print(f"log-probs  {wanted[1]}")
        command = f"distill --teachers '[{{log_probs: {quoted(wanted[1])}}}]'"
    print(f"\nnext:\n  {command_here()} {command} --data {quoted(output)} ...")


def evaluate(
    path: Path,
    args: Sequence[str],
    *,
    sets: Sequence[str],
    checkpoint: str | None,
    output: Path | None,
    samples: Path | None,
) -> None:
    """Prints metrics on the evaluation prompts.

    Raises:
        EvaluationError: too many samples have no grade; the metrics are printed and written before.
    """
    reader = EVAL_FIGURES if samples is None else EVAL
    config, registry = configured(path, Settings(flags=args), reader, checkpoint=checkpoint)  # before torch is imported

    from rlsdk.trainer.runs.inference import evaluate_model
    from rlsdk.trainer.stages.evaluation.schedule import EvaluationError
    from rlsdk.trainer.tracking.samples import write_eval_samples
    from rlsdk.views.console import ConsoleView
    from rlsdk.views.figures import figure_lines

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

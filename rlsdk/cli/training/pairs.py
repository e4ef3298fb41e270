"""`rlsdk reward-model`, `dpo`, `kto` and `process-reward`: training from preferences, on the same engines."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.cli.training.train import command_here, quoted, train
from rlsdk.config import PairTraining
from rlsdk.config.checks.training import Training
from rlsdk.interfaces import Head

if TYPE_CHECKING:
    from rlsdk.trainer.runs.start import RunResult


def run(kind: PairTraining, args: Sequence[str]) -> None:
    """Trains, and writes a model folder in Hugging Face format."""
    result, stopped = train(Training(kind.value), args)
    print(f"\n{_figures(kind, result)} after {result.steps} steps, {result.seconds:.0f} s\nmodel  {result.checkpoint}")
    if result.checkpoint is not None:
        print(f"\nnext:\n  {command_here()} {_next_command(kind, result.checkpoint)}")
    if result.stopped:
        sys.exit(stopped.exit_code)


def _figures(kind: PairTraining, result: RunResult) -> str:
    """The accuracy before and after the training, both on the same rows."""
    rows = "pairs" if kind.reads_pairs else "steps" if kind is PairTraining.PROCESS_REWARD else "answers"
    for metric, pairs in (("eval/accuracy_pairs", f"held-out {rows}"), (f"{kind.label}/accuracy", rows)):
        before, after = result.first_eval.get(metric), result.last_eval.get(metric)
        if after is not None:
            return f"accuracy on {pairs} {f'{before:.1%} -> ' if before is not None else ''}{after:.1%}"
    return "nothing was trained"


def _next_command(kind: PairTraining, model: Path) -> str:
    if kind.head is Head.LM:
        return f"generate {quoted(model)} --prompt '...'"
    own = ", step_scores: min" if kind is PairTraining.PROCESS_REWARD else ""
    return f"train --reward_models {shlex.quote(f'[{{path: {json.dumps(str(model))}{own}}}]')} ..."

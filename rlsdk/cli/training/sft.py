"""`rlsdk sft` and `rlsdk distill`: training on reference answers, on the same engines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlsdk.cli.training.train import command_here, quoted, train
from rlsdk.config.checks.training import Training


def run(args: Sequence[str], training: Training = Training.SFT) -> None:
    """Trains, and writes a model folder in Hugging Face format."""
    result, stopped = train(training, args)
    loss = result.last_eval.get("sft/loss")
    figure = "nothing was trained" if loss is None else f"loss {loss:.4f}"
    print(f"\n{figure} after {result.steps} steps, {result.seconds:.0f} s\nmodel  {result.checkpoint}")
    if result.checkpoint is not None:
        print(f"\nnext:\n  {command_here()} generate {quoted(result.checkpoint)} --prompt '...'")
    if result.stopped:
        sys.exit(stopped.exit_code)

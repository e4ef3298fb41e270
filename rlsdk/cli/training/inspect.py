"""`rlsdk inspect RUN`: where every sampled token went, verified anew from the journal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import yaml

from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.rollouts.journal.inspection import InspectedStep, Inspection, inspect_journal, recorded_sample
from rlsdk.rollouts.journal.journal import FOLDER
from rlsdk.rollouts.journal.segments import segments
from rlsdk.system.files import read_regular_text
from rlsdk.system.printable import printable
from rlsdk.trainer.checkpoints.run_folder import CONFIG_FILE
from rlsdk.views.inspection import one_episode, one_step, whole_run


def run(run_dir: Path, step: int | None, episode: str | None) -> None:
    """Prints the account of a run, of a step, or of an episode; exits with 1 if something does not add up.

    Raises:
        ConfigError: the folder has no journal, or no such step or episode.
        CheckpointError: the journal is damaged.
    """
    folder = run_dir / FOLDER
    if not segments(folder):
        raise ConfigError(
            f"{str(run_dir)!r} has no journal; give the folder of a run (runs/NAME) with schedule.journal resume or all"
        )
    if episode is not None:
        _print(one_episode(recorded_sample(folder, *_place(episode)), _decoder(run_dir)))
        return
    found = inspect_journal(folder)
    _print(whole_run(found) if step is None else one_step(_of_step(found, step)))
    if not found.is_sound:
        sys.exit(1)


def _place(episode: str) -> tuple[int, int]:
    """Group and sample of `GROUP/SAMPLE`."""
    if not re.fullmatch(r"\d{1,18}/\d{1,9}", episode):
        raise ConfigError(f"--episode {episode!r}: expected GROUP/SAMPLE, such as 12/0, as `--step` lists them")
    group, index = map(int, episode.split("/"))
    return group, index


def _of_step(found: Inspection, step: int) -> InspectedStep:
    for one in found.steps:
        if one.step == step:
            return one
    known = f"steps {found.steps[0].step} to {found.steps[-1].step}" if found.steps else "no step"
    raise ConfigError(f"--step {step}: the journal has {known}; schedule.journal all keeps all steps")


def _decoder(run_dir: Path) -> Callable[[Sequence[int]], str]:
    """Text of ids, by the run's tokenizer; the ids themselves where it cannot be loaded."""
    from rlsdk.kit.model.hf import load_tokenizer

    try:
        model = yaml.safe_load(read_regular_text(run_dir / CONFIG_FILE))["model"]
        tokenizer = load_tokenizer(model.get("tokenizer") or model["path"], revision=model.get("revision"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, RlsdkError) as error:
        print(printable(f"ids instead of text: the tokenizer cannot be loaded ({error})"))
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(printable(line))

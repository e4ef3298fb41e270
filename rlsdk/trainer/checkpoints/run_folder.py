"""The folder of a run: its name, its lock, the checkpoint to resume from, and files of earlier attempts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlsdk.config import PairTraining, RunConfig, dump_config
from rlsdk.interfaces import CheckpointError, ConfigError
from rlsdk.kit.files.write_errors import writing
from rlsdk.system.atomic import atomic_write_text
from rlsdk.system.files import read_regular_text
from rlsdk.trainer.checkpoints.checkpoint import (
    MANIFEST,
    CheckpointStore,
    damage,
    faults,
    is_checkpoint_name,
    older_whole,
    step_of,
)
from rlsdk.trainer.checkpoints.run_environment import surroundings

CHECKPOINTS = "checkpoints"
WARM_START = "sft_checkpoints"
DISTILL = "distill_checkpoints"
CONFIG_FILE = "config.yaml"
HISTORY_FILE = "config.history.jsonl"
"""One line for each accepted start: when, from which step, and which settings changed."""
END_FILE = "end.json"
"""How the newest attempt ended: `state` (finished, stopped, failed), `why`, `time`. Absent while it runs, and if its
process was killed."""
INPUTS = "inputs"
"""Folder with the files of inputs that were passed as Python objects."""
EVAL_FOLDER = "eval_samples"
"""Folder in a run's folder: `step_N/SET.jsonl.gz` has every sample of each evaluation."""
EARLIER = "earlier"
"""Folder in a run's folder for files set aside when the run started again, in `1/`, `2/` and so on."""
OWN_FILES = ("metrics.jsonl", "samples.jsonl", EVAL_FOLDER, "tensorboard", CHECKPOINTS, WARM_START, DISTILL,
             *(kind.checkpoints for kind in PairTraining), "reference", CONFIG_FILE)  # fmt: skip
"""Files of one attempt."""
NOT_SETTINGS = ("trainer.resume", "trainer.run_dir", "trainer.run_name")
"""Fields that affect where a run is stored, not what it computes."""
MAX_NAME_BYTES = 200
"""Largest length of a run's name in bytes; file systems allow 255, and longer names are derived from it."""

Notice = Callable[[str], None]


def silent(_: str) -> None:
    """Ignores a notice."""


def check_run_name(name: str) -> None:
    """Refuses a name that would leave `trainer.run_dir`, or that a file system does not allow.

    Raises:
        ConfigError: names the problem and a valid choice.
    """
    wrong = ""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        wrong = "expected one folder name; the folder above it is trainer.run_dir"
    elif not name.isprintable():
        wrong = "expected printable characters only"
    elif len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        wrong = f"expected at most {MAX_NAME_BYTES} bytes"
    if wrong:
        raise ConfigError(f"trainer.run_name {name[:60]!r}: {wrong}, for example 'grpo-1'")


def make_run_dir(config: RunConfig) -> Path:
    """The run's folder: `run_dir/run_name`, or one named by date and time that no other run has.

    Raises:
        ConfigError: the name leaves `trainer.run_dir`, or the folder cannot be made.
    """
    parent = Path(config.trainer.run_dir)
    name = config.trainer.run_name
    if name is not None:
        check_run_name(name)
    try:
        if name is not None:
            folder = parent / name
            folder.mkdir(parents=True, exist_ok=True)
            return folder.resolve()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
            folder = parent / f"{stamp}{suffix}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if not folder.is_dir():
                    raise
                continue
            return folder.resolve()
    except (OSError, ValueError) as error:
        place = str(parent if name is None else parent / name)
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"trainer.run_dir: cannot make the folder {place!r}: {reason}; choose another one") from error
    raise ConfigError(f"trainer.run_dir {str(parent)!r} already holds 1000 runs of this second; set trainer.run_name")


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Prevents a second process from writing into the run's folder. Released when the process ends, even if killed.

    Raises:
        ConfigError: another process holds it, the folder cannot be written to, or writing into it would reach files
            outside of it.
    """
    import fcntl

    _check_entries(run_dir)
    try:
        handle = (run_dir / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir: cannot write to {str(run_dir)!r}: {error.strerror}; choose another one"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"trainer.run_name: another process is writing to {str(run_dir)!r}; wait for it, or choose another name"
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


def _check_entries(run_dir: Path) -> None:
    """Refuses a run's folder in which this process would write, append or delete elsewhere, or block: the folder may be
    of somebody else.

    Raises:
        ConfigError: names the first link out of the folder, hard link, pipe or device.
    """
    home = os.path.realpath(run_dir)
    for entry in sorted(os.scandir(run_dir), key=lambda entry: entry.name) if os.path.isdir(home) else ():
        path = shlex.quote(entry.path)
        if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(home):
            raise ConfigError(
                f"{path} is a symbolic link out of the run's folder (to {os.readlink(entry.path)!r}), and a run writes "
                f"and removes files only in its own: `rm {path}`, or put the whole folder there (trainer.run_dir)"
            )
        if not entry.is_symlink() and not (entry.is_dir() or entry.is_file()):
            raise ConfigError(f"{path} is neither a file nor a folder, and a run would wait on it: `rm {path}`")
        if entry.is_file(follow_symlinks=False) and (names := entry.stat(follow_symlinks=False).st_nlink) > 1:
            raise ConfigError(
                f"{path} is one of {names} names of a file (hard links), and a run would also write to the others: "
                f"give a copy of the folder (`cp -r {shlex.quote(str(run_dir))} COPY`)"
            )


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run continues."""

    checkpoint: Path | None = None
    """None: the run starts from the beginning."""
    folder: str = CHECKPOINTS
    """Name of the checkpoint folder of a run that holds it."""

    def within(self, folder: str) -> Path | None:
        """The checkpoint, if it is one of this folder."""
        return self.checkpoint if folder == self.folder else None


def choose_resume(config: RunConfig, run_dir: Path, folder: str = CHECKPOINTS, notice: Notice = silent) -> ResumePoint:
    """Chooses the checkpoint to resume from, with all checksums verified: one of `folder`, or of the warm start of a
    run that has none yet.

    Args:
        config: the run's configuration.
        run_dir: the run's folder.
        folder: name of the checkpoint folder in a run.
        notice: receives a line for each damaged checkpoint that is skipped.

    Raises:
        ConfigError, CheckpointError: `trainer.resume` names a folder that is neither a whole checkpoint nor a run that
            has one; or the run has checkpoints and all are damaged.
    """
    warms_up = folder == CHECKPOINTS and config.sft.is_asked
    if not (warms_up and _is_in_warm_start(config)):
        checkpoint = _checkpoint(config, run_dir, folder, notice)
        if checkpoint is not None or not warms_up:
            return ResumePoint(checkpoint=checkpoint, folder=folder)
    return ResumePoint(checkpoint=_checkpoint(config, run_dir, WARM_START, notice), folder=WARM_START)


def _checkpoint(config: RunConfig, run_dir: Path, folder: str, notice: Notice) -> Path | None:
    """The checkpoint of one folder to resume from."""
    choice, keep = config.trainer.resume, config.trainer.keep_checkpoints
    if choice == "never":
        return None
    if choice == "auto":
        return CheckpointStore(run_dir / folder, keep).newest_intact(notice)
    named = Path(choice)
    if _is_checkpoint(named):
        if problems := damage(named):
            kind = ConfigError if faults(named) else CheckpointError
            raise kind(f"trainer.resume {choice!r} is damaged: {'; '.join(problems[:3])}{older_whole(named)}")
        return named
    newest = CheckpointStore(named / folder, keep).newest_intact(notice)
    if newest is None:
        raise ConfigError(_no_checkpoint(choice, folder))
    return newest


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest or a checkpoint's name; it may be damaged."""
    return path.is_dir() and (is_checkpoint_name(path.name) or (path / MANIFEST).exists())


def _is_in_warm_start(config: RunConfig) -> bool:
    """Whether `trainer.resume` names a run that was stopped before its first checkpoint of reinforcement learning, and
    whose warm start has one."""
    named, keep = Path(config.trainer.resume), config.trainer.keep_checkpoints
    if config.trainer.resume in ("auto", "never") or not config.sft.is_asked or _is_checkpoint(named):
        return False
    return not CheckpointStore(named / CHECKPOINTS, keep).find() and bool(
        CheckpointStore(named / WARM_START, keep).find()
    )


def _no_checkpoint(choice: str, folder: str) -> str:
    return (
        f"trainer.resume {choice!r} is neither a whole checkpoint ({faults(Path(choice))[0]}) nor a run with one; "
        f"give runs/NAME, runs/NAME/{folder}/step_N, 'auto' or 'never'; a run that has none starts again by the "
        "command that started it"
    )


def accept_config(run_dir: Path, config: RunConfig, *, checkpoint: Path | None = None, notice: Notice = silent) -> None:
    """Records that a run starts with `config`. Call it once the run can no longer be refused (engine and data have
    loaded the checkpoint) and before this attempt writes anything.

    Files of an earlier attempt that this one does not continue are moved to `earlier/N/`, never deleted: all files if
    the run starts from the beginning or from another run's checkpoint; later checkpoints if it returns to an earlier
    step. Replaces `config.yaml`, and adds a line to `config.history.jsonl`.

    Args:
        run_dir: the run's folder, whose lock this process holds.
        config: the accepted configuration.
        checkpoint: checkpoint to resume from; None: the run starts from the beginning.
        notice: receives lines about moved files and changed settings.

    Raises:
        OutputError: the folder cannot be written to.
    """
    changed = changed_settings(_settings_before(run_dir, checkpoint), config) if checkpoint is not None else {}
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "step": 0 if checkpoint is None else step_of(checkpoint),
        "changed": changed,
        "surroundings": surroundings(),
    }
    with writing("the settings of the run", run_dir):
        _set_aside(run_dir, checkpoint, notice)
        (run_dir / END_FILE).unlink(missing_ok=True)
        atomic_write_text(run_dir / CONFIG_FILE, dump_config(config))
        with (run_dir / HISTORY_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    for field, (old, new) in changed.items():
        notice(f"setting changed since the checkpoint: {field}: {_shown(old)} -> {_shown(new)}")


def changed_settings(before: Mapping[str, Any] | None, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Maps each changed field to (old, new); empty if the earlier settings are not known."""
    if before is None:
        return {}
    old, new = dict(_leaves(before)), dict(_leaves(config.model_dump(mode="json")))
    names = [name for name in (old | new) if old.get(name) != new.get(name) and name not in NOT_SETTINGS]
    return {name: (old.get(name), new.get(name)) for name in names}


def _settings_before(run_dir: Path, checkpoint: Path) -> Mapping[str, Any] | None:
    """Settings with which the checkpoint was written. For checkpoints of supervised training, which have none, those
    of their run."""
    for file in (checkpoint / CONFIG_FILE, run_dir / CONFIG_FILE):
        try:
            settings = yaml.safe_load(read_regular_text(file))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(settings, Mapping):
            return settings
    return None


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values; a list is one value, an empty mapping yields nothing."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _set_aside(run_dir: Path, checkpoint: Path | None, notice: Notice) -> None:
    own = checkpoint is not None and checkpoint.resolve().parent.parent == run_dir.resolve()
    if checkpoint is None or not own:
        # `config.yaml` alone does not count as an attempt: a start that failed early leaves it.
        names = [name for name in OWN_FILES if (run_dir / name).exists()]
        if not any(_holds_work(run_dir / name) for name in names if name != CONFIG_FILE):
            return
        target = _new_folder(run_dir)
        for name in names:
            os.replace(run_dir / name, target / name)
        notice(f"the folder held an earlier attempt that this run does not continue: moved to {target}")
        return
    store = CheckpointStore(checkpoint.parent, 1)
    ranks = {item.path.name: rank for rank, item in enumerate(store.find())}
    later = [name for name, rank in ranks.items() if rank > ranks.get(checkpoint.name, len(ranks))]
    if not later:
        return
    target = _new_folder(run_dir)
    (target / store.folder.name).mkdir()
    for name in later:
        os.replace(store.folder / name, target / store.folder.name / name)
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (run_dir / name).is_file():
            shutil.copy2(run_dir / name, target / name)
    for folder in _later_eval_folders(run_dir, step_of(checkpoint)):
        (target / EVAL_FOLDER).mkdir(exist_ok=True)
        os.replace(folder, target / EVAL_FOLDER / folder.name)
    notice(f"going back to {checkpoint.name}: {', '.join(later)} moved to {target}")


def _holds_work(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0


def eval_folder(run_dir: Path, step: int) -> Path:
    """Folder with the samples of the evaluation after a step."""
    return run_dir / EVAL_FOLDER / f"step_{step:08d}"


def _later_eval_folders(run_dir: Path, step: int) -> list[Path]:
    """Folders of evaluations after `step`."""
    return [
        folder
        for folder in sorted((run_dir / EVAL_FOLDER).glob("step_*"))
        if folder.is_dir() and (digits := folder.name.removeprefix("step_")).isdecimal() and int(digits) > step
    ]


def _new_folder(run_dir: Path) -> Path:
    """The next free `earlier/N/`."""
    number = 1
    while True:
        folder = run_dir / EARLIER / str(number)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."

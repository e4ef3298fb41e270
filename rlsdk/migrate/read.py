"""Finds out whose script a file is, and reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlsdk.config.loading.yaml_text import read_yaml
from rlsdk.interfaces import ConfigError
from rlsdk.migrate import openrlhf, openrlhf_reading, trl, trl_reading, verl, verl_reading
from rlsdk.migrate.draft import Draft, Script, Setting
from rlsdk.migrate.shell import read_shell
from rlsdk.system.files import read_regular

MAX_BYTES = 4 << 20
DRAFTS: Mapping[str, Callable[[Script], Draft]] = {
    trl.PEER: trl.draft_of, verl.PEER: verl.draft_of, openrlhf.PEER: openrlhf.draft_of,
}  # fmt: skip
"""Peer -> what turns its settings into a run file."""


def migrate(file: Path, *, devices: int | None = None, rewards_file: str = "run_rewards.py") -> Draft:
    """The run file of a script, a command or a recipe of another trainer.

    Args:
        file: the file; it is read, never run.
        devices: number of devices, where the script does not say it.
        rewards_file: module for reward functions that the script defines.

    Raises:
        ConfigError: it is of none of the trainers that are known.
        OSError: it cannot be read.
    """
    text = read_regular(file, MAX_BYTES).decode("utf-8", errors="replace")
    script = replace(script_of(text, str(file)), rewards_file=rewards_file)
    if devices is not None:
        given = Setting(name="devices", value=devices, where="--devices")
        script = replace(script, settings={**script.settings, "devices": given})
    return draft_of(script)


def draft_of(script: Script) -> Draft:
    """The run file of settings.

    Raises:
        ConfigError: a setting that enters a product is no number.
    """
    try:
        return DRAFTS[script.peer](script)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{script.source}: a setting of {script.peer} has a value of another type than it expects: {error}"
        ) from error


def script_of(text: str, source: str) -> Script:
    """The settings of a text, of any of the trainers.

    Raises:
        ConfigError: it is of none of the trainers that are known.
    """
    suffix = Path(source).suffix.lower()
    if suffix == ".py":
        return trl_reading.of_python(text, source)
    if suffix in (".yaml", ".yml"):
        return _of_yaml(text, source)
    found = commands(text)
    for accepts, reads in READERS:
        for words in found:
            if accepts(words):
                return reads(words, source)
    raise ConfigError(
        f"{source}: no command starts a training; expected `trl grpo`, `accelerate launch script.py`, `python -m "
        "verl.trainer.main_ppo` or `python -m openrlhf.cli.train_ppo_ray`, with settings; a Python script ends in .py, "
        "a recipe in .yaml"
    )


def commands(text: str) -> Sequence[Sequence[str]]:
    """The commands of a shell script; one that is an argument of another (`bash -c "..."`) counts as well."""
    found: list[Sequence[str]] = []
    for words in read_shell(text).commands:
        inner = [word for word in words if re.search(r"\s(?:-m\s+)?(?:verl|openrlhf|recipe)\.[\w.]+\s", word)]
        found += [part for word in inner for part in read_shell(word).commands]
        found.append(words)
    return found


def _of_yaml(text: str, source: str) -> Script:
    tree, lines = read_yaml(text, source)
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping of settings")
    if verl_reading.is_tree(tree):
        return verl_reading.of_tree(tree, lines, source)
    return trl_reading.of_recipe(tree, lines, source)


READERS: Sequence[tuple[Callable[[Sequence[str]], bool], Callable[[Sequence[str], str], Script]]] = (
    (verl_reading.is_command, verl_reading.of_command),
    (openrlhf_reading.is_command, openrlhf_reading.of_command),
    (trl_reading.is_command, trl_reading.of_command),
)
"""Of commands: which words they know, and what reads them."""

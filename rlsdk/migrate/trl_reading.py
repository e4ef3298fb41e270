"""TRL's scripts, commands and recipes as settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ConfigError
from rlsdk.migrate.draft import Fate, Row, Script, Setting
from rlsdk.migrate.flags import data, flags
from rlsdk.migrate.launcher import launcher_file
from rlsdk.migrate.python_script import read_python
from rlsdk.migrate.shell import read_shell
from rlsdk.migrate.trl_pairs import with_command
from rlsdk.migrate.trl_tables import COMMANDS, CONFIG_OF, CONFIGS, TRAINERS

PEER = "TRL"
LAUNCHERS = frozenset({"accelerate", "torchrun", "python", "python3", "deepspeed", "uv"})


def of_python(text: str, source: str) -> Script:
    """The settings of a script; if it reads its command line, those of the first command in its docstring, too.

    Raises:
        ConfigError: it has no trainer that rlsdk has a command for.
    """
    found = read_python(text, source, CONFIGS, TRAINERS)
    if not found.trainers:
        named = [name for name in CONFIG_OF if re.search(rf"\b{name}\b", text)]
        if not named:
            raise ConfigError(_no_trainer(text, source))
        found.trainers.append((CONFIG_OF[named[0]], source))
    trainer = found.trainers[0][0]
    settings, steps = dict(found.settings), list(found.rows)
    if found.parses and (words := _documented(found.doc)):
        where = f"{source} (command in its docstring)"
        settings = {**settings, **_command_settings(words, where)}
    steps += [_second(name, where) for name, where in found.trainers[1:] if name != trainer]
    return with_command(Script(
        peer=PEER, source=source, command=TRAINERS[trainer], trainer=trainer, settings=settings, steps=steps,
        text=text, launch=launcher_file(settings, source),
    ))  # fmt: skip


def _no_trainer(text: str, source: str) -> str:
    known = ", ".join(TRAINERS)
    other = re.search(r"\b([A-Z]\w+Trainer)\(", text)
    what = f"uses {other[1]}, for which rlsdk has no command" if other else "holds no trainer of TRL"
    return f"{source}: {what}; expected one of {known}"


def _second(name: str, where: str) -> Row:
    why = "a second training: a run file of its own, after this one"
    return Row(fate=Fate.REFUSED, name=name, value=where, why=why, where=where)


def _documented(doc: str) -> Sequence[str]:
    """The words of the first command in a docstring that starts a script."""
    text = re.sub(r"^```\w*$", "", doc, flags=re.M)
    for words in read_shell(text).commands:
        if is_command(words):
            return words
    return ()


def is_command(words: Sequence[str]) -> bool:
    """Whether these words start a training with TRL, as far as the words tell."""
    if "trl" in words[:3]:
        at = list(words).index("trl")
        return len(words) > at + 1 and words[at + 1] in COMMANDS
    starts = bool(words) and words[0].rpartition("/")[2] in LAUNCHERS
    script = next((word for word in words if word.endswith(".py") or word.startswith("trl.scripts.")), None)
    return starts and script is not None and any(word.startswith("--") for word in words[1:])


def of_command(words: Sequence[str], source: str) -> Script:
    """The settings of `trl grpo --flags`, or of `accelerate launch script.py --flags`, with those of the script."""
    settings = _command_settings(words, source)
    script = next((word for word in words if word.endswith(".py")), None)
    found: Script | None = None
    for file in (Path(script), Path(source).parent / script) if script is not None else ():
        if file.is_file():
            found = of_python(file.read_text(encoding="utf-8", errors="replace"), str(file))
            break
    trainer = found.trainer if found is not None else _trainer(words, settings, source)
    recipe = settings.pop("config", None)
    merged = dict(found.settings) if found is not None else {}
    if found is not None and not any(name.startswith("trainer.") for name in merged):
        merged = {}
    if recipe is not None:
        merged |= _recipe(str(recipe.value), source)
    return with_command(Script(
        peer=PEER, source=source, command=TRAINERS[trainer], trainer=trainer, settings={**merged, **settings},
        steps=found.steps if found is not None else (), text=found.text if found is not None else "",
        launch=launcher_file(settings, source),
    ))  # fmt: skip


def _recipe(name: str, source: str) -> Mapping[str, Setting]:
    for file in (Path(name), Path(source).parent / name):
        if file.is_file():
            from rlsdk.config.loading.yaml_text import read_yaml

            tree, lines = read_yaml(file.read_text(encoding="utf-8", errors="replace"), str(file))
            return _flat_settings(tree if isinstance(tree, dict) else {}, str(file), lines)
    return {"config": Setting(name="config", value=name, where=source)}


def of_recipe(tree: Mapping[str, Any], lines: Mapping[Any, int], source: str) -> Script:
    """The settings of a YAML recipe for `trl grpo --config`."""
    settings = _flat_settings(tree, source, lines)
    trainer = _trainer((), settings, source)
    return with_command(Script(peer=PEER, source=source, command=TRAINERS[trainer], trainer=trainer, settings=settings))


def _flat_settings(tree: Mapping[str, Any], source: str, lines: Mapping[Any, int]) -> dict[str, Setting]:
    found = {}
    for name, value in tree.items():
        line = lines.get((name,))
        given = data(value) if isinstance(value, str) else value
        found[str(name)] = Setting(name=str(name), value=given, where=f"{source}:{line}" if line else source)
    return found


def _trainer(words: Sequence[str], settings: Mapping[str, Setting], source: str) -> str:
    """The trainer that a command names, else the one whose settings these are."""
    if "trl" in words and list(words).index("trl") + 1 < len(words):
        return COMMANDS[words[list(words).index("trl") + 1]]
    script = next((word for word in words if word.endswith(".py") or word.startswith("trl.scripts.")), "")
    for text in (script, Path(source).name, source):
        for word, trainer in COMMANDS.items():
            if re.search(rf"(?<![a-z]){word}(?![a-z])|{word}_", text.lower()):
                return trainer
    if {"num_generations", "max_completion_length", "reward_funcs"} & settings.keys():
        return "GRPOTrainer"
    if {"packing", "dataset_text_field", "assistant_only_loss", "max_seq_length"} & settings.keys():
        return "SFTTrainer"
    if {"beta", "loss_type"} & settings.keys():
        return "DPOTrainer"
    if "learning_rate" in settings:
        return "SFTTrainer"
    raise ConfigError(f"{source}: the text does not tell which trainer of TRL it is for; name the file for it, such as "
                      "grpo.yaml, sft.yaml, dpo.yaml, reward.yaml")  # fmt: skip


def _command_settings(words: Sequence[str], where: str) -> dict[str, Setting]:
    """The flags of a launcher, under its name, and of the script."""
    words = list(words)
    at = next((at for at, word in enumerate(words) if word.endswith(".py") or word.startswith("trl.scripts.")), None)
    if at is None:
        at = words.index("trl") + 1 if "trl" in words else 0
    launcher = "torchrun" if "torchrun" in words[:at] else "accelerate"
    launch = flags(words[:at], where, {}) if at and words[0] not in ("python", "python3") else {}
    named = {f"{launcher}.{name}": Setting(name=f"{launcher}.{name}", value=one.value, where=where)
             for name, one in launch.items()}  # fmt: skip
    own = flags(words[at + 1 :], where, {})
    for name in [name for name in own if name.startswith("no_") and own[name].value is True]:
        positive = name.removeprefix("no_")
        own[positive] = Setting(name=positive, value=False, where=where)
        del own[name]
    return {**named, **own}

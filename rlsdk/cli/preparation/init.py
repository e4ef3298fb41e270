"""`rlsdk init`: writes a commented YAML file for a model, data and a machine; values come from flags or questions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlsdk.config import RunConfig, load_config
from rlsdk.config.introspection.describe import describe_options
from rlsdk.data import check_source
from rlsdk.data.sources import INSTALLABLE
from rlsdk.interfaces import BackendKind, ConfigError, RlsdkError, nearest
from rlsdk.registry import FIRST_PARTY, ComponentKind, Registry
from rlsdk.system.atomic import atomic_write_text
from rlsdk.system.printable import printable

WIDTH = 100
TEMPLATES = {
    "gsm8k": "{prompt}\nThink step by step. End with a line that holds #### and the final number.",
    "math": "{prompt}\nThink step by step. Put the final answer into \\boxed{{}}.",
    "choice": "{prompt}\nEnd with a line that holds the letter of your answer in \\boxed{{}}.",
}
"""Reward -> prompt template that tells the model how to mark its answer."""
QUESTIONS = {
    "model": ("model: folder, or name on the hub", "Qwen/Qwen2.5-0.5B-Instruct"),
    "data": ("data: file, folder, org/name on the hub, or SOURCE:REST of a plugin", "openai/gsm8k:main"),
    "reward": ("reward: gsm8k, math, code, ..., or file.py:fn", "gsm8k"),
}
"""Field without a default -> its question, and the value of an empty answer."""
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The user's choices for the file."""

    model: str
    data: str
    reward: str
    algorithm: str = "grpo"
    nodes: int = 1
    devices: int = 1
    """Devices on each node; with `gpu` False, 1 means the CPU of this machine."""
    gpu: bool = True
    train_backend: str | None = None
    rollout_backend: str | None = None


def run(file: Path, given: Mapping[str, Any], *, force: bool) -> None:
    """Writes the file and prints the next commands.

    Raises:
        ConfigError: the file exists or cannot be written, or a value is missing and there is no terminal to ask for it.
    """
    if file.exists() and not force:
        raise ConfigError(f"{str(file)!r} already exists; give another name, or --force")
    registry = Registry.discover()
    wishes = _ask_at_terminal(given, registry)
    text = file_text(settings(wishes, registry), wishes)
    problem = refused(text, registry)
    try:
        atomic_write_text(file, text)
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be written: {error.strerror}; choose another path") from error
    name = shlex.quote(str(file))
    print(printable(f"wrote {file}"))
    if problem:
        print(printable(f"this machine cannot use the file yet: {problem}"))
    kind = f" --hardware h100:{wishes.nodes}x{wishes.devices}" if wishes.gpu else ""
    print(printable(f"\nnext:\n  rlsdk plan --config {name}{kind}\n  rlsdk train --config {name}"))


def _ask_at_terminal(given: Mapping[str, Any], registry: Registry) -> Wishes:
    """Calls `asked` with the terminal if there is one. Ctrl-C exits with 130."""
    try:
        return asked(given, input if sys.stdin.isatty() else None, registry)
    except EOFError:
        print()
        raise ConfigError(f"rlsdk init: the input ended, nothing was written; {_flags(_missing(given))}") from None
    except KeyboardInterrupt:
        print("\nnothing was written", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def asked(given: Mapping[str, Any], ask: Callable[[str], str] | None, registry: Registry) -> Wishes:
    """Returns the user's choices; asks for missing values, and repeats a question after an invalid answer.

    Args:
        given: values of flags; None if a flag is missing.
        ask: prints a question and returns the typed line; None: there is no terminal.
        registry: what is installed.

    Raises:
        ConfigError: a value without a default is missing and there is no terminal, or `data` or `reward` is
            misspelt.
    """
    known = {name: value for name, value in given.items() if value is not None}
    for name in ("data", "reward"):
        if problem := _fault(name, registry, known[name]) if name in known else "":
            raise ConfigError(f"--{name}: {problem}")
    missing = _missing(given)
    if missing and ask is None:
        raise ConfigError(f"rlsdk init: values are missing and there is no terminal to ask; {_flags(missing)}")
    for name in missing:
        assert ask is not None
        question, suggested = QUESTIONS[name]
        if name == "reward" and (own := str(known["data"]).partition(":")[0]) in registry.usable(ComponentKind.REWARD):
            suggested = own  # A source of a plugin that grades its rows, too.
        known[name] = _answer(ask, question, suggested, partial(_fault, name, registry))
    if missing and ask is not None and "devices" not in known:
        typed = _answer(ask, "GPUs on each machine, 0 for the CPU", "1", partial(_fault, "devices", registry))
        known |= {"devices": max(int(typed), 1), "gpu": int(typed) > 0}
    return Wishes(**known)


def _missing(given: Mapping[str, Any]) -> list[str]:
    return [name for name in QUESTIONS if given.get(name) is None]


def _flags(missing: Iterable[str]) -> str:
    return "add " + " ".join(f"--{name} ..." for name in missing)


def _answer(ask: Callable[[str], str], question: str, suggested: str, fault: Callable[[str], str]) -> str:
    """Returns the typed answer; for an empty line, the suggestion."""
    while problem := fault(typed := ask(f"{question} ({suggested}): ").strip() or suggested):
        print(printable(problem))
    return typed


def _fault(name: str, registry: Registry, typed: str) -> str:
    """Returns what is wrong with an answer; empty if no problem is found."""
    if name == "devices" and not typed.isdecimal():
        return f"{typed!r} is not a whole number, such as 8"
    kinds, rewards = registry.usable(ComponentKind.DATASET), registry.usable(ComponentKind.REWARD)
    if name == "data" and ":" in typed and typed.partition(":")[0] in {*kinds, *INSTALLABLE}:
        try:
            check_source(typed, kinds=kinds, resolve=lambda kind: registry.component(ComponentKind.DATASET, kind))
        except RlsdkError as error:
            return str(error)
    if name == "reward" and ":" not in typed and typed not in rewards:
        return f"{typed!r} is not a reward{nearest(typed, rewards) or ';'} registered: {', '.join(sorted(rewards))}"
    return ""


def settings(wishes: Wishes, registry: Registry) -> dict[str, Any]:
    """Returns the fields of the file, nested: only those that a user is likely to change."""
    names = {row.name for row in registry.rows() if row.state.usable}
    trains = wishes.train_backend or _first(BackendKind.TRAIN, registry, names)
    rolls = wishes.rollout_backend or _first(BackendKind.ROLLOUT, registry, names)
    reward: dict[str, Any] = {"name": wishes.reward}
    template = TEMPLATES.get(wishes.reward)
    return {
        "model": {"path": wishes.model, "dtype": "bfloat16" if wishes.gpu else "float32"},
        "data": {
            "train": wishes.data,
            **({"prompt_template": template} if template else {}),
            "max_prompt_tokens": 1024,
            "num_eval_rows": 256,
        },
        "rewards": [reward],
        "algorithm": {"recipe": wishes.algorithm},
        "train": {
            "backend": trains,
            "optim": {"lr": 1e-6, "warmup_steps": 10},
            "micro_batch_tokens": 16384,
            "activation_checkpointing": wishes.gpu,
        },
        "rollout": {
            "backend": rolls,
            "temperature": 1.0,
            "max_response_tokens": 1024 if wishes.gpu else 256,
            "max_running_samples": 256 if wishes.gpu else 64,
        },
        "eval": {"every_steps": 20},
        "placement": {
            "num_nodes": wishes.nodes,
            "devices_per_node": wishes.devices,
            "device": "cuda" if wishes.gpu else "cpu",
            **({"ray_address": "auto"} if wishes.nodes > 1 else {}),
        },
        "trainer": {
            "steps": 200,
            "prompts_per_step": 64 if wishes.gpu else 8,
            "samples_per_prompt": 8,
            "save_every_steps": 50,
        },
    }


def file_text(fields: Mapping[str, Any], wishes: Wishes) -> str:
    """Returns YAML with a comment above each field that explains it."""
    texts = {option.path: option.doc for option in describe_options(RunConfig)}
    head = [
        f"# {wishes.algorithm} of {wishes.model} on {wishes.data}; written by rlsdk init.",
        "# All fields: rlsdk train --help. Completion in editors: rlsdk config schema -o schema.json",
    ]
    return "\n".join([*(printable(line) for line in head), *_lines(fields, "", texts)]) + "\n"


def refused(text: str, registry: Registry) -> str:
    """Returns why the configuration cannot be used on this machine; empty if it can."""
    try:
        load_config(values=yaml.safe_load(text), registry=registry)
    except ConfigError as error:
        return str(error)
    return ""


def _first(kind: BackendKind, registry: Registry, usable: set[str]) -> str:
    """Returns the first usable backend of rlsdk's own plugins, else of another's, else a built-in one."""
    found = [row for row in registry.rows() if row.kind == kind and row.name in usable]
    outside = [row.name for row in found if row.source.distribution != "rlsdk"]
    known = [name for name in FIRST_PARTY[kind] if name in outside]
    return (known or outside or [row.name for row in found])[0]


def _lines(fields: Mapping[str, Any], path: str, texts: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * path.count(".")
    for name, value in fields.items():
        here = f"{path}{name}"
        if not path:
            yield ""
            yield f"# {RunConfig.model_fields[name].description}"
        elif here in texts:
            yield from _comment(texts[here], indent)
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{here}.", texts)
        else:
            yield from (f"{indent}{line}" for line in _written(name, value))


def _written(name: str, value: Any) -> Iterator[str]:
    """Yields a field as lines of YAML; a text of several lines becomes a block."""
    lines = value.split("\n") if isinstance(value, str) else []
    if len(lines) > 1 and value == value.strip() and all(line.isprintable() for line in lines):
        yield f"{name}: |-"
        yield from (f"  {line}" for line in lines)
    else:
        yield from yaml.safe_dump({name: value}, allow_unicode=True, width=10_000).rstrip("\n").splitlines()


def _comment(text: str, indent: str) -> Iterator[str]:
    import textwrap

    yield from textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")

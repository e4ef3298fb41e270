"""`--help` of the commands that take a run's configuration: every field, its type, default and meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rlsdk.config import RunConfig
from rlsdk.config.checks.commands import READERS
from rlsdk.config.introspection.describe import OptionDoc, describe_options
from rlsdk.config.loading.overrides import ALIASES
from rlsdk.config.loading.trust import TRUST_FLAG

WIDTH = 100


def command_help(command: str, summary: str) -> str:
    """Returns the help text of a command."""
    return "\n".join(_lines(command, summary))


def _lines(command: str, summary: str) -> Iterator[str]:
    yield f"Usage: rlsdk {command} [--config FILE]... [--FIELD VALUE]...\n\n{summary}\n"
    yield "Flags override files, and later ones override earlier ones. `--a.b 1`, `--a.b=1`, and `--a.b` for true."
    yield "Write lists and mappings as YAML: --train.optim.betas '[0.9, 0.95]'."
    yield "A backend's own options: --train.BACKEND.OPTION, --rollout.BACKEND.OPTION; see `rlsdk plugins info BACKEND`."
    yield f"\n{TRUST_FLAG} also runs the code that a run's own config.yaml names: rewards, losses and callbacks in"
    yield "files or modules, code that comes with a model. Without the flag, such a configuration is refused."
    reads = READERS[command].may_read
    yield "\nShort forms:"
    yield from (f"  --{flag:<17} {field}" for flag, field in ALIASES.items() if reads(field))
    section = ""
    for option in describe_options(RunConfig):
        if not reads(option.path):
            continue
        name = option.path.partition(".")[0]
        if name != section:
            section = name
            yield f"\n{RunConfig.model_fields[name].description}"
        yield from _option(option)


def _option(option: OptionDoc) -> Iterator[str]:
    yield f"  --{option.path}  {option.type}" + (f", default {option.default}" if option.default else "")
    yield textwrap.fill(option.doc, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
